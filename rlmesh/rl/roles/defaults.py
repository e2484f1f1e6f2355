"""The run's settings and this process's device, for the built-in roles."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from rlmesh import current_worker
from rlmesh.errors import UsageError

if TYPE_CHECKING:
    from rlmesh.rl.trainers.run import Run

__all__ = ["YOUNG_OBJECTS", "causal_model", "choose_device", "keep_objects", "run_settings"]


def run_settings() -> Run:
    """The `Run` of the job. The argument of ``.config(…)`` is a `Run`, or anything that `Run.from_config` takes.

    Raises:
        UsageError: the argument is neither.
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


YOUNG_OBJECTS = 20_000
"""New objects that cause a garbage collection in a trainer; Python's default is 700."""


def keep_objects(*, seldom: bool = False) -> None:
    """Exclude all present objects of this process from later garbage collections, until ``gc.unfreeze()``.

    A role calls this at the end of its setup. With torch and transformers loaded, a full collection takes 0.2 s, and
    the many small objects of each batch would cause one every few steps.

    Args:
        seldom: collect garbage after `YOUNG_OBJECTS` new objects only, unless this process uses a GPU: garbage might
            have tensors there. The thousands of objects of a batch are freed without the collector.
    """
    gc.collect()
    gc.freeze()
    if seldom and not torch.cuda.is_initialized():
        gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


def choose_device(threads: int) -> torch.device:
    """The device of this process: its GPU if it has one, else the CPU.

    Args:
        threads: the number of torch's threads on the CPU; 0: torch's default.
    """
    if torch.cuda.is_available():
        return torch.device("cuda")
    if threads:
        torch.set_num_threads(threads)
    return torch.device("cpu")


def causal_model(name: str, device: torch.device) -> nn.Module:
    """A causal language model from a folder or hub name, in float32, on a device."""
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    return model.to(device)
