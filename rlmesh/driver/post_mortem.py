"""The incident of a job whose master has died: the driver writes it in the master's place."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from rlmesh import private_files
from rlmesh.agent.monitoring.logs import last_lines, logs_folder
from rlmesh.job.status import FailureInfo, JobStatus
from rlmesh.observe.files.event_log import MOST_RECENT, read_events
from rlmesh.observe.files.incidents import Incident, next_number

__all__ = ["write_post_mortem"]

logger = logging.getLogger(__name__)

LINES = 20
MOST_LOGS = 64


def write_post_mortem(status: JobStatus, run_dir: Path, failure: FailureInfo) -> Path | None:
    """Write an incident from the run directory and the last snapshot; return the readable file, or None if writing
    failed."""
    job = {"name": status.job_name, "id": status.job_id, "run_dir": str(run_dir), "stage": status.stage}
    failures = [failure, *(known for known in status.failures if known != failure)]
    incident = Incident(
        next_number(run_dir), job, failure.at, failures, outcome="the job failed", config=_config(run_dir)
    )
    incident.closed_at = failure.at
    incident.steps = {f"{member.role}:{member.rank}": member.step for member in status.members}
    incident.events = sorted(list(read_events(run_dir))[-MOST_RECENT:], key=lambda entry: float(entry["at"]))
    for path in private_files.files_in(logs_folder(run_dir), "*.log")[:MOST_LOGS]:
        if lines := last_lines(path, LINES):
            incident.last_lines[path.stem] = list(lines)
    try:
        return incident.write(run_dir).with_suffix(".txt")
    except OSError as error:
        logger.warning("the incident cannot be written: %s", error)
        return None


def _config(run_dir: Path) -> Any:
    try:
        return json.loads(private_files.read(run_dir / "job.json"))
    except (OSError, ValueError):
        return None
