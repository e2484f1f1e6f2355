"""`export`: the policy of a run, or of one of its checkpoints, as a plain folder of transformers, LoRA merged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from rlmesh.drafts import draft_beside, remove_drafts
from rlmesh.errors import UsageError
from rlmesh.rl.checkpoints.store import FILE, read_checkpoint
from rlmesh.rl.evaluation.evaluate import of_run_directory
from rlmesh.rl.evaluation.saved_run import load_saved_run
from rlmesh.rl.trainers.progress import finished_steps

if TYPE_CHECKING:
    from rlmesh.rl.trainers.run import Run

__all__ = ["export"]


def export(source: str | Path, folder: str | Path, *, step: int | None = None) -> int:
    """Write a policy as a folder that `from_pretrained` of transformers reads, and vLLM serves: weights in float32 as
    safetensors, an adapter added to them, the configuration, the tokenizer with its chat template.

    Args:
        source: a run directory, or the folder ``checkpoints/step-…`` of a checkpoint in one.
        folder: new, or empty.
        step: of a run directory: the checkpoint of this step; ``None``: the trained model, or the last checkpoint of a
            run that has not ended.

    Returns:
        the number of steps that the policy has seen.

    Raises:
        UsageError: there is nothing to export, the checkpoint is refused, the settings of the run cannot be loaded, or
            the folder exists and is not empty.
        OSError: the folder could not be written.
    """
    source, folder = Path(source).expanduser(), Path(folder).expanduser().absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists already and is not empty: name a new folder")
    if not source.is_dir():
        raise UsageError(f"there is no folder {source}: name a run directory, or one of its checkpoints/step-…")
    if (source / FILE).exists():
        if step is not None:
            raise UsageError(f"{source} is the checkpoint of one step: leave the step out, or name its run directory")
        return _from_checkpoint(source.resolve().parents[1], source, folder)
    found = of_run_directory(source, step)
    if "model" in found:
        return _copied(Path(found["model"]), folder, finished_steps(source))
    return _from_checkpoint(source, Path(found["checkpoint"]).parent, folder)


def _copied(model: Path, folder: Path, steps: int) -> int:
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(draft_beside(folder))
    try:
        draft.mkdir(mode=0o700)  # others read nothing of it before it has the model's own mode
        shutil.copytree(model, draft, dirs_exist_ok=True)
        if folder.exists():
            folder.rmdir()
        draft.replace(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    remove_drafts(folder)
    return steps


def _from_checkpoint(run_dir: Path, checkpoint: Path, folder: Path) -> int:
    from rlmesh.rl.reading.lone_roles import lone_roles

    saved = read_checkpoint(checkpoint)
    saved.require_part("actor")
    run: Run = load_saved_run(run_dir)
    with lone_roles(run, checkpoint, actor_only=True) as (roles, _):
        roles["ACTOR"].invoke("export", str(folder))
    run.tokenizer().save_pretrained(folder)
    return saved.step
