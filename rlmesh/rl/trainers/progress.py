"""`Progress`: the last finished and the last saved step of a run, on disk; the step to which all roles go back.

A checkpoint of a run has one folder per step, with one folder for each role in training. A step counts as saved once
all of them are complete, so an actor and a critic never go on from different steps.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Progress", "checkpoint_folder", "remove_other_checkpoints"]

FILE = "progress.json"


@dataclass(frozen=True)
class Progress:
    """Steps of a run.

    Attributes:
        step: the last step whose results were reported.
        saved: the last step whose checkpoint is complete; 0: none is.
        lost: the number of reported steps that restarts have undone.
    """

    step: int = 0
    saved: int = 0
    lost: int = 0

    @classmethod
    def read(cls, run_dir: Path) -> Progress:
        """The progress of a run; no steps if it has not begun."""
        try:
            return cls(**json.loads((run_dir / FILE).read_text()))
        except FileNotFoundError:
            return cls()

    def write(self, run_dir: Path) -> None:
        """Replace the file as a whole, so that readers find the old or the new steps even after a crash."""
        aside = run_dir / f".{FILE}.{os.getpid()}"
        aside.write_text(json.dumps(asdict(self)) + "\n")
        aside.replace(run_dir / FILE)


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    """The folder of the checkpoint of a step."""
    return run_dir / "checkpoints" / f"step-{step:06d}"


def remove_other_checkpoints(run_dir: Path, step: int) -> None:
    """Remove all checkpoints but that of one step."""
    kept = checkpoint_folder(run_dir, step)
    for folder in kept.parent.glob("step-*"):
        if folder != kept:
            shutil.rmtree(folder, ignore_errors=True)
