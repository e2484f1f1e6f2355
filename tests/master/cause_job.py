"""A job in which somebody died and was mended, before something else ends it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from rlmesh import DLJob, DLJobBuilder, RoleGroup, current_worker, rpc


class Worker:
    @rpc
    def pid(self) -> int:
        return os.getpid()

    @rpc
    def slow(self, seconds: float) -> None:
        time.sleep(seconds)


class Trainer:
    def run(self) -> None:
        config: dict[str, Any] = current_worker().job_info.user_config
        workers, others = RoleGroup("W").options(idempotent=True), RoleGroup("V")
        pid = workers.call_rank0("pid").result()
        os.kill(pid, signal.SIGKILL)
        while workers.call_rank0("pid").result() == pid:
            pass
        if config["how"] == "own":
            raise ValueError("a bug of the trainer")
        pid = others.call_rank0("pid").result()
        answer = others.call_rank0("slow", 60.0)
        time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        answer.result()


def build(how: str) -> DLJob:
    builder = DLJobBuilder().config({"how": how}).device_type("CPU")
    builder.role("W").run(Worker).resource(cpu=0)
    builder.role("V").run(Worker).resource(cpu=0)
    builder.role("TRAINER").run(Trainer).resource(cpu=0)
    return builder.build()
