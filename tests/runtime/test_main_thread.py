"""``@rpc(main_thread=True)``: methods that only the process's main thread may run."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from rlmesh import rpc
from rlmesh.errors import UsageError
from rlmesh.runtime.serving import executors
from rlmesh.runtime.serving.executors import SerialExecutor
from rlmesh.testing import LocalCluster
from tests.own_time import HANG_S
from tests.runtime import main_thread_job


def test_main_thread_methods_run_there_whatever_the_member_does(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with LocalCluster(run_root=tmp_path):
        main_thread_job.build(out).submit("main")
    seen = json.loads(out.read_text())
    assert seen["served"] == [[True], ["set on MainThread"]]
    assert seen["busy"] == [[False], ["set on MainThread"]], "run() has the main thread: at a step's boundary"
    assert seen["items"] == [True] * 40
    assert seen["mixed"] == 200
    assert seen["last"] == ["set on MainThread"], "or when run() has returned"


def test_no_other_method_runs_meanwhile() -> None:
    executor = SerialExecutor("m")
    executor.hold()
    order: list[str] = []
    began, go = threading.Event(), threading.Event()

    def slow() -> None:
        began.set()
        assert go.wait(HANG_S)
        order.append("slow")

    with executor.busy():
        executor.submit(slow)
        assert began.wait(HANG_S)
        executor.submit(lambda: order.append("behind"))
        executor.submit(lambda: order.append("main"), main=True)
        threading.Timer(0.05, go.set).start()
        executor.run_waiting()
        assert order[:2] == ["slow", "main"], "it waits for the method that runs, and goes before the next one"
    executor.close()
    assert order == ["slow", "main", "behind"]


def test_a_method_that_waits_for_the_next_step_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "HAND_OVER_S", 0.02)
    executor = SerialExecutor("m")
    executor.hold()
    order: list[str] = []
    began, passed = threading.Event(), threading.Event()

    def wants_a_step() -> None:
        began.set()
        assert passed.wait(HANG_S)
        order.append("step")

    with executor.busy():
        executor.submit(wants_a_step)
        assert began.wait(HANG_S)
        executor.submit(lambda: order.append("main"), main=True)
        executor.run_waiting()
        assert order == []
        passed.set()
    executor.close()
    assert order == ["step", "main"], "run() has returned"


def test_other_threads_boundaries_run_none_of_them() -> None:
    executor = SerialExecutor("m")
    executor.hold()
    ran: list[int] = []
    with executor.busy():
        executor.submit(lambda: ran.append(threading.get_ident()), main=True)
        other = threading.Thread(target=executor.run_waiting)
        other.start()
        other.join()
        assert ran == []
    executor.close()
    assert ran == [threading.get_ident()]


def test_wrong_use_is_said_where_it_is_written() -> None:
    with pytest.raises(UsageError, match="async def, which runs on a loop"):

        class Wrong:
            @rpc(main_thread=True)
            async def method(self) -> None: ...

    with pytest.raises(UsageError, match="there is one main thread"):
        rpc(main_thread=True, concurrent=2)
