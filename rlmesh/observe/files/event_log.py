"""The event log of a job: ``events.jsonl`` in its run directory, one JSON object per line, in order.

::

    {"at": 1760000000.25, "event": "MemberExited", "who": "REWARD:0", "exit": {"signal": 9, …}}

``at`` is in seconds since the epoch; ``who`` is left out if the event concerns no member. The fields are those of the
master's events and actions. A restarted master appends to the end of the file.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlmesh.job.masking import mask_text
from rlmesh.observe.files.append_file import AppendFile, read_json_lines
from rlmesh.observe.views.safe_text import json_text

__all__ = ["EVENTS_FILE", "EventLog", "entry_of", "read_events"]

logger = logging.getLogger(__name__)

EVENTS_FILE = "events.jsonl"
MOST_RECENT = 400
"""Entries in memory, for incidents."""
LONGEST_TEXT = 4000


class EventLog:
    """Appends entries to the file and holds the last ones in memory. A disk error stops nothing."""

    def __init__(self, run_dir: Path) -> None:
        self._file = AppendFile(run_dir / EVENTS_FILE)
        self._warned = False
        self.recent: deque[dict[str, Any]] = deque(read_events(run_dir), maxlen=MOST_RECENT)

    def add(self, entry: dict[str, Any]) -> None:
        self.recent.append(entry)
        try:
            line = json_text(entry).encode() + b"\n"
            self._file.append(line)
        except (OSError, TypeError, ValueError) as error:
            if not self._warned:
                self._warned = True
                logger.warning("%s cannot be written: %s; the job goes on", self._file.path, error)

    def close(self) -> None:
        self._file.close()


def read_events(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The entries of a run, oldest first; torn lines are skipped. A file that is missing or unsafe to read has none."""
    for entry in read_json_lines(run_dir / EVENTS_FILE):
        if isinstance(entry, dict) and "at" in entry and "event" in entry:
            yield entry


def entry_of(event: object, now: float) -> dict[str, Any]:
    """The entry for a frozen dataclass: its name, the member that it concerns, its fields. Its time is ``exit.at`` or
    ``alarm.at`` if it has one, else ``now``."""
    fields = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}  # type: ignore[arg-type]
    report = fields.get("exit") or fields.get("alarm")
    at = getattr(report, "at", now)
    entry: dict[str, Any] = {"at": round(float(at), 6), "event": type(event).__name__}
    about = report if report is not None else event
    role, rank = getattr(about, "role", None), getattr(about, "rank", None)
    if role is not None and rank is not None:
        entry["who"] = f"{role}:{rank}"
        fields.pop("role", None)
        fields.pop("rank", None)
    return entry | {f"its_{name}" if name in entry else name: plain(value) for name, value in fields.items()}


def plain(value: Any) -> Any:
    """Convert to JSON values; long texts are cut, other objects become their text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        value = mask_text(value)
        return value if len(value) <= LONGEST_TEXT else f"{value[:LONGEST_TEXT]}… ({len(value)} characters)"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return plain(str(value))
