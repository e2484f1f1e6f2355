"""Activation checkpointing: layers drop their activations, and recompute them in the backward pass."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from rlmesh.errors import UsageError
from rlmesh.rl.engines.lora import base_model_of


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks: ``_no_split_modules`` of transformers, else the members of the longest `ModuleList`."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    named = [module for module in model.modules() if type(module).__name__ in names]
    if named:
        return named
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def checkpoint_activations(model: nn.Module) -> None:
    """Checkpoint each layer of a model, which stays the same object.

    Raises:
        UsageError: it has no layers.
    """
    model = base_model_of(model)
    if getattr(model, "supports_gradient_checkpointing", False):
        how = {"use_reentrant": False}
        transformers_model: Any = model
        if hasattr(model, "activation_checkpointing_enable"):
            transformers_model.activation_checkpointing_enable(activation_checkpointing_kwargs=how)
        else:  # transformers before 5.19
            transformers_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
        return
    layers = layers_of(model)
    if not layers:
        raise UsageError(
            f"activation_checkpointing: {type(model).__name__} has no layers that can be checkpointed: a ModuleList of "
            "them, or a model of transformers that supports it"
        )
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=lambda layer: checkpoint_wrapper(layer, CheckpointImpl.NO_REENTRANT),
        check_fn=lambda module: any(module is layer for layer in layers),
    )
