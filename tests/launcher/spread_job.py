"""A job of two nodes for tests: an elastic role over both, one of whose members is on each, and a driver."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

from rlmesh import DLJob, DLJobBuilder, RoleGroup, current_worker, rpc
from rlmesh.errors import CallTimeout


class Spread:
    """One member per node."""

    def setup(self) -> None:
        worker = current_worker()
        print(f"{worker.name} is pid {os.getpid()} on node {worker.node_rank}", flush=True)
        print(f"{worker.name}: master {os.environ['MASTER_ADDR']} gloo {os.environ['GLOO_SOCKET_IFNAME']}", flush=True)

    @rpc
    def where(self) -> tuple[int, int]:
        return current_worker().rank, current_worker().node_rank

    @rpc
    def make(self, size: int) -> bytes:
        return bytes([current_worker().rank + 1]) * size

    @rpc
    def weigh(self, data: list[bytes]) -> int:
        return sum(sum(part[:1]) * len(part) for part in data)

    @rpc
    def add_up(self) -> int:
        """The sum of all ranks plus one, by torch.distributed over the group that the launcher set up."""
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        value = torch.tensor([current_worker().rank + 1])
        dist.all_reduce(value)
        dist.destroy_process_group()
        return int(value)

    @rpc
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class Trainer:
    def run(self) -> None:
        options: dict[str, Any] = current_worker().job_info.user_config
        group = RoleGroup[Spread]("SPREAD")
        print(f"places {group.call(Spread.where).result()}", flush=True)
        size = options["size"]
        made = group.call(Spread.make, size)  # each result stays where it was made, and goes to both
        print(f"weights {group.call('weigh', made).result()} of {size}", flush=True)
        if options["torch"]:
            print(f"sums {group.call(Spread.add_up).result()}", flush=True)
        for step in range(options["steps"]):
            try:
                group.options(timeout_s=options["deadline"]).call(Spread.where).result()
            except CallTimeout as error:
                print(f"late: {error}", flush=True)
            current_worker().report(step, nodes=options["nodes"])
            print(f"step {step}", flush=True)
            time.sleep(options["pause"])
        if options["fail"]:
            raise ValueError("no luck in run")
        group.call(Spread.sleep, options["sleep"]).result()


def build(**options: Any) -> DLJob:
    builder = DLJobBuilder().config(options).device_type("CPU").device_per_node(1)
    builder.role("SPREAD").train(Spread).nnodes(options["nodes"]).nproc_per_node(1)
    builder.role("TRAINER").run(Trainer).resource(accelerator=0, cpu=0.1)
    return builder.build()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--deadline", type=float, default=60.0)
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--fail", action="store_true")
    result = build(**vars(parser.parse_args())).submit("spread")
    print("all serving after", result.status.all_serving_s, "s; nodes", len(result.exit_reports), flush=True)
    sys.exit(0 if all(report.clean for report in result.exit_reports) else 3)
