"""The roles of a recorded run in this process, without engines, with the weights of a checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlmesh import JobInfo, WorkerContext
from rlmesh.drafts import scratch_folder
from rlmesh.rl.checkpoints.store import checkpoint_folder, read_checkpoint
from rlmesh.rl.offline.roles import OfflineActor
from rlmesh.rl.roles.critic import CriticRole
from rlmesh.rl.roles.reference import ReferenceRole
from rlmesh.rl.trainers.here import MetricsLink, RoleHere, one_rank_each, roles_here
from rlmesh.rl.trainers.job import offline_roles

if TYPE_CHECKING:
    from rlmesh.rl.trainers.run import Run

__all__ = ["lone_roles"]


@contextmanager
def lone_roles(
    run: Run, checkpoint: Path | None, *, actor_only: bool = False
) -> Iterator[tuple[dict[str, RoleHere], WorkerContext]]:
    """Make actor, critic and reference (those that the algorithm needs), each with one rank, and a trainer's context.

    Nothing is written into the run directory.

    Args:
        run: the settings of the run.
        checkpoint: the folder of a checkpoint; ``None``: the roles have the weights with which the run began.
        actor_only: without critic and reference.

    Raises:
        UsageError: the checkpoint is refused.
    """
    needs, responses = run.algorithm.needs, run.algorithm.responses
    kinds: dict[str, type[Any]] = {"ACTOR": offline_roles(responses)[1] or OfflineActor}
    if not actor_only and "reference" in needs:
        kinds["REFERENCE"] = ReferenceRole
    if not actor_only and "critic" in needs and responses != "ranked":
        kinds["CRITIC"] = CriticRole
    run_dir = Path(scratch_folder("rlmesh-replay"))
    try:
        if checkpoint is not None:
            step = read_checkpoint(checkpoint).step
            link = checkpoint_folder(run_dir, step)
            link.parent.mkdir()
            link.symlink_to(checkpoint.resolve())
        device = "GPU" if torch.cuda.is_available() else "CPU"
        job = JobInfo("replay", "replay", one_rank_each(run), device)

        def context(role: str) -> WorkerContext:
            return WorkerContext(job, role, 0, 1, MetricsLink(run_dir), run_dir=run_dir)

        with roles_here(kinds, context) as roles:
            yield roles, context("TRAINER")
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
