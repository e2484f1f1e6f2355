"""Small jobs that something is done to: ``memory``, ``cleaner``, ``shells``, ``init``."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from rlmesh import DLJob, DLJobBuilder, RoleGroup, current_worker, rpc
from rlmesh.agent.processes import ownership
from rlmesh.errors import RemoteError


class Starved:
    """Gives up its memory, so that nothing more can be had, not even a thread."""

    @rpc
    def starve(self) -> None:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used, used))

    @rpc
    def grow(self) -> int:
        return len(bytearray(1 << 30))


class OfStarved:
    def run(self) -> None:
        group = RoleGroup[Starved]("STARVED")
        group.call(Starved.starve).result()
        try:
            group.call(Starved.grow).result()
        except RemoteError as error:
            print(f"the members said {error.remote_type}", flush=True)


class Data:
    @rpc
    def pid(self) -> int:
        return os.getpid()


class OfCleaner:
    """Everything temporary is removed; then a member dies."""

    def run(self) -> None:
        data = RoleGroup[Data]("DATA").options(timeout_s=60.0, idempotent=True)
        pid = data.call_rank0(Data.pid).result()
        for folder in Path(os.environ["TMPDIR"]).glob("rlm-*"):
            shutil.rmtree(folder)
        assert data.call_rank0(Data.pid).result() == pid, "connections go on"
        os.kill(pid, signal.SIGKILL)
        assert data.call_rank0(Data.pid).result() != pid
        print("the next one was reached", flush=True)


class Shells:
    @rpc
    def work(self, count: int) -> None:
        for _ in range(count):
            subprocess.run(["sh", "-c", "sleep 0.01 & exit 0"], check=True)

    @rpc
    def zombies(self) -> int:
        own = os.getpid()
        return sum(each.parent == own and not each.running for each in ownership.descendants(own))


class OfShells:
    def run(self) -> None:
        group = RoleGroup[Shells]("SHELLS")
        group.call_rank0(Shells.work, 50).result()
        while group.call_rank0(Shells.zombies).result():
            time.sleep(0.05)
        print("no zombie is left", flush=True)


class Unlucky:
    """Each of its processes fails in another way."""

    def __init__(self) -> None:
        if current_worker().incarnation == 0:
            self.open_the_data()
        raise KeyError("the lock file is there already")

    def open_the_data(self) -> None:
        raise OSError("the disk is gone")

    @rpc
    def serve(self) -> None: ...


class Waits:
    def run(self) -> None:
        RoleGroup("UNLUCKY").call("serve").result()


def job(kind: str) -> DLJob:
    builder = DLJobBuilder()
    match kind:
        case "memory":
            builder.role("STARVED").run(Starved).total(2).role("TRAINER").run(OfStarved)
        case "cleaner":
            builder.role("DATA").run(Data).role("TRAINER").run(OfCleaner)
        case "shells":
            builder.role("SHELLS").run(Shells).role("TRAINER").run(OfShells)
        case "init":
            builder.role("UNLUCKY").run(Unlucky).restart(max_restarts=2, on_error=True, delay_s=0.05)
            builder.role("TRAINER").run(Waits)
    return builder.build()


if __name__ == "__main__":
    job(sys.argv[1]).submit("sturdy")
    print("the job has succeeded", flush=True)
