"""trackio: a local database, shown by ``trackio show``. ``TRACKIO_DIR`` names its folder."""

from __future__ import annotations

from typing import Any

from rlmesh.job.status import MetricRecord
from rlmesh.observe.trackers.protocol import RunInfo, metrics_of

__all__ = ["TrackioTracker"]


class TrackioTracker:
    """Shows a run in trackio."""

    _run: Any = None

    def open(self, run: RunInfo) -> None:
        import trackio

        # The end of the run id tells runs of the same name apart, and stays if the run goes on.
        self._run = trackio.init(
            project=run.project, name=f"{run.name}-{run.run_id[:8]}", config=dict(run.settings), resume="allow",
            embed=False, auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip

    def log(self, record: MetricRecord) -> None:
        self._run.log(metrics_of(record), step=record.step)

    def close(self) -> None:
        import trackio

        run, self._run = self._run, None
        if run is not None:
            trackio.finish()
