"""`CheckpointStore`: the checkpoints of a run on disk. A checkpoint counts only when the parts of all roles are
complete.

::

    checkpoints/step-000012/
        checkpoint.json      written last: the checksums of all parts, metrics, settings
        actor/               a CheckpointFolder: current.json, and the data that it names with their checksums
        critic/              the same
        trainer/state.json   the trainer's objects; arrays.npz if they have arrays

A folder without ``checkpoint.json`` does not count: it was being written when the run ended, or failed.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlmesh import private_files
from rlmesh.errors import UsageError
from rlmesh.rl.checkpoints.state import EncodedState, decoded
from rlmesh.rl.engines.training.checkpoint.checksums import FileSum, damage_of, sums_from, sums_of
from rlmesh.rl.engines.training.checkpoint.folders import CURRENT, write_atomically
from rlmesh.rl.engines.training.checkpoint.ownership import fault_of

__all__ = ["CheckpointStore", "RunCheckpoint", "checkpoint_folder", "saved_step"]

FILE, FORMAT = "checkpoint.json", 1
TRAINER, STATE, ARRAYS = "trainer", "state.json", "arrays.npz"


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    """The folder of the checkpoint of a step."""
    return run_dir / "checkpoints" / f"step-{step:06d}"


def saved_step(run_dir: Path) -> int:
    """The step of the latest complete checkpoint of a run; 0: there is none."""
    return max(_complete_steps(run_dir), default=0)


def _complete_steps(run_dir: Path) -> list[int]:
    found = (run_dir / "checkpoints").glob(f"step-*/{FILE}")
    return sorted(int(number) for path in found if (number := path.parent.name.removeprefix("step-")).isdigit())


@dataclass(frozen=True)
class RunCheckpoint:
    """A complete checkpoint.

    Attributes:
        folder: of all parts.
        step: number of finished steps.
        parts: names of the parts: the sections of the roles (``actor``, ``critic``) and ``trainer``.
        files: size and checksum of the index file of each role's part and of all files of the trainer's part, by their
            paths in the folder.
        metrics: metrics of the step.
        settings: settings of the run, in the form of `rlmesh.rl.checkpoints.changes.described`.
        position: position in the data: seed, epoch, index of the next prompt in the epoch.
    """

    folder: Path
    step: int
    parts: tuple[str, ...]
    files: Mapping[str, FileSum]
    metrics: Mapping[str, float]
    settings: Mapping[str, Any]
    position: Mapping[str, int]

    def require_part(self, name: str) -> Path:
        """The folder of a part. The data of a role's part are checked when the engine loads them.

        Raises:
            UsageError: there is no such part, or it is incomplete or was altered.
        """
        if name not in self.parts:
            raise UsageError(f"{self.folder} has no part {name!r}; it has {', '.join(self.parts)}")
        own = [path for path in self.files if path.startswith(f"{name}/")]
        if damage := damage_of(self.folder, self.files, own):
            raise _refused(self.folder, f"its part {name!r} is not whole: {damage}")
        return self.folder / name

    def trainer_state(self) -> dict[str, Any]:
        """The states of the trainer's objects.

        Raises:
            UsageError: the part is incomplete or was altered, or other users can have written it.
        """
        arrays = self.folder / TRAINER / ARRAYS
        has_arrays = f"{TRAINER}/{ARRAYS}" in self.files
        _refuse_others(arrays.parent, arrays.parent / STATE, *([arrays] if has_arrays else []))
        folder = self.require_part(TRAINER)
        return decoded(EncodedState((folder / STATE).read_bytes(), arrays.read_bytes() if has_arrays else b""))


class CheckpointStore:
    """The checkpoints of one run. The roles write their parts; only the trainer completes and removes checkpoints.

    Args:
        run_dir: the run directory.
        keep_last: number of the latest checkpoints that are kept.
        keep_best: metric of the best checkpoint, which is kept too; with ``-`` before it, the smallest value is the
            best. Empty: only the latest checkpoints are kept.
    """

    def __init__(self, run_dir: Path, *, keep_last: int = 2, keep_best: str = "") -> None:
        self.run_dir, self.keep_last, self.keep_best = run_dir, keep_last, keep_best

    @property
    def latest_step(self) -> int:
        """See `saved_step`."""
        return saved_step(self.run_dir)

    def read(self, step: int) -> RunCheckpoint:
        """See `read_checkpoint`."""
        return read_checkpoint(checkpoint_folder(self.run_dir, step))

    def commit(self, step: int, roles: Sequence[str], state: EncodedState, about: Mapping[str, Any]) -> None:
        """Make the checkpoint of a step count, after all roles have written their parts.

        Args:
            roles: sections of the roles whose parts belong to the checkpoint.
            state: the trainer's state.
            about: metrics, settings and position, see `RunCheckpoint`.

        Raises:
            OSError: the checkpoint could not be written; earlier checkpoints are unchanged.
        """
        folder = checkpoint_folder(self.run_dir, step)
        own = folder / TRAINER
        private_files.make_folder(own)
        written = [f"{TRAINER}/{STATE}"]
        write_atomically(own / STATE, state.text)
        if state.arrays:
            write_atomically(own / ARRAYS, state.arrays)
            written.append(f"{TRAINER}/{ARRAYS}")
        written += [f"{role}/{CURRENT}" for role in roles]
        content = {
            "format": FORMAT,
            "step": step,
            "parts": [*roles, TRAINER],
            "files": {name: asdict(one) for name, one in sums_of(folder, written).items()},
            **about,
        }
        text = json.dumps(content | {"sha256": _digest(content)}, indent=1).encode() + b"\n"
        write_atomically(folder / FILE, text)

    def prune(self) -> None:
        """Remove all checkpoints but the latest and the best."""
        steps = _complete_steps(self.run_dir)
        kept = {*steps[-self.keep_last :], *filter(None, [self.best_step()])}
        for step in steps:
            if step not in kept:
                self.remove(step)

    def best_step(self) -> int:
        """The step of the complete checkpoint with the best value of ``keep_best``, the earliest of equal ones; 0:
        there is none."""
        sign, name = (-1.0, self.keep_best[1:]) if self.keep_best.startswith("-") else (1.0, self.keep_best)
        best, found = 0, -math.inf
        for step in _complete_steps(self.run_dir) if name else ():
            try:
                value = self.read(step).metrics.get(name)
            except UsageError:  # reading it raises the error
                continue
            if value is not None and sign * value > found:
                best, found = step, sign * value
        return best

    def remove(self, step: int) -> None:
        """Remove a checkpoint; it stops to count at once."""
        folder = checkpoint_folder(self.run_dir, step)
        (folder / FILE).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)

    def remove_incomplete(self, *, but: int = 0) -> None:
        """Remove folders that were not completed, except that of the step ``but``. No role may be writing to them."""
        for folder in (self.run_dir / "checkpoints").glob("step-*"):
            if folder != checkpoint_folder(self.run_dir, but) and not (folder / FILE).exists():
                shutil.rmtree(folder, ignore_errors=True)


def read_checkpoint(folder: Path) -> RunCheckpoint:
    """Read a complete checkpoint.

    Raises:
        UsageError: the folder has none, a later version of this library wrote it, its index is incomplete or was
            altered, or other users can have written it.
    """
    path = folder / FILE
    _refuse_others(folder, path)
    try:
        content = json.loads(path.read_bytes())
        claimed = content.pop("sha256")
    except FileNotFoundError:
        raise UsageError(f"{folder} is no complete checkpoint: there is no {FILE}") from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise _refused(folder, f"{path} is torn, or no checkpoint's: {error}") from None
    if claimed != _digest(content):
        raise _refused(folder, f"{path} was altered: its checksum differs from that of what was written")
    if content["format"] != FORMAT:
        raise UsageError(f"{path} has format {content['format']!r}; this version reads {FORMAT}")
    return RunCheckpoint(
        folder,
        content["step"],
        tuple(content["parts"]),
        sums_from(content["files"]),
        content["metrics"],
        content["settings"],
        content["position"],
    )


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _refuse_others(folder: Path, *files: Path) -> None:
    """Refuse a folder or its files if other users can have written them: anyone can compute matching checksums."""
    # The folder first: if others cannot write to it, nobody replaces a file between check and read.
    for path in (folder, *files):
        try:
            found = folder.stat() if path is folder else path.lstat()  # the path to the folder may contain a link
        except FileNotFoundError:
            continue  # reading it raises the error
        if fault := fault_of(path, found):
            raise UsageError(
                f"the checkpoint {folder} is refused: {fault}. If you trust all who could write there, keep others out "
                f"from now on: chmod -R go-w {shlex.quote(str(folder))}"
            )


def _refused(folder: Path, fault: str) -> UsageError:
    return UsageError(
        f"the checkpoint {folder} is refused: {fault}. Remove this folder to go on from the checkpoint before it, or "
        "put back what was written"
    )
