"""Comparison of a run's settings with those of its checkpoint: which may change before it resumes, and which may
not."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlmesh.errors import UsageError
from rlmesh.rl.data.files import expand

__all__ = ["Resumable", "changes", "described", "parts_of", "sampling_settings"]

FIXED = {
    "seed": "the order of prompts and the samples follow from it",
    "data": "a step would take prompts that earlier steps have used, or leave some out",
    "max_prompt_tokens": "the data would have other prompts, in another order",
    "batch_size": "the place in the data is the number of the step times the batch size",
    "pipeline": "the samples under way belong to the pipeline",
    "actor.epochs": "the number of optimizer steps tells which step the weights are of",
    "actor.minibatches": "the number of optimizer steps tells which step the weights are of",
    "critic.epochs": "the number of optimizer steps tells which step the weights are of",
    "critic.minibatches": "the number of optimizer steps tells which step the weights are of",
    "actor.lora.rank": "the checkpoint has an adapter of that rank, or all weights",
    "actor.lora.target_modules": "the checkpoint has adapters of these layers",
}
"""Settings that may not change, and why."""
ROUNDING = (
    "train", "actor.ranks", "critic.ranks", "rollout.engine", "rollout.engines", "placement", "devices_per_node",
    "nodes", "actor.token_budget", "critic.token_budget", "actor.activation_checkpointing",
    "critic.activation_checkpointing", "actor.use_liger_kernel", "critic.use_liger_kernel",
    "actor.threads", "critic.threads", "rollout.threads", "rollout.options", "rollout.dtype",
    "actor.precision", "critic.precision",
)  # fmt: skip
"""Settings that change results by rounding only, or by which engine draws which sample."""
UNSEEN = (
    "examine", "save_every", "keep_last", "keep_best", "resume", "restore", "restore_parts", "reward_workers",
    "validate_every", "validation", "reward_alarm",
)  # fmt: skip
"""Settings that change no result of a step."""
SAMPLING = ("rollout", "rewards", "environment", "tools", "agent", "episode", "template", "prompt_key")
"""Settings that decide, with ``algorithm.samples``, the responses of a group and their rewards."""
SAMPLING_PACE = (
    "rollout.in_flight", "rollout.dynamic_sampling", "rollout.refill", "rollout.oversampling", "rollout.deadline_s",
)  # fmt: skip
"""Exceptions from `SAMPLING`: these decide only which groups are sampled, and when."""
WHOLE_BYTES = 1 << 30
"""The checksum of a data file covers all of it up to this size, else this much at each end."""


class Resumable(Protocol):
    """The settings of a `Run` that decide how it resumes. The other fields of the dataclass are compared."""

    @property
    def algorithm(self) -> Any: ...
    @property
    def steps(self) -> int: ...
    @property
    def keep_last(self) -> int: ...
    @property
    def keep_best(self) -> str: ...
    @property
    def resume(self) -> str: ...
    @property
    def restore(self) -> str | Path | None: ...
    @property
    def restore_parts(self) -> Sequence[str]: ...


def described(run: Resumable) -> dict[str, Any]:
    """The settings of a run as JSON values by name, such as ``actor.lr``; functions and classes by their names, data by
    a checksum of their content."""
    found: dict[str, Any] = {}
    settings: Any = run
    for one in dataclasses.fields(settings):
        if one.name not in UNSEEN:
            value = getattr(run, one.name)
            _describe(one.name, _data_sum(value) if one.name == "data" else value, found)
    if "critic" not in run.algorithm.needs:
        found = {name: value for name, value in found.items() if not name.startswith("critic.")}
    return found


def parts_of(algorithm: Any) -> tuple[str, ...]:
    """The parts of a checkpoint that have the models in training, in the trainer's order. A reward model in training
    is the actor of its run."""
    ranked = getattr(algorithm, "responses", "sampled") == "ranked"
    return ("actor", "critic") if "critic" in algorithm.needs and not ranked else ("actor",)


def sampling_settings(run: Any) -> dict[str, Any]:
    """The settings of a run that decide the responses of a group and their rewards, in the form of `described`."""
    found: dict[str, Any] = {"algorithm.samples": run.algorithm.samples}
    for name in SAMPLING:
        _describe(name, getattr(run, name), found)
    return {name: value for name, value in found.items() if name not in (*ROUNDING, *SAMPLING_PACE)}


def changes(before: Mapping[str, Any], now: Mapping[str, Any], step: int) -> str:
    """The differences between settings, for people; empty without any.

    Args:
        before: the settings of the run that wrote a checkpoint.
        now: the settings of the run that resumes from it.
        step: the checkpoint's step.

    Raises:
        UsageError: lists the settings that may not change.
    """
    differing = [name for name in {**before, **now} if before.get(name) != now.get(name)]

    def shown(name: str) -> str:
        if name == "data":
            return "data: other rows, or in another order"
        return f"{name}={_short(now, name)}, before {_short(before, name)}"

    # A setting that only one run has belongs to a part that the other run lacks.
    if refused := [name for name in differing if name in FIXED and name in before and name in now]:
        raise UsageError(
            f"the run cannot go on from step {step} with these settings:\n  "
            + "\n  ".join(f"{shown(name)} ({FIXED[name]})" for name in refused)
            + "\nGo on with the earlier values, or begin a new run with the weights: restore=CHECKPOINT"
        )
    lines = []
    for name in differing:
        effect = "the same training up to rounding" if name in ROUNDING else f"from step {step + 1} on"
        if name == "steps":
            effect = "the end of the run, and of a learning rate that falls"
        lines.append(f"{shown(name)}: {effect}")
    return f"settings changed since step {step} was saved:\n  " + "\n  ".join(lines) if lines else ""


def _short(settings: Mapping[str, Any], name: str) -> str:
    return f"{settings[name]!r:.200}" if name in settings else "not set"


def _describe(name: str, value: Any, found: dict[str, Any]) -> None:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found[name] = _name_of(type(value))
        for one in dataclasses.fields(value):
            _describe(f"{name}.{one.name}", getattr(value, one.name), found)
    elif isinstance(value, (list, tuple)) and any(dataclasses.is_dataclass(one) for one in value):
        found[name] = len(value)
        for place, one in enumerate(value):
            _describe(f"{name}[{place}]", one, found)
    else:
        found[name] = _plain(value)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    return _name_of(value if hasattr(value, "__qualname__") else type(value))


def _name_of(one: Any) -> str:
    return f"{one.__module__}.{one.__qualname__}"


def _data_sum(data: Any) -> Any:
    """A checksum of the content of rows or files; for a mixture, a checksum and a weight for each part."""
    if isinstance(data, Mapping):
        return [[_data_sum(files), weight] for files, weight in data.items()]
    digest = hashlib.sha256()
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)) and data and isinstance(data[0], Mapping):
        for row in data:
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        return digest.hexdigest()
    if not isinstance(data, (str, Path, list, tuple)):
        return _plain(data)
    for path in expand(data):
        with path.open("rb") as file:
            size = path.stat().st_size
            digest.update(size.to_bytes(8, "little") + file.read(WHOLE_BYTES))
            if size > WHOLE_BYTES:
                file.seek(max(WHOLE_BYTES, size - WHOLE_BYTES))
                digest.update(file.read())
    return digest.hexdigest()
