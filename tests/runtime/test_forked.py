"""Forked children: nothing of rlmesh acts in them, and what they ask of it is refused at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from rlmesh.testing import LocalCluster
from tests.own_time import HANG_S, OwnTime
from tests.runtime import forking_job

REFUSED = (
    "call", "large", "notify", "idempotent", "result", "wait", "done", "cancel", "stream", "new stream", "report",
    "alarm", "events", "step_boundary",
)  # fmt: skip


@pytest.mark.case("b05")
@pytest.mark.case("b26")
def test_children_of_a_member_end_by_themselves(tmp_path: Path, own_time: OwnTime) -> None:
    out = tmp_path / "out.json"
    with LocalCluster(run_root=tmp_path):
        forking_job.build(out).submit("forking")
    seen: dict[str, Any] = json.loads(out.read_text())

    library = seen["library"]
    assert (library["code"], library["terminated"], library["program"]) == (0, -signal.SIGTERM, 0)
    assert library["mapped"] == [0, 1, 4, 9] * 2
    assert own_time.of(library["s"]) < 5.0, "without rlmesh it takes a tenth of a second"

    asked = seen["asked"]
    assert {name: asked[name]["type"] for name in REFUSED} == dict.fromkeys(REFUSED, "UsageError")
    for name in REFUSED:
        assert "was forked from" in asked[name]["text"] and "in the parent" in asked[name]["text"], name
        assert own_time.of(asked[name]["s"]) < 1.0, name
    assert "TRAINER:0" in asked["call"]["text"]
    assert asked["rank"]["text"] == "0", "who it is may be asked in a child"
    assert "socket:" not in asked["descriptors"]["text"]
    assert asked["sigterm"]["text"] == "True"

    assert seen["parent"] == ["for the parent", list(range(100)), len(forking_job.BIG)]
    assert seen["methods"] == [0, 7, len(forking_job.BIG)], "a child that returns from a method answers nobody"
    assert seen["exit"] == [["parent", 3], ["parent", 1], ["parent", 0]]

    (run,) = (path for path in tmp_path.iterdir() if path.is_dir())
    log = (run / "logs" / "TRAINER-0.log").read_text()
    assert "said by a child" in log
    assert "ZeroDivisionError" in log
    assert log.count("teardown in True") == 1 and "teardown in False" not in log
    assert not (run / "metrics.jsonl").exists() or "x" not in (run / "metrics.jsonl").read_text()


def run_script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text("import os, sys, signal, time\n" + textwrap.dedent(text))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[1:])}
    return subprocess.run([sys.executable, script], cwd=folder, env=env, capture_output=True, text=True, timeout=HANG_S)


@pytest.mark.case("b26")
@pytest.mark.parametrize("transport", ["unix", "ipc", "tcp", "loop"])
def test_children_of_a_program_with_members_in_its_process_end_by_themselves(tmp_path: Path, transport: str) -> None:
    """The child leaves the block, the interpreter and the runtimes by themselves; the parent's go on."""
    done = run_script(
        tmp_path,
        f"""
        from rlmesh import RoleGroup, rpc
        from rlmesh.testing import InProcessCluster

        class Echo:
            @rpc
            def echo(self, data): return data

        with InProcessCluster("{transport}") as cluster:
            cluster.serve("ECHO", Echo())
            big = bytes(1 << 20)
            assert RoleGroup("ECHO").call_rank0("echo", big).result() == big
            folder = cluster.socket_dir
            if os.fork() == 0:
                sys.exit(5)
            assert os.waitstatus_to_exitcode(os.wait()[1]) == 5
            if os.fork() == 0:
                try:
                    RoleGroup("ECHO").call_rank0("echo", big)
                finally:
                    cluster.close()
            assert os.waitstatus_to_exitcode(os.wait()[1]) == 1
            assert folder.is_dir()
            assert RoleGroup("ECHO").call_rank0("echo", big).result() == big
        assert not folder.exists()
        print("went on")
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "went on\n"
    assert done.stderr.count("UsageError: ") == 1 and "was forked from caller" in done.stderr


@pytest.mark.case("b26")
def test_a_child_of_a_service_that_embeds_a_runtime_may_open_its_own(tmp_path: Path) -> None:
    """A child may open a runtime of its own, on the thread that carried its parent's loop."""
    done = run_script(
        tmp_path,
        """
        import asyncio, multiprocessing
        from rlmesh import Runtime, rpc

        os.mkdir("sockets", 0o700)
        KEY = bytes(range(32))

        class Echo:
            @rpc
            async def echo(self, data): return data

        def ask(endpoint):
            with Runtime.start(name="child", key=KEY, bind=False) as runtime:
                assert runtime.peer("E", endpoint).call("echo", 3).result() == 3

        async def main():
            async with Runtime.open(name="service", key=KEY, socket_dir="sockets") as runtime:
                runtime.serve("E", Echo())
                async with Runtime.open(name="caller", key=KEY, bind=False) as caller:
                    peer = caller.peer("E", runtime.endpoint)
                    assert await peer.call("echo", 1) == 1
                    child = multiprocessing.get_context("fork").Process(target=ask, args=(runtime.endpoint,))
                    child.start()
                    await asyncio.to_thread(child.join, 20)
                    assert child.exitcode == 0, child.exitcode
                    assert await peer.call("echo", 2) == 2
                    assert len(os.listdir("sockets")) == 1
            assert os.listdir("sockets") == []

        asyncio.run(main())
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.case("b26")
def test_children_of_a_script_under_the_launcher_end_where_the_script_does(tmp_path: Path) -> None:
    done = run_script(
        tmp_path,
        """
        from rlmesh.cli.main import main

        open("job.py", "w").write(
            "import os, sys\\n"
            "def code(work):\\n"
            "    if (pid := os.fork()) == 0: work(); return 'child'\\n"
            "    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\\n"
            "codes = [code(lambda: sys.exit(3)), code(lambda: 1 / 0), code(lambda: None)]\\n"
            "if 'child' not in codes: print(codes)\\n"
        )
        print("ends", main(["launch", "job.py"]))
        """,
    )
    assert done.stdout == "[3, 1, 0]\nends 0\n", done.stderr


@pytest.mark.case("b26")
def test_children_of_the_driver_hold_nothing_of_the_job(tmp_path: Path) -> None:
    """A child outlives neither the job's guardians nor the driver's hold on the run directory, and ends on SIGTERM."""
    (tmp_path / "role.py").write_text(
        "import time\nclass Waits:\n    def run(self):\n        time.sleep(0.5)\n        print('ran')\n"
    )
    done = run_script(
        tmp_path,
        """
        import multiprocessing
        from rlmesh import DLJobBuilder

        if __name__ == "__main__":
            fork = multiprocessing.get_context("fork")
            job = DLJobBuilder().role("W").run("role.Waits").build()
            handle = job.submit("forks", blocking=False, run_dir="run", view="none")
            while not handle.status.members:
                time.sleep(0.01)
            stays, leaves = (fork.Process(target=time.sleep, args=(60,)) for _ in range(2))
            stays.start()
            leaves.start()
            if (pid := os.fork()) == 0:
                try:
                    handle.result()
                finally:
                    handle.stop()
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
            leaves.terminate()
            leaves.join(20)
            assert leaves.exitcode == -signal.SIGTERM
            result = handle.result()
            assert result.status.stage == "succeeded"
            job.submit("again", run_dir="run", view="none")  # the child does not hold the directory
            stays.kill()
            stays.join()
            print("both ran")
        """,
    )
    assert done.returncode == 0, done.stderr
    assert "both ran" in done.stdout
    assert "the process that started the job" in done.stderr


@pytest.mark.case("b26")
def test_a_child_keeps_the_shared_memory_that_its_parent_gives_back(tmp_path: Path) -> None:
    done = run_script(
        tmp_path,
        """
        import numpy as np
        from rlmesh import RoleGroup, rpc
        from rlmesh.testing import InProcessCluster

        class Make:
            @rpc
            def make(self, n): return np.full(1 << 18, n, dtype=np.int64)

        def give_backs_arrive(maker, used):
            while (now := maker._shm.exchange.pool.stats().used_bytes) > used:
                time.sleep(0.01)

        with InProcessCluster("unix") as cluster:
            cluster.serve("MAKE", Make())
            maker = cluster.runtimes[-1]
            make = lambda n: RoleGroup("MAKE").call_rank0("make", n).result()
            array = make(1)
            read, write = os.pipe()
            if (pid := os.fork()) == 0:
                os.read(read, 1)
                os._exit(0 if (array == 1).all() else 9)
            size = array.nbytes
            del array
            for n in range(2, 12):
                assert (make(n) == n).all()
                give_backs_arrive(maker, size)  # all but the one that the child holds
            os.write(write, b"x")
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "the memory was used again"
            give_backs_arrive(maker, size)
            maker._shm.exchange.pool.trim(60)  # which a timer does
            assert maker._shm.exchange.pool.stats().used_bytes == 0
        """,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.case("b26")
def test_forks_at_any_moment_of_calls(tmp_path: Path) -> None:
    """Other threads call all the time: whatever locks they hold, the child ends and the parent goes on."""
    done = run_script(
        tmp_path,
        """
        import threading
        import numpy as np
        from rlmesh import RoleGroup, rpc
        from rlmesh.errors import UsageError
        from rlmesh.testing import InProcessCluster

        class Echo:
            @rpc
            def echo(self, data): return data

        with InProcessCluster("unix") as cluster:
            cluster.serve("ECHO", Echo())
            going, counts = True, [0, 0]

            def call(at, data):
                while going:
                    answer = RoleGroup("ECHO").call_rank0("echo", data).result()
                    assert (answer == data) if at == 0 else (answer == data).all()
                    counts[at] += 1
                    time.sleep(0.0002)

            threads = [threading.Thread(target=call, args=(at, data)) for at, data in
                       enumerate([b"small", np.arange(1 << 16)])]
            for thread in threads: thread.start()
            for _ in range(40):
                pending = RoleGroup("ECHO").call_rank0("echo", 1)
                if (pid := os.fork()) == 0:
                    refused = 0
                    for ask in (lambda: RoleGroup("ECHO").call_rank0("echo", 1),
                                lambda: cluster.caller.activity.waiting(),
                                lambda: RoleGroup("ECHO").call_rank0("echo", np.zeros(1 << 16))):
                        try: ask()
                        except UsageError: refused += 1
                    try:
                        refused += pending.result() == 1  # it came before the fork
                    except UsageError:
                        refused += 1
                    sys.exit(refused)
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
                assert pending.result() == 1
            going = False
            for thread in threads: thread.join()
            assert min(counts) > 10, counts
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.case("b26")
def test_a_signal_to_a_child_finds_no_handler_of_its_parents(tmp_path: Path) -> None:
    """Also one that comes at once, and in a child that a thread forks."""
    done = run_script(
        tmp_path,
        """
        import threading
        from rlmesh.runtime.process import forked

        got = []
        forked.handle(signal.SIGTERM, lambda number, frame: got.append(number))

        def fork_and_end():
            for _ in range(30):
                if (pid := os.fork()) == 0:
                    time.sleep(30)
                    os._exit(3)
                os.kill(pid, signal.SIGTERM)
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
            assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()

        thread = threading.Thread(target=fork_and_end)
        thread.start()
        thread.join()
        fork_and_end()
        assert got == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert got == [signal.SIGTERM]
        print("done")
        """,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)
