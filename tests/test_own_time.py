"""The clock of the processes under test leaves out the time in which others keep them from the cores, and nothing
else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import own_time as own_time_module
from tests.leaks import MARKER
from tests.own_time import HANG_S, Delays, Family, Look, OwnTime, RunQueue, thread_counters

SPIN = "import time\nend = time.process_time() + {s}\nwhile time.process_time() < end: pass"
SLEEP = "import sys, time\nprint('up', flush=True)\ntime.sleep(60)"


@contextmanager
def running(count: int, code: str, **options: object) -> Iterator[list[subprocess.Popen[str]]]:
    command = [sys.executable, "-I", "-S", "-c", code]
    processes = [subprocess.Popen(command, text=True, **options) for _ in range(count)]  # type: ignore[call-overload]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def counters(monkeypatch: pytest.MonkeyPatch, cores: int) -> tuple[list[float], dict[int, list[tuple[int, int]]]]:
    """A clock and the threads' counters in milliseconds, both for the test to set."""
    now, threads = [0.0], dict[int, list[tuple[int, int]]]()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(
        own_time_module,
        "thread_counters",
        lambda pid: [
            (f"{pid}/{place}", (ran * 1_000_000, waited * 1_000_000))
            for place, (ran, waited) in enumerate(threads.get(pid, ()))
        ],
    )
    return now, threads


def test_a_look_tells_the_longest_wait_and_the_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    now, threads = counters(monkeypatch, cores=2)
    threads.update({1: [(900, 500), (0, 0)], 2: [(0, 0)]})
    queue = RunQueue()
    now[0] = 0.1
    assert queue.look([1, 2]) == pytest.approx((0.1, 0.1, 0.0, 0.0)), "what came before the first look is not counted"
    now[0] = 0.2
    threads.update({1: [(950, 520), (0, 10)], 2: [(50, 30)]})
    assert queue.look([1, 2]) == pytest.approx((0.2, 0.1, 0.03, 0.5))
    now[0] = 0.3
    threads.update({1: [(950, 590), (0, 10)], 3: [(100, 1000)]})
    assert queue.look([1, 2, 3]) == pytest.approx((0.3, 0.1, 0.07, 0.0)), "2 is gone, 3 is new"


def looks(*waited_and_ran: tuple[float, float]) -> list[Look]:
    """Looks that are a second apart, the first at 1."""
    return [Look(at, 1.0, waited_s, ran) for at, (waited_s, ran) in enumerate(waited_and_ran, 1)]


def test_the_waits_between_two_moments_are_added_up() -> None:
    delays = Delays(looks((0.5, 0), (0.25, 0), (0, 0), (1.0, 0)))
    assert delays.between(0, 4) == delays.between(-5, 9) == 1.75
    assert delays.between(1, 4) == 1.25
    assert delays.between(0, 3) == 0.75
    assert delays.between(3.5, 4) == 0.5, "not more than the time that passed"
    assert Delays([]).between(0, 4) == 0.0


def test_a_wait_reaches_back_over_earlier_looks_once() -> None:
    assert Delays(looks((0, 0), (0, 0), (0, 0), (2.5, 0))).between(0, 4) == 2.5
    assert Delays(looks((0, 0), (0, 0), (0, 0), (2.5, 0))).between(0, 2) == 0.5
    assert Delays(looks((0, 0), (0, 0), (2.0, 0), (3.0, 0))).between(0, 4) == 3.0, "two waited at the same time"
    assert Delays(looks((0, 0), (9.0, 0))).between(0, 2) == 2.0


def test_the_cores_that_the_product_itself_uses_are_not_counted() -> None:
    assert Delays(looks((1.0, 1.0))).between(0, 1) == 0.0
    assert Delays(looks((1.0, 0.5))).between(0, 1) == 0.5


