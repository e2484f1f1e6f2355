"""A job in which one member stops moving, in a way of its own."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from rlmesh import DLJob, DLJobBuilder, RoleGroup, current_worker, rpc
from rlmesh.job.restarts import Scope


class Worker:
    @rpc
    def rank(self) -> int:
        return current_worker().rank

    @rpc
    def work(self, how: str) -> str:
        if current_worker().incarnation:
            return f"done by incarnation {current_worker().incarnation}"
        deadline = time.monotonic() + 60.0
        if how == "spin":
            while time.monotonic() < deadline:
                pass
        elif how == "gil":
            sum(itertools.repeat(0, 10**10))  # in C, which looks at no signal and lets no other thread run
        elif how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            for step in range(25):  # slow, and alive
                time.sleep(0.1)
                current_worker().report(step)
        return "done"


class Idle:
    @rpc
    def nothing(self) -> None: ...


class Trainer:
    def run(self) -> None:
        config: dict[str, Any] = current_worker().job_info.user_config
        workers = RoleGroup("WORKER").options(idempotent=True)
        workers.call("rank").result()
        answer = workers.call("work", config["how"]).result()
        Path(config["out"]).write_text(json.dumps(answer))


def build(how: str, out: Path, scope: Scope, hang_s: float) -> DLJob:
    builder = DLJobBuilder().config({"how": how, "out": str(out)}).device_type("CPU")
    builder.limits(hang_s=hang_s).with_restart(scope)
    builder.role("WORKER").run(Worker).resource(cpu=0)
    builder.role("IDLE").run(Idle).resource(cpu=0)
    builder.role("TRAINER").run(Trainer).resource(cpu=0)
    return builder.build()
