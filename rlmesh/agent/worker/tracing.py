"""Single calls of a member, on disk: what ``rlmesh timeline`` draws.

One line per flush in ``<run_dir>/timeline/<ROLE>-<rank>.jsonl``::

    {"offset_ns": …, "dropped": 0, "calls": [[callee, method, started_ns, ended_ns, answered, executed_ns, queued_ns,
                                              sent_bytes, received_bytes], …]}

``offset_ns`` added to a time gives ns since the epoch. The callee's side needs no file of its own: how long the call
was queued and ran there came with its answer. Of very many calls the longest and an even sample are kept, and of very
long jobs the end: a member never has more than ``2 * FILE_BYTES`` on disk.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from rlmesh.observe.files.append_file import TIMELINE_FOLDER, AppendFile
from rlmesh.runtime.calling.call_stats import EndedCall
from rlmesh.runtime.process import clock

__all__ = ["CallTrace"]

logger = logging.getLogger(__name__)

FILE_BYTES = 8 << 20
PER_FLUSH = 2000
"""Calls of one flush that are kept."""
MOST_PENDING = 50_000
"""Calls that may wait for a flush; later ones are only counted."""


class CallTrace:
    """Collects the ended calls of one member, and writes them when told to.

    Args:
        run_dir: of the job.
        role, rank: of the member.
    """

    def __init__(self, run_dir: Path, role: str, rank: int) -> None:
        self._path = run_dir / TIMELINE_FOLDER / f"{role}-{rank}.jsonl"
        self._file = AppendFile(self._path)
        self._pending: list[EndedCall] = []
        self._dropped = 0
        self._written = self._path.stat().st_size if self._path.exists() else 0
        self._broken = False
        self._turn = threading.RLock()
        """The runtime's thread adds and flushes, and the main thread closes."""

    def add(self, calls: Sequence[EndedCall]) -> None:
        """Take calls in. From any thread."""
        with self._turn:
            room = MOST_PENDING - len(self._pending)
            self._pending += calls[: max(0, room)]
            self._dropped += max(0, len(calls) - max(0, room))

    def flush(self) -> None:
        """Write what was taken in. A disk that fails ends the trace, and nothing else."""
        with self._turn:
            self._flush()

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        dropped, self._dropped = self._dropped, 0
        calls = [call for call in pending if not call[0].startswith("@")]
        kept = chosen(calls, PER_FLUSH)
        if self._broken or not (kept or dropped):
            return
        line = json.dumps(
            {
                "offset_ns": round(clock.epoch() * 1e9) - time.perf_counter_ns(),
                "dropped": dropped + len(calls) - len(kept),
                "calls": [(*call[:2], *call[3:10]) for call in kept],
            },
            separators=(",", ":"),
        )
        try:
            if self._written > FILE_BYTES:
                self._file.close()
                os.replace(self._path, self._path.with_suffix(".old.jsonl"))
                self._written = 0
            self._file.append(line.encode() + b"\n")
            self._written += len(line)
        except OSError as error:
            self._broken = True
            logger.warning("the timeline ends here, %s cannot be written: %s", self._path, error)

    def close(self) -> None:
        """Write what is left; what comes later is not noted."""
        with self._turn:
            self._flush()
            self._broken = True
            self._file.close()


def chosen(calls: Sequence[EndedCall], most: int) -> list[EndedCall]:
    """At most so many of the calls, in their order: the longest, and an even sample of the others."""
    if len(calls) <= most:
        return list(calls)
    longest = sorted(range(len(calls)), key=lambda at: calls[at][4] - calls[at][3], reverse=True)[: most // 2]
    left = most - len(longest)
    sample = (at * len(calls) // left for at in range(left))
    return [calls[at] for at in sorted({*longest, *sample})]
