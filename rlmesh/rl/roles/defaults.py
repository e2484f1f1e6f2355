"""The settings of the run, as the built-in roles find them, and the device of this process."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from rlmesh import current_worker
from rlmesh.errors import UsageError

if TYPE_CHECKING:
    from rlmesh.rl.trainers.run import Run

__all__ = ["choose_device", "keep_objects", "run_settings"]


def run_settings() -> Run:
    """The `Run` of the job: what was given to ``.config(…)``, a `Run` or anything that `Run.from_config` takes.

    Raises:
        UsageError: the configuration is neither.
    """
    from rlmesh.rl.trainers.run import Run

    worker = current_worker()
    given = worker.job_info.user_config
    if isinstance(given, Run):
        return given
    if isinstance(given, Mapping):
        return Run.from_config(given)
    raise UsageError(
        f"{worker.name} is a built-in role, which reads its settings from a Run: describe the job with "
        f".config(Run(model=…, …)), not with {type(given).__name__}"
    )


def keep_objects() -> None:
    """Leave all objects of this process out of later garbage collections, until ``gc.unfreeze()``.

    Called when a role is set up. A full collection with torch and transformers loaded takes 0.2 s, and the many small
    objects of each batch would cause one every few steps.
    """
    gc.collect()
    gc.freeze()


def choose_device(threads: int) -> torch.device:
    """This process's device: its GPU if it has one, else the CPU.

    Args:
        threads: the number of torch's threads on the CPU; 0: torch's default.
    """
    if torch.cuda.is_available():
        return torch.device("cuda")
    if threads:
        torch.set_num_threads(threads)
    return torch.device("cpu")
