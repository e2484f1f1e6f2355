"""Files with the metrics of a run: ``metrics.jsonl`` and TensorBoard scalars, written by the master's process.

One JSON object per line and per report::

    {"at": 1760000000.25, "role": "TRAINER", "rank": 0, "step": 7,
     "metrics": {"reward_mean": 0.41, "step_time_s": 0.53},
     "sender": "TRAINER:0.0/71", "number": 8,
     "calls": [{"role": "ROLLOUT", "method": "generate", "calls": 1, "wall_s": 0.2, …}]}

``at`` is in seconds since the epoch. ``number`` counts a sender's reports, so that a restarted master
knows which of them are stored. Each process of a member is a sender; if a step was repeated after a restart, the
reports of the newest sender count. Metrics have all their digits, and integers stay integers. Values
that JSON lacks are the strings ``"nan"``, ``"inf"``, ``"-inf"``. Times of calls are rounded to nanoseconds.
A line that a killed master left half-written is removed by the next one; readers skip it until then.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rlmesh import private_files
from rlmesh.job.status import CallStats, MetricRecord
from rlmesh.observe.files.append_file import AppendFile, read_json_lines
from rlmesh.observe.files.repeated_steps import current_reports
from rlmesh.observe.files.tensorboard import EventFile
from rlmesh.observe.views.safe_text import json_text

__all__ = ["METRICS_FILE", "MetricsWriter", "decode_record", "read_records", "read_tail"]

logger = logging.getLogger(__name__)

NO_STEP = -1
_STEP = re.compile(rb'"step":(-?\d+),"metrics":')
_TAIL_BYTES = 4 << 20
METRICS_FILE = "metrics.jsonl"
"""Name of the file inside the run directory."""


class MetricsWriter:
    """Appends reports to ``<run_dir>/metrics.jsonl`` and ``<run_dir>/tensorboard/``.

    Each report is one ``write`` to the file and nothing is buffered in the process, so that every report
    survives any death of the master. A disk error never stops the training: the first one is
    logged as a warning, and each further report tries again.
    """

    def __init__(self, run_dir: Path) -> None:
        self._lines = AppendFile(run_dir / METRICS_FILE)
        self._events = EventFile(run_dir / "tensorboard")
        self._senders: dict[tuple[str, int], str] = {}
        self._highest: int | None = None
        self._warned = False
        self.lost = 0

    def write(self, record: MetricRecord) -> None:
        """Append one report; on an error count it in ``lost`` and go on."""
        try:
            line = _encode(record)
            replays = self._may_replay(record)
            self._lines.append(line)
            if replays is not None:
                self._events.expect_replay(replays, at=record.at)
            self._events.add_scalars(_tags(record), step=record.step, at=record.at)
        except (OSError, TypeError, ValueError) as error:
            self.lost += 1
            if not self._warned:
                self._warned = True
                logger.warning(
                    "metrics of %s:%d at step %d could not be written to %s: %s; the job goes on, later "
                    "reports are tried again and only counted if they fail too",
                    record.role, record.rank, record.step, self._lines.path, error,
                )  # fmt: skip

    def _may_replay(self, record: MetricRecord) -> int | None:
        """The highest step so far, if a new process of a member begins to report."""
        member = (record.role, record.rank)
        if self._highest is None:
            self._highest = _highest_step(self._lines.path)
        before = self._highest
        known = self._senders.get(member)
        self._senders[member] = record.sender
        self._highest = max(before, record.step)
        began_anew = known is None and before > NO_STEP and not self._events.is_open
        return before if (known is not None and known != record.sender) or began_anew else None

    def close(self) -> None:
        """Close both files. Safe to call twice."""
        self._lines.close()
        self._events.close()
        if self.lost:
            lost, self.lost = self.lost, 0
            logger.warning("%d reports are missing in %s", lost, self._lines.path)


def read_records(path: Path, *, replaced: bool = False) -> Iterator[MetricRecord]:
    """The reports in a ``metrics.jsonl``, oldest first; torn lines are skipped, a missing file has none.

    Args:
        replaced: include reports of steps that their member repeated after a restart.
    """
    return iter(_read_all(path) if replaced else current_reports(_read_all(path)))


def _read_all(path: Path) -> Iterator[MetricRecord]:
    for entry in read_json_lines(path):
        try:
            yield decode_record(entry)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue


def read_tail(path: Path, most: int) -> tuple[int, list[MetricRecord]]:
    """The number of whole lines in a ``metrics.jsonl``, and the reports in the last ``most`` lines, oldest first."""
    count = 0
    last: deque[bytes] = deque(maxlen=most)
    try:
        with os.fdopen(private_files.open_file(path, os.O_RDONLY), "rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    count += 1
                    last.append(line)
    except OSError:
        pass
    records = []
    for line in last:
        try:
            records.append(decode_record(json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError):
            count -= 1  # torn; readers skip it
    return count, records


def _highest_step(path: Path) -> int:
    """The highest step among the reports at the end of a file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return max((int(found) for found in _STEP.findall(file.read())), default=NO_STEP)
    except OSError:
        return NO_STEP


def _encode(record: MetricRecord) -> bytes:
    entry: dict[str, Any] = {
        "at": round(record.at, 6),
        "role": record.role,
        "rank": record.rank,
        "step": record.step,
        "metrics": {name: _to_json(value) for name, value in record.metrics.items()},
    }
    if record.number:
        entry["sender"], entry["number"] = record.sender, record.number
    if record.calls:
        entry["calls"] = [
            {key: _seconds_to_json(value) if isinstance(value, float) else value for key, value in asdict(c).items()}
            for c in record.calls
        ]
    return json_text(entry).encode() + b"\n"


def decode_record(entry: Mapping[str, Any]) -> MetricRecord:
    """The report in a line.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: the line is no report.
    """
    return MetricRecord(
        at=float(entry["at"]),
        role=str(entry["role"]),
        rank=int(entry["rank"]),
        step=int(entry["step"]),
        metrics={str(name): _from_json(value) for name, value in entry["metrics"].items()},
        calls=tuple(_decode_call(call) for call in entry.get("calls", ())),
        sender=str(entry.get("sender", "")),
        number=int(entry.get("number", 0)),
    )


def _decode_call(entry: Mapping[str, Any]) -> CallStats:
    values: dict[str, Any] = {}
    for field in fields(CallStats):
        if field.name in entry:
            value = entry[field.name]
            values[field.name] = float(value) if field.type == "float" else value
    return CallStats(**values)


def _to_json(value: float) -> float | str:
    """Convert a metric with all its digits."""
    if isinstance(value, int):
        return int(value)  # True is 1
    value = float(value)
    return value if math.isfinite(value) else str(value)


def _from_json(value: object) -> float:
    if isinstance(value, int):
        return value
    return float(value)  # type: ignore[arg-type]  # TypeError: the line is not a report


def _seconds_to_json(value: float) -> float | str:
    """Round to nanoseconds, the resolution of the clocks; further digits are noise of the arithmetic."""
    return round(value, 9) if math.isfinite(value) else str(value)


def _tags(record: MetricRecord) -> dict[str, float]:
    """The scalars by TensorBoard tag; rank 0 has the plain name of its role."""
    member = record.role if record.rank == 0 else f"{record.role}:{record.rank}"
    return {f"{member}/{name}": float(value) for name, value in record.metrics.items()}
