"""A trainer whose engine drifts away, comes back, and drifts away again."""

from __future__ import annotations

import torch

from rlmesh import DLJob, DLJobBuilder, current_worker
from rlmesh.rl.drift import DriftAlarm, drift

GAPS = (1e-5, 0.5, 0.5, 1e-5, 0.25)


class Trainer:
    def run(self) -> None:
        alarm = DriftAlarm("float32")
        base, mask = torch.full((2, 4), -1.0), torch.ones(2, 4, dtype=torch.bool)
        for step, gap in enumerate(GAPS):
            metrics = alarm.check(drift(base, base + gap, mask), version=step, who="ROLLOUT")
            current_worker().report(step, **metrics)


def build() -> DLJob:
    builder = DLJobBuilder().device_type("CPU")
    builder.role("TRAINER").run(Trainer).resource(cpu=0)
    return builder.build()
