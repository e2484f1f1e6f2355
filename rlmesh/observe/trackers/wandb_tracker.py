"""Weights & Biases. ``WANDB_MODE``, ``WANDB_ENTITY``, ``WANDB_DIR`` and its other variables work as always."""

from __future__ import annotations

import os
from typing import Any

from rlmesh.job.status import MetricRecord
from rlmesh.observe.trackers.protocol import RunInfo, metrics_of

__all__ = ["WandbTracker"]


class WandbTracker:
    """Shows a run in W&B. With ``WANDB_MODE=offline`` it writes into the run directory, for ``wandb sync``.

    The step is a metric, ``step``, and the axis of all others, since W&B's own step may not go back.
    """

    _run: Any = None

    def open(self, run: RunInfo) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", run.project), name=run.name, id=run.run_id, resume="allow",
            dir=os.environ.get("WANDB_DIR", str(run.run_dir)), config=dict(run.settings),
            settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, record: MetricRecord) -> None:
        self._run.log({**metrics_of(record), "step": record.step})

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()
