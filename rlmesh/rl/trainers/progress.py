"""`Progress`: the last finished step of a run, in a file, from which a trainer that restarts alone continues.

The file is written after each step, without fsync: it survives the end of the process. After a crash of the machine,
the run continues from a checkpoint.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rlmesh import current_worker, private_files
from rlmesh.errors import UsageError

__all__ = ["MODEL", "SUMMARY", "Progress", "finished_steps", "trained_role_restarted"]

FILE = "progress.json"
SUMMARY, MODEL = "summary.json", "model"
"""Names of what a finished run leaves: the file of its last metrics, and the folder of the policy."""
RESTART_NEWS_S = 2.0
"""Seconds to wait after a failed call for the event of a restart that may have caused it."""


@dataclass(frozen=True)
class Progress:
    """The last finished step of a run.

    Attributes:
        step: the last step that was reported.
        lost: number of reported steps that restarts have undone.
        state: the states of the trainer's objects after the step, as JSON; None: they are too large, and in checkpoints
            only.
    """

    step: int = 0
    lost: int = 0
    state: str | None = None

    @classmethod
    def read(cls, run_dir: Path) -> Progress:
        """Read the progress of a run; step 0 if it has not begun.

        Raises:
            UsageError: another version of this library wrote the file, or other users can have written it.
        """
        path = run_dir / FILE
        try:
            return cls(**json.loads(private_files.read(path)))
        except (FileNotFoundError, ValueError):  # a crash of the machine may leave an empty file
            return cls()
        except private_files.UnsafeFile as error:
            raise UsageError(f"the run cannot go on: {error}") from None
        except TypeError as error:
            raise UsageError(f"{path} is of another version of rlmesh, so the run cannot go on: {error}") from None

    def write(self, run_dir: Path) -> None:
        """Replace the file as a whole, so that readers find the old or the new steps even after a crash."""
        private_files.write_whole(run_dir / FILE, json.dumps(asdict(self)) + "\n", durable=False)


def finished_steps(run_dir: Path) -> int:
    """The number of steps of a finished run; 0: the run is not finished."""
    try:
        return int(json.loads((run_dir / SUMMARY).read_text())["steps"])
    except FileNotFoundError:
        return 0


def trained_role_restarted() -> bool:
    """True if actor or critic restarted, which explains a failed call. The event may come after the error."""
    deadline = time.monotonic() + RESTART_NEWS_S
    while (left_s := deadline - time.monotonic()) > 0:
        if any(event.role in ("ACTOR", "CRITIC") for event in current_worker().events(left_s)):
            return True
    return False