def test_the_interval_with_the_greatest_delay_is_found() -> None:
    delays = Delays(looks((0.5, 0), (0, 0), (0.25, 0), (1.0, 0), (0, 0)))
    assert delays.longest(1, 0) == 1.0
    assert delays.longest(2, 0) == 1.25
    assert delays.longest(9, 0) == 1.75 and delays.longest(9, 1) == 1.25
    assert delays.longest(1, 5) == 0.0


def test_the_kernel_counts_a_thread_that_runs() -> None:
    def ran_ns() -> int:
        return sum(ran for _, (ran, _) in thread_counters(os.getpid()))

    before, end = ran_ns(), time.process_time() + 0.05
    while time.process_time() < end:
        pass
    assert ran_ns() - before >= 40_000_000
    assert thread_counters(2**22 + 1) == [], "there is no such process"


def test_children_and_marked_processes_are_under_test() -> None:
    mark = f"{MARKER}={os.environ[MARKER]}"
    family = Family(os.getpid(), mark)
    unmarked = {name: value for name, value in os.environ.items() if name != MARKER}
    with running(1, SLEEP, stdout=subprocess.PIPE, env=unmarked) as (child,):
        assert child.stdout is not None and child.stdout.readline() == "up\n"
        pids = family.pids()
        assert {os.getpid(), child.pid} <= pids and os.getppid() not in pids
    with running(1, SLEEP, stdout=subprocess.PIPE) as (child,):
        assert child.stdout is not None and child.stdout.readline() == "up\n"
        assert child.pid in Family(2**22 + 1, mark).pids(), "it carries the mark of the session"
        assert child.pid not in Family(2**22 + 1, mark + "-another").pids()
    assert child.pid not in family.pids(), "it has ended"


def test_waiting_for_a_core_that_others_have_is_left_out(own_time: OwnTime) -> None:
    """Strangers, three times as many as there are cores, run beside a process of this test that needs half a second."""
    cores = len(os.sched_getaffinity(0))
    # Strangers are neither children nor marked.
    code = f"import os, sys\nif os.fork(): os._exit(0)\nprint(os.getpid(), flush=True)\n{SPIN.format(s=30)}"
    unmarked = {name: value for name, value in os.environ.items() if name != MARKER}
    with running(3 * cores, code, stdout=subprocess.PIPE, env=unmarked) as strangers:
        pids = [int(stranger.stdout.readline()) for stranger in strangers if stranger.stdout is not None]
        try:
            began = time.monotonic()
            with running(1, SPIN.format(s=0.5)) as (process,):
                assert process.wait(HANG_S) == 0
            took_s = time.monotonic() - began
            own_s = own_time.since(began)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
    assert own_s >= 0.5 * 0.9, "the process ran for so long"
    assert took_s - own_s > 0.3 * took_s, "and waited for the most of the time"


def test_sleep_is_not_left_out(own_time: OwnTime) -> None:
    began = time.monotonic()
    time.sleep(1.0)
    assert own_time.since(began) > 0.9 and own_time.waited_s < 0.2 and own_time.of(1.0) > 0.8


def test_the_products_own_spinning_is_not_left_out(own_time: OwnTime) -> None:
    """Three processes of this test for each core wait for each other only, as far as others leave them the cores."""
    cores = len(os.sched_getaffinity(0))
    began = time.monotonic()
    with running(3 * cores, SPIN.format(s=0.3)) as processes:
        assert [process.wait(HANG_S) for process in processes] == [0] * (3 * cores)
    assert own_time.since(began) >= 3 * 0.3 * 0.8, "the cores together need so long for them"


def test_the_sampler_ends_with_the_test_process(tmp_path: Path) -> None:
    code = (
        "import sys\nsys.path.insert(0, sys.argv[1])\nfrom pathlib import Path\nfrom tests.own_time import Sampler\n"
        "print(Sampler(Path(sys.argv[2]), 'A=b').pid)"
    )
    command = [sys.executable, "-c", code, str(Path(own_time_module.__file__).parents[1]), str(tmp_path)]
    pid = int(subprocess.run(command, check=True, timeout=HANG_S, stdout=subprocess.PIPE).stdout)
    deadline = time.monotonic() + HANG_S
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
