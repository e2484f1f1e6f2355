"""What is known of jobs after they have ended: a file in each run directory, and this user's list of run directories.

``<run_dir>/end.json`` is written by the driver. The list is ``$XDG_STATE_HOME/rlmesh/jobs`` (``~/.local/state``), one
run directory per line, newest last. Nobody needs either to run a job, so whatever goes wrong here is not an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmesh.job.status import JobStatus
from rlmesh.observe.summary import alarm_lines
from rlmesh.runtime.clock import epoch

__all__ = ["EndedJob", "ended_jobs", "forget_end", "read_end", "remember", "write_end"]

END_FILE = "end.json"
KEPT = 200
"""Run directories in the list; older ones are forgotten."""


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job that has ended. Times are seconds since the epoch; ``ended_at`` is 0 and ``stage`` ``lost`` where the
    driver died before it could say how the job ended."""

    job_id: str
    job_name: str
    run_dir: str
    stage: str
    started_at: float
    ended_at: float = 0.0
    failures: tuple[str, ...] = ()
    members: tuple[tuple[str, str], ...] = ()
    """Name and last state of each."""
    alarms: tuple[str, ...] = ()
    """Lines that tell of them."""
    restarts: tuple[tuple[str, float, str], ...] = ()
    """What was restarted, when and why, oldest first."""
    stopped_at: int | None = None
    """The step after which all ranks stopped, after notice."""


def write_end(status: JobStatus, now: float | None = None) -> None:
    """Leave the end of a job in its run directory."""
    end = {
        "job_id": status.job_id,
        "job_name": status.job_name,
        "stage": status.stage,
        "started_at": status.started_at,
        "ended_at": epoch() if now is None else now,
        "failures": [failure.message for failure in status.failures],
        "members": [[f"{member.role}:{member.rank}", member.state] for member in status.members],
        "alarms": alarm_lines(status),
        "restarts": [[record.unit, record.at, record.cause] for record in status.restarts],
        "stopped_at": status.stopped_at,
    }
    try:
        (Path(status.run_dir) / END_FILE).write_text(json.dumps(end, indent=1) + "\n")
    except OSError:
        pass


def forget_end(run_dir: Path) -> None:
    """A job starts in a run directory: how the one before ended says nothing about it."""
    for path in (run_dir / END_FILE, *run_dir.glob("exit-node*.json")):
        path.unlink(missing_ok=True)


def list_file() -> Path:
    """This user's list of run directories."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    return Path(state) / "rlmesh" / "jobs"


def remember(run_dir: str | Path) -> None:
    """Add a run directory to the list. Several jobs may do so at the same moment."""
    path = list_file()
    line = f"{os.path.abspath(run_dir)}\n".encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, line)  # One write of a short line: appended as a whole.
        finally:
            os.close(fd)
        if path.stat().st_size > 2 * KEPT * 200:
            _shorten(path)
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        pass


def _shorten(path: Path) -> None:
    kept = path.read_bytes().splitlines(keepends=True)[-KEPT:]
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_bytes(b"".join(kept))
    os.replace(new, path)


def ended_jobs(running: Iterable[str] = (), path: Path | None = None) -> list[EndedJob]:
    """This user's jobs that have ended, oldest first.

    Args:
        running: run directories of those that run.
        path: of the list, if it is not the usual one.
    """
    try:
        lines = (path or list_file()).read_text().splitlines()[-KEPT:]
    except (OSError, UnicodeDecodeError, RuntimeError):
        return []
    still = set(running)
    found = [read_end(Path(line)) for line in dict.fromkeys(lines) if line and line not in still]
    return sorted((job for job in found if job is not None), key=lambda job: job.started_at)


def read_end(run_dir: Path) -> EndedJob | None:
    """How the job of a run directory ended; None if there was none."""
    try:
        end: dict[str, Any] = json.loads((run_dir / END_FILE).read_text())
        return EndedJob(
            run_dir=str(run_dir),
            failures=tuple(end.pop("failures")),
            members=tuple((name, state) for name, state in end.pop("members")),
            alarms=tuple(end.pop("alarms", ())),
            restarts=tuple((unit, at, cause) for unit, at, cause in end.pop("restarts", ())),
            **end,
        )
    except (OSError, ValueError, TypeError, KeyError):
        pass
    described = run_dir / "job.json"
    try:
        started_at = described.stat().st_mtime
        name = str(json.loads(described.read_text()).get("job_name") or run_dir.name)
    except (OSError, ValueError, AttributeError):
        return None
    return EndedJob("", name, str(run_dir), "lost", started_at)
