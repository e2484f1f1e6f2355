"""Parts of another run's checkpoint with which a new run begins: ``Run(restore=…, restore_parts=…)``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlmesh.errors import UsageError
from rlmesh.rl.checkpoints.changes import Resumable, parts_of
from rlmesh.rl.checkpoints.store import (
    FILE,
    RunCheckpoint,
    checkpoint_folder,
    read_checkpoint,
    saved_step,
)
from rlmesh.rl.faults import did_you_mean

if TYPE_CHECKING:
    from rlmesh.rl.engines.training.protocol import TrainingEngine

__all__ = ["PARTS", "Beginning", "beginning_of", "restore_faults"]

PARTS = ("weights", "optimizer", "actor.weights", "actor.optimizer", "critic.weights", "critic.optimizer")
"""``weights`` and ``optimizer`` stand for all models in training that the checkpoint has."""


@dataclass(frozen=True)
class Beginning:
    """The checkpoint of another run with which a new run begins.

    Attributes:
        checkpoint: the checkpoint.
        parts: the members of `PARTS` that the run takes from it.
    """

    checkpoint: RunCheckpoint
    parts: tuple[str, ...]

    def takes(self, role: str, what: str) -> bool:
        """True if a role (``actor``) takes its ``weights`` or ``optimizer`` from the checkpoint."""
        return f"{role}.{what}" in self.parts or (what in self.parts and role in self.checkpoint.parts)

    def load(self, role: str, engine: TrainingEngine) -> None:
        """Load a role's part into a new engine. Its step count stays 0, so the learning rate begins anew.

        Raises:
            UsageError: the part is incomplete, was altered, or belongs to another model.
        """
        if not self.takes(role, "weights"):
            return
        folder = self.checkpoint.require_part(role)
        engine.load(folder, weights_only=not self.takes(role, "optimizer"))
        engine.steps = 0


def beginning_of(run: Resumable) -> Beginning | None:
    """The checkpoint that ``Run.restore`` names; None: it names none.

    Raises:
        UsageError: there is no complete checkpoint.
    """
    if run.restore is None:
        return None
    return Beginning(read_checkpoint(_folder_of(Path(run.restore).expanduser())), tuple(run.restore_parts))


def _folder_of(path: Path) -> Path:
    """The folder of a checkpoint. ``path`` is this folder, or a run directory, which stands for its latest
    checkpoint."""
    if (path / FILE).exists():
        return path
    run_dir = path.parent if path.name == "checkpoints" else path
    if step := saved_step(run_dir):
        return checkpoint_folder(run_dir, step)
    if not path.exists():
        raise UsageError(f"there is no {path}: name a run directory, or one of its folders checkpoints/step-…")
    raise UsageError(f"{path} holds no complete checkpoint: there is no checkpoints/step-…/{FILE}")


def restore_faults(run: Resumable) -> Iterator[str]:
    """One sentence per fault of ``restore`` and ``restore_parts``."""
    if isinstance(run.restore_parts, str) or not run.restore_parts:
        yield f"restore_parts={run.restore_parts!r} must be a list of some of {', '.join(PARTS)}"
        return
    unknown = [part for part in run.restore_parts if part not in PARTS]
    for part in unknown:
        yield f"restore_parts: there is no {part!r}{did_you_mean(part, PARTS, f': {PARTS}')}"
    if unknown or run.restore is None:
        return
    try:
        beginning = beginning_of(run)
    except UsageError as error:
        yield f"restore: {error}"
        return
    assert beginning is not None
    yield from _faults(beginning, parts_of(run.algorithm))


def _faults(beginning: Beginning, roles: Sequence[str]) -> Iterator[str]:
    saved = beginning.checkpoint
    for part in beginning.parts:
        role, _, what = part.rpartition(".")
        if role and role not in saved.parts:
            yield f"restore_parts: {saved.folder} has no {role}; it has {', '.join(saved.parts)}"
        elif role and role not in roles:
            yield f"restore_parts: {part!r}, but this run has no {role}"
        if what == "optimizer" and not all(
            beginning.takes(one, "weights") for one in ([role] if role else roles) if beginning.takes(one, what)
        ):
            owner = f"{role}." if role else ""
            yield f"restore_parts: {part!r} without the weights that it belongs to; add '{owner}weights'"
    for role in roles:
        if role in saved.parts and beginning.takes(role, "weights"):
            try:
                saved.require_part(role)
            except UsageError as error:
                yield f"restore: {error}"
