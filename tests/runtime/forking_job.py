"""A trainer that forks in every way: ``forking_job.py OUT`` writes what it saw there, as JSON."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlmesh import DLJob, DLJobBuilder, RoleGroup, current_worker, rpc

LIMIT_S = 20.0
BIG = bytes(1 << 20)
fork = multiprocessing.get_context("fork")


def square(x: int) -> int:
    return x * x


class Data:
    @rpc
    def get(self, text: str, pause_s: float = 0.0) -> str:
        time.sleep(pause_s)
        return f"for {text}"

    @rpc
    def numbers(self) -> Any:
        yield from range(100)

    @rpc
    def echo(self, data: bytes) -> int:
        return len(data)

    @rpc
    def fork_and_return(self) -> int:
        """The child comes back into rlmesh's code, where it has nobody to answer."""
        return os.fork()

    @rpc
    def fork_and_exit(self) -> int:
        if (pid := os.fork()) == 0:
            sys.exit(7)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    @rpc
    def reap(self, pid: int) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def told(ask: Callable[[], object]) -> dict[str, Any]:
    """What a child gets that asks rlmesh for something, and after how long."""
    began = time.monotonic()
    try:
        text, name = repr(ask()), ""
    except Exception as error:
        text, name = str(error), type(error).__name__
    return {"type": name, "text": text, "s": time.monotonic() - began}


def in_child(out: Any, asked: dict[str, Callable[[], object]]) -> None:
    out.put({name: told(ask) for name, ask in asked.items()})


def plain_child(work: Callable[[], object]) -> tuple[str, int]:
    """The exit code of ``work`` in a forked child, if it ends there."""
    if (pid := os.fork()) == 0:
        work()
        return ("child", 0)
    return ("parent", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def children_of_the_library() -> dict[str, Any]:
    began = time.monotonic()
    child = fork.Process(target=square, args=(3,))
    child.start()
    child.join(LIMIT_S)
    pool = fork.Pool(2)
    mapped = pool.map(square, range(4))
    pool.close()
    pool.join()
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=fork) as executor:
        mapped += executor.map(square, range(4))
    sleeper = fork.Process(target=time.sleep, args=(LIMIT_S,))
    sleeper.start()
    sleeper.terminate()
    sleeper.join(LIMIT_S)
    program = subprocess.run(["/bin/true"], preexec_fn=lambda: None).returncode
    return {
        "code": child.exitcode,
        "mapped": mapped,
        "terminated": sleeper.exitcode,
        "program": program,
        "s": time.monotonic() - began,
    }


def descriptors() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass  # the listing's own
    return [link for link in found if not link.startswith(("/", "pipe"))]


class Trainer:
    def run(self) -> None:
        out = Path(current_worker().job_info.user_config)
        seen: dict[str, Any] = {"library": children_of_the_library()}
        data, me = RoleGroup[Any]("DATA"), current_worker()
        data.call_rank0("echo", BIG).result()  # there is a connection
        waiting, items = data.call_rank0("get", "the parent", 1.0), data[0].stream("numbers")
        asked = {
            "call": lambda: data.call_rank0("get", "the child").result(),
            "large": lambda: data.call_rank0("echo", BIG),
            "notify": lambda: data[0].notify("get", "the child"),
            "idempotent": lambda: data[0].options(idempotent=True).call("get", "the child"),
            "result": lambda: waiting.result(),
            "wait": lambda: concurrent.futures.wait([waiting], LIMIT_S),
            "done": lambda: waiting.done(),
            "cancel": lambda: waiting.cancel(),
            "stream": lambda: next(iter(items)),
            "new stream": lambda: list(data[0].stream("numbers")),
            "report": lambda: me.report(1, x=1.0),
            "alarm": lambda: me.alarm("no"),
            "events": lambda: me.events(LIMIT_S),
            "step_boundary": lambda: me.step_boundary(1),
            "rank": lambda: me.rank,
            "descriptors": descriptors,
            "sigterm": lambda: signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        }
        answers = fork.SimpleQueue()
        child = fork.Process(target=in_child, args=(answers, asked))
        child.start()
        seen["asked"] = answers.get()
        child.join(LIMIT_S)
        print("the parent still gets its answers")
        seen["parent"] = [waiting.result(), list(items), data.call_rank0("echo", BIG).result()]
        fork.Process(target=print, args=("said by a child",), kwargs={"flush": True}).start()

        pid = data.call_rank0("fork_and_return").result()
        seen["methods"] = [
            data.call_rank0("reap", pid).result(),
            data.call_rank0("fork_and_exit").result(),
            data.call_rank0("echo", BIG).result(),
        ]
        seen["exit"] = [plain_child(lambda: sys.exit(3)), plain_child(lambda: 1 / 0)]
        who, code = plain_child(lambda: None)
        if who == "child":
            return  # from run(), in the child
        seen["exit"].append([who, code])
        out.write_text(json.dumps(seen))

    def teardown(self) -> None:
        print(f"teardown in {os.getpid() == current_worker().pid}")


def build(out: Path) -> DLJob:
    job = DLJobBuilder().config(str(out))
    return job.role("DATA").run(Data).role("TRAINER").run(Trainer).build()


if __name__ == "__main__":
    build(Path(sys.argv[1])).submit("forking", view="none")
