"""A member holds the interpreter's lock, in C, while another one is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

from rlmesh import DLJob, DLJobBuilder, RoleGroup, current_worker, rpc


class Holder:
    @rpc
    def hold_the_lock(self, seconds: float) -> None:
        (current_worker().run_dir / "holds").touch()
        libc = ctypes.PyDLL(None)
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            libc.usleep(ctypes.c_uint(500_000))


class Victim:
    @rpc
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @rpc
    def serve(self) -> int:
        return current_worker().incarnation


class Trainer:
    def run(self) -> None:
        holds = RoleGroup("HOLDER").call("hold_the_lock", 2.0)
        while not (current_worker().run_dir / "holds").exists():
            time.sleep(0.01)
        RoleGroup("VICTIM").call("die").exception()
        current_worker().report(1, samples_trained=RoleGroup("VICTIM").call("serve").result()[0])
        holds.result()


class Learner:
    """Trains a few samples, and fails as long as there is a file that says so."""

    def run(self) -> None:
        worker = current_worker()
        before = worker.resume.samples_trained if worker.resume else 0
        (worker.run_dir / f"began-at-{before}").touch()
        worker.report(1, loss=1.0, samples_trained=before + 32)
        worker.report(2, loss=0.5)
        if Path(worker.job_info.user_config["fails"]).exists():
            raise RuntimeError("no more")


def build() -> DLJob:
    builder = DLJobBuilder().device_type("CPU")
    builder.role("HOLDER").run(Holder).resource(cpu=0)
    builder.role("VICTIM").run(Victim).resource(cpu=0)
    builder.role("TRAINER").run(Trainer).resource(cpu=0)
    return builder.build()


def build_learner(fails: Path) -> DLJob:
    builder = DLJobBuilder().config({"fails": str(fails)}).device_type("CPU")
    builder.role("TRAINER").run(Learner).resource(cpu=0)
    return builder.build()
