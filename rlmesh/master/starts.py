"""What a run directory remembers of the starts of its job: ``starts.json``.

A job that was stopped, or that died, and is started again in the same directory is resumed: its roles see it in
``current_worker().resume``. One that succeeded is not.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from rlmesh.job.context import Resume
from rlmesh.master.store import STORE_FILE, read_fact

__all__ = ["STARTS_FILE", "note_end", "note_start"]

STARTS_FILE = "starts.json"


def note_start(run_dir: Path, restarts: int = 0, now: float | None = None) -> Resume | None:
    """Note a start, and say of what it is the resumption; None if it is the first one, or the last one succeeded.

    Args:
        restarts: how often a scheduler says that it started the job before.
    """
    before = _read(run_dir)
    starts = int(before.get("starts", 0))
    count = max(starts, restarts)
    resume = None
    if count and not before.get("succeeded"):
        resume = Resume(count, before.get("stopped_at"), _samples_trained(run_dir, before))
    _write(run_dir, {"starts": count + 1 if resume else 1, "started_at": time.time() if now is None else now})
    return resume


def note_end(run_dir: Path, *, succeeded: bool, stopped_at: int | None, samples_trained: int = 0) -> None:
    """Note how the last start ended: ``stopped_at`` is the step after which all ranks stopped, if they did."""
    end = {"succeeded": succeeded, "stopped_at": stopped_at, "samples_trained": samples_trained}
    _write(run_dir, {**_read(run_dir), **end})


def _samples_trained(run_dir: Path, before: dict[str, Any]) -> int:
    """As noted at the end of the last start; of one that died, as its master has saved it."""
    try:
        return int(before.get("samples_trained") or read_fact(run_dir / STORE_FILE, "samples_trained") or 0)
    except ValueError:
        return 0


def _read(run_dir: Path) -> dict[str, Any]:
    try:
        found = json.loads((run_dir / STARTS_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(run_dir: Path, values: dict[str, Any]) -> None:
    path = run_dir / STARTS_FILE
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(values) + "\n")
    new.replace(path)
