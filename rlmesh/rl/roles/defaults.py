"""The run's settings and this process's device, for the built-in roles."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlmesh import current_worker
from rlmesh.errors import UsageError

if TYPE_CHECKING:
    from rlmesh.rl.trainers.run import Run

__all__ = [
    "YOUNG_OBJECTS", "causal_model", "choose_device", "dropout_rates", "keep_objects", "load_float32",
    "run_settings",
]  # fmt: skip


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


def causal_model(name: str, device: torch.device, *, dropout: bool = True) -> nn.Module:
    """A causal language model from a folder or hub name, in float32, on a device; see `load_float32`."""
    from transformers import AutoModelForCausalLM

    model: nn.Module = load_float32(AutoModelForCausalLM, name, dropout=dropout)
    return model.to(device)


def load_float32(kind: Any, name: str, *, dropout: bool) -> Any:
    """A model of transformers in float32.

    Args:
        kind: the class that loads it, such as ``AutoModelForCausalLM``.
        name: a folder or hub name.
        dropout: False: the rates of dropout in its configuration, and thus in exported folders, are 0. With dropout,
            the training pass is another function than the pass that gave the old log-probabilities or values: the ratio
            of two equal policies is not 1, and factors from before the step do not belong to the gradient.
    """
    from transformers import AutoConfig

    rates = {} if dropout else dropout_rates(AutoConfig.from_pretrained(name))
    return kind.from_pretrained(name, dtype=torch.float32, **dict.fromkeys(rates, 0.0))


def dropout_rates(config: Any) -> dict[str, float]:
    """The rates of dropout, and of the noise of routers, in a configuration of transformers that are above 0, by
    name."""
    rates = {name: value for name, value in config.to_dict().items() if "drop" in name or "jitter" in name}
    return {name: float(value) for name, value in rates.items() if type(value) in (int, float) and value > 0}
