"""The state of a ZeRO optimizer as whole tensors per parameter, in the format of the engines of torch.

Each rank has a share of the parameters, so that a checkpoint takes no more memory than the sharded state. DeepSpeed's
own checkpoints are only for the number of ranks and the stage that wrote them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlmesh import ZeroSource
from rlmesh.rl.engines.weight_parts import owned_names

MOMENTS = ("exp_avg", "exp_avg_sq")
PART_BYTES = 256 << 20
"""A checkpoint is loaded in parts of this size."""

State = dict[str, Any]
"""``{"model": {name: [..]}, "optimizer": {name: {"step": [], "exp_avg": [..], "exp_avg_sq": [..]}}}``, float32."""


def state_of(engine: Any, source: ZeroSource, rank: int, ranks: int, *, frozen: bool = True) -> State:
    """A CPU copy of every ``ranks``-th parameter from ``rank`` on. Rank 0 also gets the tensors that are not trained,
    unless ``frozen`` is False."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    inner = inner_state(engine)
    steps = next(iter(inner))["step"]
    weights: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Tensor]] = {}
    for index, (name, parameter) in enumerate(_trained(source).items()):
        whole = safe_get_full_fp32_param(parameter)
        found = {key: safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}
        if index % ranks == rank:
            weights.update({each: _copy(whole) for each in _names_of(source, name)})
            moments[name] = {"step": _copy(steps), **{key: _copy(value) for key, value in found.items()}}
    for name in _others(source, frozen):
        with source.gather([name]) as tensors:
            if rank == 0:
                weights.update({each: _copy(tensors[name]) for each in _names_of(source, name)})
    return {"model": weights, "optimizer": moments}


def load_state(
    engine: Any, source: ZeroSource, rank: int, read: Callable[[State], None], *, frozen: bool = True
) -> None:
    """Load a state from `state_of` or from an engine of torch, some parameters at a time.

    Args:
        frozen: also load parameters that are not trained.
        read: fills the tensors of a state in place; collective.
    """
    inner = inner_state(engine)
    steps = torch.zeros(())
    for part in _parts(_trained(source)):
        weights = {name: torch.empty(_shape(parameter)) for name, parameter in part.items()}
        moments = {
            name: {"step": steps, **{key: torch.empty(_shape(parameter)) for key in MOMENTS}}
            for name, parameter in part.items()
        }
        read({"model": weights, "optimizer": moments})
        for name, parameter in part.items():
            _set_trained(parameter, weights[name], moments[name], rank)
    for state in inner:
        state["step"].copy_(steps)
    others = {
        name: torch.empty(_shape(source.tensors[name]), dtype=source.tensors[name].dtype)
        for name in _others(source, frozen)
    }
    if others:
        read({"model": others})
        for name, value in others.items():
            _set_weight(source.tensors[name], value)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _trained(source: ZeroSource) -> dict[str, Any]:
    """The parameters of the optimizer by name; tied ones occur once."""
    owned = owned_names(source.manifest())
    return {name: source.tensors[name] for name in owned if source.tensors[name].requires_grad}


def _others(source: ZeroSource, frozen: bool) -> list[str]:
    """Buffers and, if ``frozen``, parameters that are not trained."""
    others = [name for name in owned_names(source.manifest()) if not source.tensors[name].requires_grad]
    return others if frozen else [name for name in others if not isinstance(source.tensors[name], nn.Parameter)]


def _names_of(source: ZeroSource, name: str) -> list[str]:
    return [name, *(spec.name for spec in source.manifest() if spec.alias_of == name)]


def _shape(parameter: Any) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _parts(parameters: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    part: dict[str, Any] = {}
    size = 0
    for name, parameter in parameters.items():
        nbytes = torch.Size(_shape(parameter)).numel() * 4 * (1 + len(MOMENTS))
        if part and size + nbytes > PART_BYTES:
            yield part
            part, size = {}, 0
        part[name] = parameter
        size += nbytes
    if part:
        yield part


def inner_state(engine: Any) -> list[dict[str, Any]]:
    """Torch's state of each flat partition of this rank; it is made here if there was no step yet."""
    optimizer = engine.optimizer
    flats = _flat_partitions(optimizer)
    for flat in flats:
        state = optimizer.optimizer.state[flat]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state.update({key: torch.zeros_like(flat) for key in MOMENTS})
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._lazy_init_hp_params_optimizer_state()
    return [optimizer.optimizer.state[flat] for flat in flats]


def _flat_partitions(optimizer: Any) -> list[Tensor]:
    stage3 = getattr(optimizer, "fp32_partitioned_groups_flat", None)
    flats: list[Tensor] = optimizer.single_partition_of_fp32_groups if stage3 is None else stage3
    return flats


def _set_trained(parameter: Any, weight: Tensor, moments: Mapping[str, Tensor], rank: int) -> None:
    """Set the weights in both precisions, and the optimizer state, of one parameter."""
    from deepspeed.utils import (
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_optimizer_state,
    )

    if hasattr(parameter, "ds_id"):
        safe_set_local_fp32_param(parameter, _share(parameter, weight, rank))
        for key in MOMENTS:
            safe_set_local_optimizer_state(parameter, _share(parameter, moments[key], rank), key)
    else:
        safe_set_full_fp32_param(parameter, weight)
        for key in MOMENTS:
            safe_set_full_optimizer_state(parameter, moments[key], key)
    _set_weight(parameter, weight)


def _share(parameter: Any, whole: Tensor, rank: int) -> Tensor:
    """This rank's part of a flat tensor, padded with 0 on the last ranks."""
    size = parameter.ds_tensor.ds_numel
    share = whole.new_zeros(size)
    mine = whole.reshape(-1)[rank * size : (rank + 1) * size]
    share[: len(mine)] = mine
    return share


def _set_weight(parameter: Any, weight: Tensor) -> None:
    """Set the weight that forward passes use."""
    import deepspeed

    with torch.no_grad():
        if not hasattr(parameter, "ds_id"):
            parameter.copy_(weight)
            return
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.copy_(weight)
