"""Records of ended jobs: a file in each run directory, and this user's list of run directories.

The driver writes ``<run_dir>/end.json``. The list is ``$XDG_STATE_HOME/rlmesh/jobs`` (``~/.local/state``), one
run directory per line, newest last. No job depends on either, so problems with them are not errors.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rlmesh import private_files
from rlmesh.job.masking import mask_texts
from rlmesh.job.status import JobStatus
from rlmesh.runtime.process.clock import epoch

logger = logging.getLogger(__name__)

__all__ = ["EndedJob", "ended_jobs", "forget_end", "has_run", "read_end", "remember", "write_end"]

END_FILE = "end.json"
SIGNS = (END_FILE, "job.json", "starts.json", "settings.pickle", "metrics.jsonl", "samples", "timeline", "checkpoints")
"""By one of these a folder is known to be a run directory."""
UNREADABLE = "unreadable"
"""Stage of a job whose record belongs to another user, or is incomplete or malformed."""
LATEST_S = 1e12
T = TypeVar("T")
KEPT = 200
"""Number of run directories in the list; older ones are dropped."""


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job that has ended. Times are seconds since the epoch.

    If the driver died before it could record the end, ``ended_at`` is 0 and ``stage`` is ``lost``.
    """

    job_id: str
    job_name: str
    run_dir: str
    stage: str
    started_at: float
    ended_at: float = 0.0
    failures: tuple[str, ...] = ()
    members: tuple[tuple[str, str], ...] = ()
    """Name and last state of each member."""
    alarms: tuple[str, ...] = ()
    """Alarms, as text lines."""
    restarts: tuple[tuple[str, float, str], ...] = ()
    """Restarts, oldest first: unit, time and reason."""
    stopped_at: int | None = None
    """The step after which all ranks stopped, after a notice."""
    trouble: str = ""
    """Reason why the record of an ``unreadable`` job cannot be read."""


def write_end(status: JobStatus, now: float | None = None) -> None:
    """Record the end of a job in its run directory."""
    from rlmesh.observe.views.summary import alarm_lines

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
        private_files.write_whole(Path(status.run_dir) / END_FILE, json.dumps(mask_texts(end), indent=1) + "\n")
    except OSError as error:
        logger.warning("how the job ended could not be noted in %s: %s", Path(status.run_dir) / END_FILE, error)


def forget_end(run_dir: Path) -> None:
    """Remove the record of an earlier job from a run directory in which a job starts."""
    for path in (run_dir / END_FILE, *run_dir.glob("exit-node*.json")):
        path.unlink(missing_ok=True)


def list_file() -> Path:
    """Return the path of this user's list of run directories."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    return Path(state) / "rlmesh" / "jobs"


def remember(run_dir: str | Path) -> None:
    """Add a run directory to the list. Safe for concurrent jobs."""
    path = list_file()
    line = os.fsencode(f"{os.path.abspath(run_dir)}\n")
    try:
        private_files.make_private(path.parent)
        fd = private_files.append_to(path)
        try:
            # A single short write is appended atomically. Where a killed writer left half a line, this one begins anew;
            # other jobs write, too, so that nothing may be cut off.
            size = os.fstat(fd).st_size
            torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
            os.write(fd, b"\n" * torn + line)
        finally:
            os.close(fd)
        if path.stat().st_size > 2 * KEPT * 200:
            _shorten(path)
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        pass


def _shorten(path: Path) -> None:
    kept = private_files.read(path).splitlines(keepends=True)[-KEPT:]
    private_files.write_whole(path, b"".join(kept))


def ended_jobs(running: Iterable[str] = (), path: Path | None = None) -> list[EndedJob]:
    """Return this user's ended jobs, oldest first; a job with an invalid record is ``unreadable``.

    Args:
        running: run directories of running jobs.
        path: path of the list; by default the user's.
    """
    try:
        path = path or list_file()
        private_files.make_private(path.parent)
        lines = os.fsdecode(private_files.read(path)).splitlines()[-KEPT:]
    except (OSError, RuntimeError):
        return []
    still = set(running)
    found = [read_end(Path(line)) for line in dict.fromkeys(lines) if line and line not in still]
    return sorted((job for job in found if job is not None), key=lambda job: job.started_at)


def read_end(run_dir: Path) -> EndedJob | None:
    """Return the record of a run directory's job; None if there was no job."""
    if not os.path.isdir(run_dir):
        return None
    try:
        return _ended(run_dir, private_files.read(run_dir / END_FILE))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, RecursionError) as error:  # foreign, incomplete, or not written by write_end
        return (
            EndedJob("", run_dir.name, str(run_dir), UNREADABLE, _changed_at(run_dir), trouble=str(error))
            if has_run(run_dir)
            else None
        )
    described = run_dir / "job.json"
    try:
        started_at = described.stat().st_mtime
        name = str(json.loads(private_files.read(described)).get("job_name") or run_dir.name)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        return EndedJob("", run_dir.name, str(run_dir), UNREADABLE, _changed_at(run_dir), trouble=str(error))
    return EndedJob("", name, str(run_dir), "lost", started_at)


def has_run(folder: Path) -> bool:
    """True if a folder has a file or folder that a job makes in its run directory, or if nobody may look."""
    return not os.access(folder, os.X_OK) or any(os.path.lexists(folder / sign) for sign in SIGNS)


def _changed_at(run_dir: Path) -> float:
    try:
        return run_dir.stat().st_mtime
    except OSError:
        return 0.0


def _ended(run_dir: Path, data: bytes) -> EndedJob:
    """Parse a record.

    Raises:
        ValueError: the record is not in the format of `write_end`; says where.
    """
    end = json.loads(data)
    if not isinstance(end, dict):
        raise ValueError(f"{END_FILE} is not an object")
    return EndedJob(
        job_id=_of(end, "job_id", str),
        job_name=_of(end, "job_name", str),
        run_dir=str(run_dir),
        stage=_of(end, "stage", str),
        started_at=_seconds(end, "started_at"),
        ended_at=_seconds(end, "ended_at"),
        failures=_rows(end, "failures", str),
        members=_rows(end, "members", str, str),
        alarms=_rows(end, "alarms", str),
        restarts=_rows(end, "restarts", str, float, str),
        stopped_at=None if end.get("stopped_at") is None else _of(end, "stopped_at", int),
    )


def _of(values: dict[str, Any], name: str, kind: type[T]) -> T:
    value = values.get(name)
    if type(value) is not kind:
        raise ValueError(f"{name} in {END_FILE} is {value!r:.80}, not {kind.__name__}")
    return value


def _seconds(values: dict[str, Any], name: str) -> float:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LATEST_S:
        raise ValueError(f"{name} in {END_FILE} is {value!r:.80}, not a moment")
    return float(value)


def _rows(values: dict[str, Any], name: str, *kinds: type) -> tuple[Any, ...]:
    rows = values.get(name, [])
    found = []
    for row in rows if isinstance(rows, list) else [rows]:
        items = [row] if len(kinds) == 1 else row if isinstance(row, list) else []
        items = [float(item) if type(item) is int and kind is float else item
                 for item, kind in zip(items, kinds, strict=False)]  # fmt: skip
        if not isinstance(rows, list) or [type(item) for item in items] != list(kinds):
            raise ValueError(f"{name} in {END_FILE} has {row!r:.80}")
        found.append(items[0] if len(kinds) == 1 else tuple(items))
    return tuple(found)
