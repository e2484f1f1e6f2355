"""Trackers that misbehave, and one that writes what it gets into a file."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from rlmesh.job.status import MetricRecord
from rlmesh.observe.trackers.protocol import RunInfo, metrics_of


class Writes:
    """Appends each report to ``shown.jsonl`` in the run directory."""

    def open(self, run: RunInfo) -> None:
        self.run = run

    def log(self, record: MetricRecord) -> None:
        self.append({"step": record.step, **metrics_of(record)})

    def append(self, entry: dict[str, Any]) -> None:
        with (Path(self.run.run_dir) / "shown.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def close(self) -> None:
        self.append({"closed": True})


class RaisesThenHangs(Writes):
    """Raises at step 2 at its first two attempts, and hangs for ever from step 4 on."""

    def log(self, record: MetricRecord) -> None:
        count = Path(self.run.run_dir) / "attempts"
        attempts = int(count.read_text()) if count.exists() else 0
        if record.step == 2 and attempts < 2:
            count.write_text(str(attempts + 1))
            raise RuntimeError("no connection")
        if record.step >= 4:
            self.append({"hangs": record.step})
            threading.Event().wait()
        super().log(record)


class Dies(Writes):
    """Kills its process at step 3, once."""

    def log(self, record: MetricRecord) -> None:
        died = Path(self.run.run_dir) / "died"
        if record.step == 3 and not died.exists():
            died.touch()
            os._exit(7)
        super().log(record)


class AlwaysDies(Writes):
    """Kills its process at step 3."""

    def log(self, record: MetricRecord) -> None:
        if record.step == 3:
            os._exit(7)
        super().log(record)


class CannotOpen(Writes):
    """Never opens."""

    def open(self, run: RunInfo) -> None:
        raise ConnectionError("no server")


class Blocks60s(Writes):
    """Raises from step 2 on for 20 attempts, and then blocks for 60 s at each report."""

    attempts = 0

    def log(self, record: MetricRecord) -> None:
        if record.step >= 2:
            Blocks60s.attempts += 1
            if Blocks60s.attempts <= 20:
                raise RuntimeError("no connection")
            threading.Event().wait(60)
        super().log(record)
