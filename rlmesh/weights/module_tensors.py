"""The tensors of torch modules, by name; with peft, those of an adapter.

The weights of an adapter can be merged into those of the base model. A merged weight is computed anew for each push
(``W + scale·B·A``, by peft's ``get_delta_weight``), and the model is not changed: it may be in use by the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rlmesh.errors import UsageError, WeightSyncError
from rlmesh.weights.manifest import Kind, Manifest, TensorSpec
from rlmesh.weights.transfer.tensor_bytes import dtype_name

if TYPE_CHECKING:
    from torch import Tensor, nn

Lora = Literal["", "adapter", "merged"]
BASE_PREFIX = "base_model.model."
BASE_LAYER = "base_layer."


class ModuleTensors(NamedTuple):
    """The tensors of a module.

    Attributes:
        tensors: by name, tied ones under each of their names.
        makers: name → function that computes the tensor that is sent instead.
        kinds: parameter or buffer, by name.
        excluded: names that are left out.
    """

    tensors: dict[str, Tensor]
    makers: dict[str, Callable[[], Tensor]]
    kinds: dict[str, Kind]
    excluded: tuple[str, ...]


def plain_name(name: str) -> str:
    """A tensor's name without the prefixes of wrappers: DDP, torch.compile, activation checkpointing."""
    for part in ("_orig_mod.", "_checkpoint_wrapped_module."):
        name = name.replace(part, "")
    return name.removeprefix("module.")


def module_tensors(
    module: nn.Module, exclude: Collection[str], lora: Lora, adapter: str, *, strict: bool
) -> ModuleTensors:
    """The tensors of a module, or of its adapter, without those in ``exclude``.

    Args:
        strict: every name in ``exclude`` must exist.

    Raises:
        UsageError: a name to exclude or the adapter does not exist, or ``lora`` is unknown.
        WeightSyncError: the adapter cannot be merged.
    """
    if lora not in ("", "adapter", "merged"):
        raise UsageError(f"lora={lora!r}: it is 'adapter', 'merged' or ''")
    found = _adapter_tensors(module, lora, adapter) if lora else _all_tensors(module)
    unknown = set(exclude) - set(found.tensors)
    if strict and unknown:
        raise UsageError(f"exclude: the module has no {sorted(unknown)}")
    kept = {name: tensor for name, tensor in found.tensors.items() if name not in exclude}
    return ModuleTensors(kept, found.makers, found.kinds, (*exclude, *found.excluded))


def _all_tensors(module: nn.Module) -> ModuleTensors:
    """All parameters, and the buffers that a checkpoint would have too; other buffers are excluded."""
    tensors: dict[str, Tensor] = {}
    kinds: dict[str, Kind] = {}
    excluded = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        tensors[plain_name(name)], kinds[plain_name(name)] = parameter, "parameter"
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for own, buffer in owner._buffers.items():
            name = plain_name(f"{prefix}.{own}" if prefix else own)
            if buffer is None:
                continue
            if own in owner._non_persistent_buffers_set:
                excluded.append(name)
            else:
                tensors[name], kinds[name] = buffer, "buffer"
    return ModuleTensors(tensors, {}, kinds, tuple(excluded))


def _adapter_tensors(module: nn.Module, lora: Lora, adapter: str) -> ModuleTensors:
    known = getattr(module, "peft_config", None)
    if known is None or adapter not in known:
        have = ", ".join(known) if known else "none: it is no peft model"
        raise UsageError(f"the model has no adapter {adapter!r}; it has {have}")
    found = _all_tensors(module)
    if lora == "merged":
        return _merged_tensors(module, found, adapter)
    own = {name: tensor for name, tensor in found.tensors.items() if adapter in name.split(".") and _is_lora(name)}
    if not own:
        raise UsageError(f"the adapter {adapter!r} has no tensors")
    mark = f".{adapter}"
    kinds = {name.replace(mark, ""): found.kinds[name] for name in own}
    return ModuleTensors({name.replace(mark, ""): tensor for name, tensor in own.items()}, {}, kinds, ())


def _is_lora(name: str) -> bool:
    return any(part.startswith("lora_") for part in name.split("."))


def base_name(name: str) -> str:
    """The name that a tensor has in the model without peft."""
    return name.removeprefix(BASE_PREFIX).replace(BASE_LAYER, "")


def _merged_tensors(module: nn.Module, found: ModuleTensors, adapter: str) -> ModuleTensors:
    kept = {name: tensor for name, tensor in found.tensors.items() if not _is_lora(name)}
    makers: dict[str, Callable[[], Tensor]] = {}
    for name, layer in module.named_modules():
        if not hasattr(layer, "get_delta_weight") or adapter not in getattr(layer, "lora_A", {}):
            continue
        own = f"{name}.{BASE_LAYER}weight"
        if own not in kept:
            raise WeightSyncError(f"{name} has an adapter but no base weight: only weights of layers can be merged")
        makers[base_name(own)] = _merging(layer, adapter)
    return ModuleTensors(
        {base_name(name): tensor for name, tensor in kept.items()},
        makers,
        {base_name(name): found.kinds[name] for name in kept},
        tuple(map(base_name, found.excluded)),
    )


def _merging(layer: Any, adapter: str) -> Callable[[], Tensor]:
    def merge() -> Tensor:
        weight: Tensor = layer.get_base_layer().weight
        if getattr(layer, "merged", False):
            # Peft has merged adapters into the weight, which may differ from push to push.
            others = [name for name in getattr(layer, "merged_adapters", [adapter]) if name != adapter]
            if others:
                raise WeightSyncError(
                    f"the adapters {', '.join(others)} are merged into the model's weights, and {adapter!r} is to be "
                    "added to these without them: call unmerge_adapter() before the push"
                )
            return weight
        merged: Tensor = weight + layer.get_delta_weight(adapter).to(weight.dtype)
        return merged

    return merge


def local_tensor(tensor: Tensor) -> Tensor:
    """The tensor itself, or this rank's shard of a DTensor."""
    from torch.distributed.tensor import DTensor

    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def manifest_of(tensors: Mapping[str, Any], kinds: Mapping[str, Kind], excluded: tuple[str, ...]) -> Manifest:
    """The manifest of whole tensors, also where only a shard is in this process; same memory means tied.

    Raises:
        WeightSyncError: a tensor has no memory, or a type that cannot be synced.
    """
    owners: dict[object, str] = {}
    specs = []
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise WeightSyncError(f"{name} has no memory yet (it is on the meta device): load the weights first")
        owner = owners.setdefault(_memory_of(tensor, name), name)
        tie = owner if owner != name else None
        shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
        specs.append(TensorSpec(name, shape, dtype_name(tensor), kinds.get(name, "parameter"), tie))
    return Manifest(tuple(specs), excluded)


def _memory_of(tensor: Any, name: str) -> object:
    """A key, equal for tensors that show the same elements in the same order."""
    if hasattr(tensor, "ds_id"):
        return id(tensor)  # ZeRO-3 frees a parameter's memory between passes; tied parameters are one object
    local = local_tensor(tensor)
    if not local.numel():
        return name
    return local.device, local.data_ptr(), tuple(tensor.shape), local.stride(), local.dtype
