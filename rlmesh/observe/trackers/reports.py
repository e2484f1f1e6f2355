"""The reports of a run for a tracker: read as the file grows, and held in a bounded queue."""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlmesh import private_files
from rlmesh.job.status import MetricRecord
from rlmesh.observe.files.metric_files import METRICS_FILE, decode_record

__all__ = ["Report", "ReportQueue", "ReportReader"]

MOST_BYTES = 1 << 22
"""Bytes that are read at once."""


@dataclass(frozen=True, slots=True)
class Report:
    """A report, and the position in the file after it."""

    record: MetricRecord
    end: int


class ReportReader:
    """Reads ``metrics.jsonl`` from a position on; lines that are not complete yet are left for the next time.

    Args:
        run_dir: of the run.
        position: in bytes.
    """

    def __init__(self, run_dir: Path, position: int = 0) -> None:
        self._path, self._position = run_dir / METRICS_FILE, position

    def read(self) -> Iterator[Report]:
        """The reports that have come since the last call. Torn lines are skipped; a missing file has none."""
        while True:
            try:
                with os.fdopen(private_files.open_file(self._path, os.O_RDONLY), "rb") as file:
                    file.seek(self._position)
                    held = file.read(MOST_BYTES)
            except OSError:
                return
            whole = held.rfind(b"\n") + 1
            if not whole:
                # A line that is longer than what is read at once is no report.
                self._position += len(held) if len(held) == MOST_BYTES else 0
                return
            for line in held[:whole].splitlines(keepends=True):
                self._position += len(line)
                try:
                    yield Report(decode_record(json.loads(line)), self._position)
                except (ValueError, TypeError, KeyError, AttributeError):
                    continue
            if len(held) < MOST_BYTES:
                return


class ReportQueue:
    """Reports that wait for a tracker. When it is full, the oldest is dropped and counted.

    Args:
        most: reports.

    Attributes:
        lost: reports that were dropped.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: deque[Report] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self.lost = 0

    def __len__(self) -> int:
        return len(self._held)

    def put(self, report: Report) -> None:
        """Add a report; never waits."""
        with self._changed:
            if len(self._held) == self._most:
                self._held.popleft()
                self.lost += 1
            self._held.append(report)
            self._changed.notify_all()

    def end(self) -> None:
        """Declare that no report follows."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def first(self) -> Report | None:
        """Wait for the oldest report, and leave it in the queue; ``None`` if the queue has ended and is empty."""
        with self._changed:
            while not self._held and not self._ended:
                self._changed.wait(60.0)
            return self._held[0] if self._held else None

    def done(self, report: Report) -> None:
        """Remove a report, unless it was dropped."""
        with self._changed:
            if self._held and self._held[0] is report:
                self._held.popleft()

    def pause(self, seconds: float) -> None:
        """Wait, but at most a second once the queue has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended, seconds)
        if self._ended:
            threading.Event().wait(min(seconds, 1.0))
