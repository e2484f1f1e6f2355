"""Where the job goes on from: checkpoints of actor and critic, with what the trainer itself has to know."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from . import remote_call
from .common import write_atomically

KEPT = 2
"""The latest, and the one before it."""


@dataclass(frozen=True)
class Checkpoint:
    """A state of the whole job: after ``step`` steps, with the metrics of all steps so far, from step 0 on."""

    step: int
    history: list[dict[str, float]]


class Checkpoints:
    """The folder ``step-000010``, ``step-000020``, … of a run. One counts only if it is complete: its
    ``trainer.json`` is written last."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, step: int, history: list[dict[str, float]]) -> None:
        """Write one, and remove those that are no longer needed."""
        path = self._path(step)
        remote_call.save_checkpoint(str(path), step)
        text = json.dumps({"step": step, "history": history})
        write_atomically(path / "trainer.json", lambda file: file.write(text.encode()))
        for old in self._complete()[:-KEPT]:
            shutil.rmtree(old)

    def restore(self) -> Checkpoint:
        """Put actor and critic back to the latest, and give the rest of it; without any, the state before step 1."""
        complete = self._complete()
        if not complete:
            return Checkpoint(0, [])
        remote_call.restore(str(complete[-1]))
        return Checkpoint(**json.loads((complete[-1] / "trainer.json").read_bytes()))

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def _complete(self) -> list[Path]:
        return sorted(file.parent for file in self.folder.glob("step-*/trainer.json"))
