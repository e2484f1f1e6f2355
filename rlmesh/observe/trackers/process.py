"""The process of one tracker: ``python -m rlmesh.observe.trackers.process RUN_DIR JOB TRACKER FINISH_S QUEUE``.

A thread reads the reports into a queue; the main thread gives them to the tracker, since some trackers want that. The
process ends when its standard input does: once the job has ended, or its driver has died. It has FINISH_S seconds then
to deliver what is left.
"""

from __future__ import annotations

import json
import logging
import os
import re
import select
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rlmesh import private_files
from rlmesh.observe.trackers.protocol import RunInfo, Tracker, make_tracker, project_of
from rlmesh.observe.trackers.reports import ReportQueue, ReportReader

__all__ = ["TrackerDelivery", "TrackerState", "deliver", "state_file"]

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""Seconds between two looks at the file."""
NOTE_S = 5.0
"""Seconds between two notes of the position."""
RETRY_S, MOST_RETRY_S = 1.0, 60.0
FOLDER = "trackers"
LONGEST = 2000
"""Characters of a setting that a tracker gets."""


@dataclass
class TrackerState:
    """The state of a tracker on disk, which a later start of the run goes on from.

    Attributes:
        run_id: of the run in the tracker.
        position: in the file of reports, after the last one that was delivered.
        lost: reports that were not delivered, in all starts.
        failure: the last failure of the tracker; empty if it works.
    """

    run_id: str
    position: int = 0
    lost: int = 0
    failure: str = ""

    @classmethod
    def read(cls, path: Path) -> TrackerState:
        """The state of an earlier start, or a new one."""
        try:
            return cls(**json.loads(private_files.read(path)))
        except (OSError, ValueError, TypeError):
            return cls(uuid.uuid4().hex)

    def write(self, path: Path) -> None:
        """Replace the file; an error is ignored, since the tracker goes on without it."""
        try:
            private_files.make_folder(path.parent)
            private_files.write_whole(path, json.dumps(asdict(self)) + "\n", durable=False)
        except OSError:
            pass


def state_file(run_dir: Path, tracker: str) -> Path:
    """The file of a tracker's state."""
    return run_dir / FOLDER / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', tracker)}.json"


class TrackerDelivery:
    """Gives reports to a tracker until the queue ends.

    Args:
        name: of the tracker.
        make: makes the tracker.
        run: that the tracker shows.
        queue: of reports.
        state: noted in ``path`` from time to time.
        path: of the state.
    """

    def __init__(
        self, name: str, make: Callable[[], Tracker], run: RunInfo, queue: ReportQueue, state: TrackerState, path: Path
    ) -> None:
        self._name, self._make, self._run = name, make, run
        self._queue, self._state, self._path = queue, state, path
        self._tracker: Tracker | None = None
        self._retry_s, self._failures, self._noted_at = RETRY_S, 0, 0.0
        self._lost_before = state.lost

    def work(self) -> None:
        """Deliver all reports, in order. A failure is logged once, and the report is tried again."""
        while (report := self._queue.first()) is not None:
            try:
                if self._tracker is None:
                    tracker = self._make()
                    tracker.open(self._run)
                    self._tracker = tracker
                self._tracker.log(report.record)
            except Exception as error:  # a tracker may raise anything
                self._failed(error)
                continue
            self._queue.done(report)
            self._worked(report.end)
        try:
            if self._tracker is not None:
                self._tracker.close()
        except Exception as error:
            logger.warning("tracker %s: close failed: %s: %s", self._name, type(error).__name__, error)
        self.note(0)

    def note(self, undelivered: int) -> None:
        """Write the state, with a number of reports that will not be delivered any more."""
        self._state.lost = self._lost_before + self._queue.lost + undelivered
        self._state.write(self._path)

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        text = f"{type(error).__name__}: {error}"
        if not self._state.failure:
            logger.warning("tracker %s failed, and is tried again: %s", self._name, text, exc_info=self._failures == 1)
            self._state.failure = text
            self.note(0)
        broken, self._tracker = self._tracker, None
        if broken is not None:
            try:
                broken.close()
            except Exception:
                pass  # it has failed already
        self._queue.pause(self._retry_s)
        self._retry_s = min(2 * self._retry_s, MOST_RETRY_S)

    def _worked(self, position: int) -> None:
        self._state.position, self._retry_s = position, RETRY_S
        if self._state.failure:
            logger.warning("tracker %s works again after %d attempts", self._name, self._failures)
            self._state.failure, self._failures = "", 0
        if time.monotonic() - self._noted_at > NOTE_S:
            self._noted_at = time.monotonic()
            self.note(0)


def deliver(run_dir: Path, job: str, name: str, finish_s: float, most: int) -> None:
    """Deliver the reports of a run to a tracker, until standard input ends and for ``finish_s`` seconds after that."""
    path = state_file(run_dir, name)
    state = TrackerState.read(path)
    state.failure = ""
    queue, reader = ReportQueue(most), ReportReader(run_dir, state.position)
    run = RunInfo(run_dir, job, project_of(name), state.run_id, _settings(run_dir))
    delivery = TrackerDelivery(name, lambda: make_tracker(name), run, queue, state, path)
    delivered = threading.Event()

    def read() -> None:
        ended = False
        while not ended:
            ended = bool(select.select([sys.stdin], [], [], LOOK_S)[0])
            for report in reader.read():
                queue.put(report)
        queue.end()
        if not delivered.wait(finish_s):
            left = len(queue)
            logger.warning("tracker %s did not take %d reports within %g s after the end", name, left, finish_s)
            delivery.note(left)
            os._exit(1)  # the main thread hangs in the tracker

    threading.Thread(target=read, name="reports", daemon=True).start()
    delivery.work()
    delivered.set()


def _settings(run_dir: Path) -> dict[str, object]:
    try:
        found = json.loads(private_files.read(run_dir / "job.json"))
    except (OSError, ValueError):
        return {}
    config = found.get("user_config") if isinstance(found, dict) else None
    # Settings may hold the rows of a data set, which no tracker is for.
    return (
        {key: value for key, value in config.items() if len(str(value)) < LONGEST} if isinstance(config, dict) else {}
    )


if __name__ == "__main__":
    os.umask(0o077)  # trackers write into the run directory
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    folder, job_name, tracker_name, limit_s, size = sys.argv[1:]
    deliver(Path(folder), job_name, tracker_name, float(limit_s), int(size))
