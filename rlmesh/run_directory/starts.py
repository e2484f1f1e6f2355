"""The history of a run directory's starts: ``starts.json``.

A job that was stopped, or that died, and is started again in the same directory is resumed: its roles see it in
``current_worker().resume``. A job that succeeded is not resumed.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from rlmesh import private_files
from rlmesh.errors import LaunchError
from rlmesh.job.context import Resume
from rlmesh.master.state.filesystems import network_file_system
from rlmesh.master.state.store import STORE_FILE, read_fact
from rlmesh.runtime.process.clock import epoch

__all__ = ["STARTS_FILE", "await_guardians", "hold", "note_end", "note_start"]

logger = logging.getLogger(__name__)

STARTS_FILE = "starts.json"
HOLD_FILE = "held-by.json"
ENDING_S = 15.0
"""Seconds after which the guardians of a dead driver have ended."""
POLL_S = 0.05


def hold(run_dir: Path) -> int | None:
    """Lock the run directory for this process until the descriptor is closed or the process ends.

    Only on local file systems: a network file server may hold the lock of a lost machine, and block the next start of
    its
    job. There the result is None.

    Raises:
        LaunchError: another job runs there; says which.
    """
    if network_file_system(run_dir):
        return None
    held = private_files.hold(run_dir / HOLD_FILE)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        text = os.pread(held, 4096, 0).decode(errors="replace")
        os.close(held)
        raise LaunchError(
            f"another job runs in {run_dir}{_holder(text)}: two would spoil each other's state. Name another folder "
            f"by --run-dir, or end that job first: rlmesh stop {run_dir}"
        ) from None
    os.truncate(held, 0)
    os.pwrite(held, json.dumps({"pid": os.getpid(), "since": time.time()}).encode() + b"\n", 0)
    return held


def await_guardians(run_dir: Path, within_s: float = ENDING_S) -> None:
    """Wait for the guardians of an earlier job, whose driver is gone, to end their processes.

    Each guardian holds a shared lock on the run directory.

    Raises:
        LaunchError: they have not ended in time.
    """
    folder = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = time.monotonic() + within_s
    try:
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LaunchError(
                        f"an earlier job in {run_dir} has not ended: after {within_s:g} s its guardian still runs. "
                        "Name another folder by --run-dir, or see what is left of it: rlmesh ps --all"
                    ) from None
            except OSError:
                return  # The file system has no locks.
            time.sleep(POLL_S)
    finally:
        os.close(folder)


def _holder(text: str) -> str:
    try:
        values = json.loads(text)
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(values["since"])))
        return f" (started by pid {int(values['pid'])} at {since})"
    except (ValueError, KeyError, TypeError):
        return ""


def note_start(run_dir: Path, restarts: int = 0, now: float | None = None) -> Resume | None:
    """Record a start and return what it resumes; None for a first start, or if the last one succeeded.

    Args:
        restarts: number of earlier starts by a scheduler.
    """
    before = _read(run_dir)
    starts = int(before.get("starts", 0))
    count = max(starts, restarts)
    resume = None
    if count and not before.get("succeeded"):
        resume = Resume(count, before.get("stopped_at"), _samples_trained(run_dir, before))
    _write(run_dir, {"starts": count + 1 if resume else 1, "started_at": epoch() if now is None else now})
    return resume


def note_end(run_dir: Path, *, succeeded: bool, stopped_at: int | None, samples_trained: int = 0) -> None:
    """Record how the last start ended; a write error is logged only.

    ``stopped_at`` is the step after which all ranks stopped, if they did.
    """
    end = {"succeeded": succeeded, "stopped_at": stopped_at, "samples_trained": samples_trained}
    try:
        _write(run_dir, {**_read(run_dir), **end})
    except OSError as error:
        logger.warning("how the job ended could not be noted in %s: %s", run_dir / STARTS_FILE, error)


def _samples_trained(run_dir: Path, before: dict[str, Any]) -> int:
    """Return the count recorded at the last end, or, if the last start died, the one that its master saved."""
    try:
        return int(before.get("samples_trained") or read_fact(run_dir / STORE_FILE, "samples_trained") or 0)
    except ValueError:
        return 0


def _read(run_dir: Path) -> dict[str, Any]:
    try:
        found = json.loads(private_files.read(run_dir / STARTS_FILE))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(run_dir: Path, values: dict[str, Any]) -> None:
    private_files.write_whole(run_dir / STARTS_FILE, json.dumps(values) + "\n")
