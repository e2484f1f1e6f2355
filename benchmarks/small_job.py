"""The small job of `kills.py` and `standstills.py`: three members that work for some seconds, and a result to check.

Each step sums what two workers make of a number. Lost, doubled or wrong answers change the result.
"""

from __future__ import annotations

import argparse
import os
import time

from rlmesh import DLJob, DLJobBuilder, RoleGroup, current_worker, rpc
from rlmesh.testing import LocalCluster


class Worker:
    @rpc
    def double(self, number: int) -> int:
        return 2 * number + current_worker().rank

    @rpc
    def life(self) -> tuple[int, int]:
        return os.getpid(), current_worker().incarnation


class Trainer:
    def run(self) -> None:
        steps, pause_s = current_worker().job_info.user_config
        group = RoleGroup[Worker]("WORKER").options(timeout_s=20.0, idempotent=True)
        total = 0
        for step in range(steps):
            total += sum(group.call(Worker.double, step).result())
            current_worker().report(step, total=total)
            time.sleep(pause_s)
        restarts = sum(incarnation for _, incarnation in group.call(Worker.life).result())
        print(f"WALL {int(time.time())}", flush=True)
        print(f"RESULT {total} RESTARTS {restarts + current_worker().incarnation}", flush=True)


def right(steps: int) -> int:
    """The sum that a run must have."""
    return sum(2 * 2 * step + 1 for step in range(steps))


def job(steps: int, pause_s: float, lease_s: float, nodes: int) -> DLJob:
    builder = DLJobBuilder().config((steps, pause_s))
    builder.role("WORKER").run(Worker).total(2).per_node(2 // nodes)
    builder.role("TRAINER").run(Trainer)
    return builder.limits(start_s=12.0, setup_s=12.0, hang_s=4.0, lease_s=lease_s).build()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--pause", type=float, default=0.1)
    parser.add_argument("--lease", type=float, default=15.0)
    parser.add_argument("--nodes", type=int, default=1)
    args = parser.parse_args()
    with LocalCluster(nodes=args.nodes, devices_per_node=2, view="plain"):
        job(args.steps, args.pause, args.lease, args.nodes).submit(os.environ.get("RLMESH_TRY", "small"))


if __name__ == "__main__":
    main()
