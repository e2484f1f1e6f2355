"""A job for tests of lost nodes: a driver on the first node, a simple role and an elastic one over two of three nodes.

Each member writes a line every 20 ms for as long as it lives, so that two copies of it would show.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from pathlib import Path

from rlmesh import DLJob, DLJobBuilder, RoleGroup, current_worker, rpc
from rlmesh.errors import CallError

PULSE_S = 0.02


class Member:
    def setup(self) -> None:
        worker = current_worker()
        self.folder = Path(worker.job_info.user_config["pulses"])
        name = f"{worker.name}.{worker.incarnation}"
        print(f"{name} is pid {os.getpid()} on node {worker.node_rank}", flush=True)
        threading.Thread(target=self._pulse, args=(self.folder / name,), daemon=True).start()

    def _pulse(self, path: Path) -> None:
        while True:
            with path.open("a") as file:
                file.write(f"{time.monotonic()} {os.getpid()}\n")
            time.sleep(PULSE_S)

    @rpc
    def where(self) -> tuple[int, int]:
        worker = current_worker()
        return worker.node_rank, worker.incarnation


class Rollout(Member):
    pass


class Actor(Member):
    def run(self) -> None:
        worker = current_worker()
        print(f"{worker.name}.{worker.incarnation} runs with {os.environ['MASTER_ADDR']}", flush=True)


class Trainer:
    def run(self) -> None:
        config = current_worker().job_info.user_config
        print(f"TRAINER is pid {os.getpid()}", flush=True)
        step = 0
        while not Path(config["end"]).exists():
            for role in (Rollout, Actor):
                group = RoleGroup[Member](role.__name__.upper()).options(idempotent=True, timeout_s=60.0)
                try:
                    places = group.call("where").result()
                except CallError as error:
                    print(f"step {step}: {type(error).__name__}", flush=True)
                    continue
                if step % 10 == 0 or any(incarnation for _, incarnation in places):
                    print(f"step {step} {role.__name__} {places}", flush=True)
            step += 1
            time.sleep(0.05)
        print(f"ends after step {step}", flush=True)


def build(spares: int, lease_s: float, node_wait_s: float, **paths: str) -> DLJob:
    builder = DLJobBuilder().config(paths).device_type("CPU").device_per_node(2).spare_nodes(spares)
    builder.limits(lease_s=lease_s, node_wait_s=node_wait_s)
    builder.role("TRAINER").run(Trainer).resource(accelerator=0, cpu=0.1)
    builder.role("ROLLOUT").run(Rollout).total(2).resource(accelerator=1)
    builder.with_separation("ROLLOUT", by="node")
    builder.role("ACTOR").train(Actor).nnodes(2).nproc_per_node(1).not_driver()
    return builder.build()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--lease", type=float, default=2.0)
    parser.add_argument("--node-wait", type=float, default=0.0)
    parser.add_argument("--pulses", required=True)
    parser.add_argument("--end", required=True)
    given = parser.parse_args()
    build(given.spares, given.lease, given.node_wait, pulses=given.pulses, end=given.end).submit("moving")
    print("the job has succeeded", flush=True)
