"""A job whose trainer reports ten steps: ``tracked_job.py RUN_DIR TRACKER …``."""

from __future__ import annotations

import sys

from rlmesh import BaseRLTrainer, RLJobBuilder, current_worker


class Trainer(BaseRLTrainer):
    def run(self) -> None:
        for step in range(1, 11):
            current_worker().report(step=step, total_steps=10, loss=1 / step)


if __name__ == "__main__":
    builder = RLJobBuilder().node_num(1).device_per_node(1).device_type("CPU").config({"lr": 0.1})
    builder.trainer(Trainer).resource(cpu=1)
    builder.build().submit("tracked", view="none", run_dir=sys.argv[1], trackers=sys.argv[2:])
