"""A job whose members die, stall and come back while its trainer waits for them and writes down what it sees."""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import json
import os
import signal
import sys
import time
from concurrent.futures import wait
from pathlib import Path
from typing import Any

from rlmesh import DLJobBuilder, Future, RoleGroup, current_worker, rpc
from rlmesh.errors import CallError, CallTimeout
from tests.own_time import HANG_S

CALLS = 100


class Victim:
    """One of a role that dies."""

    def __init__(self) -> None:
        self.running = 0

    @rpc(concurrent=CALLS)
    async def slow(self, number: int, how: str = "") -> None:
        self.running += 1
        await asyncio.sleep(0 if how else 60)
        if how == "exit":
            # Longer than callers wait for an agent's word once a connection is lost: the process still has to end.
            atexit.register(time.sleep, 1.2)
            sys.exit(3)
        if how == "os._exit":
            os._exit(3)

    @rpc
    async def count(self) -> int:
        return self.running

    @rpc
    def segfault(self) -> None:
        ctypes.string_at(0)

    @rpc
    async def pid(self) -> int:
        print(f"pid {os.getpid()} speaks its last words", flush=True)
        return os.getpid()

    @rpc
    def hold_the_gil(self, seconds: int) -> float:
        """Native code that sleeps and keeps the interpreter's lock meanwhile."""
        began = time.monotonic()
        ctypes.PyDLL(None).usleep(seconds * 1_000_000)
        return time.monotonic() - began


class Broken(Victim):
    """Cannot be built, but not before the other role waits: a member that has not begun would be ended with the job."""

    def __init__(self) -> None:
        begun = Path(current_worker().job_info.user_config["out"]).with_suffix(".begun")
        deadline = time.monotonic() + 10.0
        while not begun.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        raise ValueError("it cannot be built")


class Waiter:
    """Calls another role before all members are up."""

    def setup(self) -> None:
        out = Path(current_worker().job_info.user_config["out"])
        out.with_suffix(".begun").touch()
        error = error_of(RoleGroup("BROKEN")[0].call("count"))
        out.write_text(json.dumps([str(error), error.executed]))

    def run(self) -> None: ...


class Trainer:
    def run(self) -> None:
        config = current_worker().job_info.user_config
        seen = getattr(self, config["scenario"])()
        Path(config["out"]).write_text(json.dumps(seen))

    def death(self) -> dict[str, Any]:
        """A member has 100 calls on its way when it dies."""
        how = current_worker().job_info.user_config["how"]
        victim = RoleGroup("WORKER")[0]
        pid = victim.call("pid").result()
        calls = [victim.call("slow", number) for number in range(CALLS - 1)]
        while victim.call("count").result() < CALLS - 1:
            time.sleep(0.01)
        if how == "segfault":
            calls.append(victim.call("segfault"))
        else:
            calls.append(victim.call("slow", CALLS, "" if how == "kill" else how))
        if how == "kill":
            os.kill(pid, signal.SIGKILL)
        died_at = wait_for_state(pid, "ZX")
        left = wait(calls, 5).not_done
        again_at = time.monotonic()
        again = error_of(victim.call("count"))
        return {
            "pid": pid,
            "left": len(left),
            "after_s": max(future.resolved_ns for future in calls) / 1e9 - died_at,
            "errors": sorted({text_of(future) for future in calls}),
            "executed": sorted({error_of(future).executed for future in calls}),
            "again": [str(again), again.executed, time.monotonic() - again_at],
        }

    def stalls(self) -> dict[str, Any]:
        """One member holds the interpreter's lock for 12 s, another is stopped for a while."""
        native, stopped = RoleGroup("NATIVE")[0], RoleGroup("STOPPED")[0]
        pid = stopped.call("pid").result()
        holding = native.call("hold_the_gil", 12)
        os.kill(pid, signal.SIGSTOP)
        wait_for_state(pid, "T")
        began = time.monotonic()
        late = stopped.options(timeout_s=1).call("count")
        waits_for = late.waiting_for()
        error = error_of(late)
        late_s = time.monotonic() - began
        os.kill(pid, signal.SIGCONT)
        counted = stopped.call("count").result(HANG_S)
        return {
            "late": [str(error), isinstance(error, CallTimeout), error.executed, late_s],
            "counted": counted,
            "waits_for": waits_for,
            "held_s": holding.result(),
            "after": native.call("count").result(),
        }


def error_of(future: Future[Any]) -> CallError:
    error = future.exception()
    assert isinstance(error, CallError)
    return error


def text_of(future: Future[Any]) -> str:
    return str(error_of(future)).partition("[asked")[0]


def wait_for_state(pid: int, states: str) -> float:
    """`time.perf_counter` at which a process was seen in one of these states; X is gone."""
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            state = "X"
        if state in states:
            return time.perf_counter()
        time.sleep(0.001)


def build_broken(out: Path) -> Any:
    builder = DLJobBuilder().config({"out": str(out)}).device_type("CPU")
    builder.role("BROKEN").run(Broken).resource(cpu=0)
    builder.role("TRAINER").run(Waiter).resource(cpu=0)
    return builder.build()


def build(scenario: str, out: Path, *roles: str, how: str = "") -> Any:
    builder = DLJobBuilder().config({"scenario": scenario, "out": str(out), "how": how}).device_type("CPU")
    builder.with_restart("never")
    for role in roles:
        builder.role(role).run(Victim).resource(cpu=0)
    builder.role("TRAINER").run(Trainer).resource(cpu=0)
    return builder.build()
