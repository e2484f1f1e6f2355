"""Tensors of peft models: the adapter's alone, or the base model's with the adapter added in.

A merged weight is made anew for each push (``W + scale·B·A``, by peft itself, `get_delta_weight`) and nothing of the
model is changed: the trainer may be in the middle of anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlmesh.errors import UsageError, WeightSyncError
from rlmesh.weights.manifest import Kind

if TYPE_CHECKING:
    from torch import Tensor, nn

PREFIX = "base_model.model."
BASE = "base_layer."

Named = tuple[dict[str, "Tensor"], dict[str, Callable[[], "Tensor"]], dict[str, Kind], tuple[str, ...]]


def lora_tensors(module: nn.Module, lora: str, adapter: str) -> Named:
    """Tensors by name, makers of those that are computed, kinds, and names that are left out.

    Raises:
        UsageError: it is no model with such an adapter.
    """
    from rlmesh.weights.module_source import named_tensors

    known = getattr(module, "peft_config", None)
    if known is None or adapter not in known:
        have = ", ".join(known) if known else "none: it is no peft model"
        raise UsageError(f"the model has no adapter {adapter!r}; it has {have}")
    tensors, kinds, left = named_tensors(module)
    if lora == "adapter":
        mark = f".{adapter}"
        own = {name: tensor for name, tensor in tensors.items() if _of_adapter(name, adapter)}
        if not own:
            raise UsageError(f"the adapter {adapter!r} has no tensors")
        plain = {name.replace(mark, ""): tensor for name, tensor in own.items()}
        return plain, {}, {name.replace(mark, ""): kinds[name] for name in own}, ()
    return _merged(module, tensors, kinds, left, adapter)


def _of_adapter(name: str, adapter: str) -> bool:
    parts = name.split(".")
    return adapter in parts and any(part.startswith("lora_") for part in parts)


def base_name(name: str) -> str:
    """The name that a tensor has in the model without peft."""
    return name.removeprefix(PREFIX).replace(BASE, "")


def _merged(
    module: nn.Module, tensors: dict[str, Tensor], kinds: dict[str, Kind], left: tuple[str, ...], adapter: str
) -> Named:
    layers: dict[str, Any] = {
        name: layer
        for name, layer in module.named_modules()
        if hasattr(layer, "get_delta_weight") and adapter in getattr(layer, "lora_A", {})
    }
    kept = {name: tensor for name, tensor in tensors.items() if not any(p.startswith("lora_") for p in name.split("."))}
    makers: dict[str, Callable[[], Tensor]] = {}
    for name, layer in layers.items():
        own = f"{name}.{BASE}weight"
        if own not in kept:
            raise WeightSyncError(f"{name} has an adapter but no base weight: only weights of layers can be merged")
        makers[base_name(own)] = _maker(layer, adapter)
    plain = {base_name(name): tensor for name, tensor in kept.items()}
    return plain, makers, {base_name(name): kinds[name] for name in kept}, tuple(base_name(name) for name in left)


def _maker(layer: Any, adapter: str) -> Callable[[], Tensor]:
    def make() -> Tensor:
        weight: Tensor = layer.get_base_layer().weight
        if getattr(layer, "merged", False):
            # It holds adapters already, as it may have at one push and not at the next.
            others = [name for name in getattr(layer, "merged_adapters", [adapter]) if name != adapter]
            if others:
                raise WeightSyncError(
                    f"the adapters {', '.join(others)} are merged into the model's weights, and {adapter!r} is to be "
                    "added to these without them: call unmerge_adapter() before the push"
                )
            return weight
        merged: Tensor = weight + layer.get_delta_weight(adapter).to(weight.dtype)
        return merged

    return make
