"""Two groups that span two nodes and share their devices; each works only while all of its ranks are awake."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from rlmesh import DLJob, DLJobBuilder, RoleGroup, current_worker, rpc

ROUNDS = 12


class Rank:
    @rpc
    def pid(self) -> int:
        return os.getpid()

    @rpc
    def work(self, number: int, die: bool = False) -> list[Any]:
        worker = current_worker()
        with worker.device_lease(timeout_s=60.0) as lease:
            began = time.monotonic()
            if die:
                os.kill(os.getpid(), 9)
            self._meet(f"{worker.role}-{worker.incarnation}-{number}")
            return [worker.role, worker.rank, list(lease.devices), began, time.monotonic()]

    def _meet(self, name: str) -> None:
        """A collective: nobody gets on before all are there."""
        worker = current_worker()
        folder = worker.run_dir / "meetings"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}-{worker.rank}").touch()
        deadline = time.monotonic() + 20.0
        while not all((folder / f"{name}-{rank}").exists() for rank in range(worker.world_size)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{worker.name} waited 20 s for the other rank in {name}")
            time.sleep(0.001)


class Trainer:
    def run(self) -> None:
        one, two = RoleGroup("ONE"), RoleGroup("TWO")
        seen: list[Any] = []
        for number in range(ROUNDS):
            # On the first node one group asks first, on the second node the other.
            calls = [one[0].call("work", number), two[1].call("work", number)]
            calls += [two[0].call("work", number), one[1].call("work", number)]
            seen += [call.result() for call in calls]
        # A rank dies with its lease, while the other group waits for it.
        dying = [one[1].call("work", 100, True), one[0].call("work", 100)]
        waiting = [two[0].call("work", 100), two[1].call("work", 100)]
        for call in dying:
            call.exception()
        seen += [call.result() for call in waiting]
        again = [group[rank].options(idempotent=True).call("work", 101) for group in (one, two) for rank in range(2)]
        seen += [call.result() for call in again]
        Path(current_worker().job_info.user_config["out"]).write_text(json.dumps(seen))


def build(out: Path) -> DLJob:
    builder = DLJobBuilder().config({"out": str(out)}).device_type("CPU")
    for role in ("ONE", "TWO"):
        builder.role(role).train(Rank).nnodes(2).nproc_per_node(1).resource(cpu=0, accelerator=1)
    builder.role("TRAINER").run(Trainer).resource(cpu=0)
    return builder.with_collocation("ONE", "TWO").skip_node_check().build()
