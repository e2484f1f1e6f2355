"""A job for tests whose members lose their node: a driver that calls them until one was started elsewhere."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from rlmesh import DLJob, DLJobBuilder, RoleGroup, current_worker, rpc
from rlmesh.errors import CallError


class Wanderer:
    """One member per node."""

    def setup(self) -> None:
        worker = current_worker()
        print(f"{worker.name}.{worker.incarnation} is on node {worker.node_rank}", flush=True)

    @rpc
    def where(self) -> tuple[int, int]:
        return current_worker().node_rank, current_worker().incarnation

    @rpc
    def add_up(self) -> int:
        """The sum of all ranks plus one, over the group that the launcher set up for this incarnation."""
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo")
        value = torch.tensor([current_worker().rank + 1])
        dist.all_reduce(value)
        return int(value)


class Trainer:
    def run(self) -> None:
        options: dict[str, Any] = current_worker().job_info.user_config
        group, step, lost = RoleGroup[Wanderer]("WANDERER"), 0, 0
        deadline = time.monotonic() + options["limit"]
        while True:
            try:
                places = list(group.call(Wanderer.where).result())
                if options["elastic"]:
                    assert set(group.call(Wanderer.add_up).result()) == {3}
            except CallError as error:
                lost += 1
                print(f"lost: {error}"[:300], flush=True)
                time.sleep(0.05)
                continue
            if step == 0:
                print(f"places {places}", flush=True)
            step += 1
            current_worker().report(step, lost=lost)
            moved = [incarnation > 0 for _, incarnation in places]
            if all(moved) if options["elastic"] else any(moved):
                break
            if time.monotonic() > deadline:
                raise TimeoutError("nobody was moved")
            time.sleep(0.02)
        print(f"moved {places}", flush=True)


def build(**options: Any) -> DLJob:
    builder = DLJobBuilder().config(options).device_type("CPU").device_per_node(1)
    if options["relaunch"]:
        builder.relaunch(options["relaunch"])
    else:
        builder.spare_nodes(1)
    if options["elastic"]:
        builder.role("WANDERER").train(Wanderer).nnodes(2).nproc_per_node(1)
    else:
        builder.role("WANDERER").run(Wanderer).total(2).resource(accelerator=1)
    builder.role("TRAINER").run(Trainer).resource(accelerator=0, cpu=0.1)
    return builder.build()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("--elastic", action="store_true")
    parser.add_argument("--relaunch", default="")
    result = build(**vars(parser.parse_args())).submit("wander")
    print("restarts", len(result.status.restarts), flush=True)
    sys.exit(0)
