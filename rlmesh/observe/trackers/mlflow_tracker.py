"""MLflow. ``MLFLOW_TRACKING_URI`` names the server or store; without it, a database in the run directory."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from rlmesh.job.status import MetricRecord
from rlmesh.observe.trackers.protocol import RunInfo, metrics_of

__all__ = ["MlflowTracker", "mlflow_name"]

RUN_TAG = "rlmesh.run"
LONGEST = 500
BATCH = 100
"""Parameters of one request."""


class MlflowTracker:
    """Shows a run in MLflow: reports as metrics, settings as parameters."""

    _client: Any = None
    _run_id = ""

    def open(self, run: RunInfo) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.run_dir.absolute() / 'mlflow.db'}"
        self._client = client = MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", run.project)
        experiment = client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment is not None else client.create_experiment(name)
        known = client.search_runs([number], f"tags.`{RUN_TAG}` = '{run.run_id}'", max_results=1)
        if known:
            self._run_id = known[0].info.run_id
            client.update_run(self._run_id, status="RUNNING")
            return
        self._run_id = client.create_run(number, run_name=run.name, tags={RUN_TAG: run.run_id}).info.run_id
        params = [Param(mlflow_name(key), value[:LONGEST]) for key, value in flat(run.settings).items()]
        for start in range(0, len(params), BATCH):
            client.log_batch(self._run_id, params=params[start : start + BATCH])

    def log(self, record: MetricRecord) -> None:
        from mlflow.entities import Metric

        at = int(record.at * 1000)
        metrics = [
            Metric(mlflow_name(name), float(value), at, record.step) for name, value in metrics_of(record).items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.set_terminated(self._run_id)


def mlflow_name(name: str) -> str:
    """A name with the characters that MLflow allows: ``mean@4`` becomes ``mean_at_4``."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"), flags=re.ASCII)


def flat(settings: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Nested settings as texts by dotted names."""
    found: dict[str, str] = {}
    for key, value in settings.items():
        name = f"{before}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, Mapping) else {name: str(value)}
    return found
