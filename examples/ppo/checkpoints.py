"""Where the job goes on from: checkpoints of actor and critic, with what the trainer itself has to know, and how many
steps were lost on the way."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from . import remote_call
from .common import write_atomically

KEPT = 2
"""The latest, and the one before it."""


@dataclass(frozen=True)
class Checkpoint:
    """A state of the whole job: after ``step`` steps, with the metrics of all steps so far, from step 0 on.

    Attributes:
        lost: steps that were made and lost to restarts so far, all in all.
    """

    step: int
    history: list[dict[str, float]]
    lost: int = 0


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
        found = Checkpoint(0, [])
        if complete:
            remote_call.restore(str(complete[-1]))
            found = Checkpoint(**json.loads((complete[-1] / "trainer.json").read_bytes()))
        reached, lost = self._progress()
        lost += max(0, reached - found.step)
        self.reached(found.step, lost)
        return replace(found, lost=lost)

    def reached(self, step: int, lost: int) -> None:
        """Note the last step that was made, and how many were lost: of use also to a trainer that is restarted."""
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
