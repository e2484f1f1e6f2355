"""Checkpoints of the job: states of actor and critic, the trainer's history, and the number of lost steps."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from . import remote_call
from .common import write_atomically

KEPT = 2
"""Number of stored checkpoints."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of the job after ``step`` steps.

    Attributes:
        history: metrics of all steps, from step 0 on.
        lost: total number of steps that restarts have undone.
    """

    step: int
    history: list[dict[str, float]]
    lost: int = 0


class Checkpoints:
    """The folders ``step-000010``, ``step-000020``, … of a run; ``trainer.json``, written last, marks complete ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, step: int, history: list[dict[str, float]]) -> None:
        """Write a checkpoint, and remove old ones."""
        path = self._path(step)
        remote_call.save_checkpoint(str(path), step)
        text = json.dumps({"step": step, "history": history})
        write_atomically(path / "trainer.json", lambda file: file.write(text.encode()))
        for old in self._complete()[:-KEPT]:
            shutil.rmtree(old)

    def restore(self) -> Checkpoint:
        """Restore actor and critic from the latest checkpoint and return it; without any, the state before step 1."""
        complete = self._complete()
        found = Checkpoint(0, [])
        if complete:
            remote_call.restore(str(complete[-1]))
            found = Checkpoint(**json.loads((complete[-1] / "trainer.json").read_bytes()))
        reached, lost = self._progress()
        lost += max(0, reached - found.step)
        self.reached(found.step, lost)
        return replace(found, lost=lost)

    def reached(self, step: int, lost: int) -> None:
        """Store the last finished step and the number of lost steps, for a restarted trainer."""
        text = json.dumps({"step": step, "lost": lost})
        write_atomically(self.folder / "progress.json", lambda file: file.write(text.encode()))

    def _progress(self) -> tuple[int, int]:
        try:
            noted = json.loads((self.folder / "progress.json").read_bytes())
        except FileNotFoundError:
            return 0, 0
        return noted["step"], noted["lost"]

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def _complete(self) -> list[Path]:
        return sorted(file.parent for file in self.folder.glob("step-*/trainer.json"))
