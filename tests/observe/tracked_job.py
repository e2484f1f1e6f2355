"""A job whose trainer reports ten steps: ``tracked_job.py RUN_DIR TRACKER …``."""

from __future__ import annotations

import sys

from rlmesh import BaseTrainer, DLJob, DLJobBuilder, current_worker


class Trainer(BaseTrainer):
    def run(self) -> None:
        for step in range(1, 11):
            current_worker().report(step=step, total_steps=10, loss=1 / step)


def job() -> DLJob:
    builder = DLJobBuilder().node_num(1).device_per_node(1).device_type("CPU").config({"lr": 0.1})
    return builder.role("TRAINER").run(Trainer).resource(cpu=1).build()


if __name__ == "__main__":
    job().submit("tracked", view="none", run_dir=sys.argv[1], trackers=sys.argv[2:])
