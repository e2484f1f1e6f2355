"""Liger's fused layers: norms, rotary embeddings and gated units of a transformers model in one kernel each.

They are faster on a GPU and keep fewer activations (Hsu et al. 2024, arXiv:2410.10989). The head is that of
:mod:`rlmesh.rl.head`, which also gives the entropy.
"""

from __future__ import annotations

import logging

from torch import nn

from rlmesh.errors import UsageError, import_fault, is_absent

__all__ = ["use_liger_layers"]

logger = logging.getLogger(__name__)


def use_liger_layers(model: nn.Module, wanted: bool | None) -> bool:
    """Replace the layers of a transformers model by Liger's, in place.

    Args:
        model: a transformers model, or a module that has one; on its device.
        wanted: ``None``: replace them if that is possible.

    Returns:
        True if the layers were replaced.

    Raises:
        UsageError: ``wanted`` is True, and the device is no GPU, Liger cannot be imported, or it does not know the
            model.
    """
    if wanted is False:
        return False
    why = _missing(model)
    if why and wanted:
        raise UsageError(f"use_liger_kernel=True: {why}. Leave the setting out to use Liger where that is possible")
    if why:
        return False
    from transformers.integrations.liger import apply_liger_kernel

    apply_liger_kernel(_transformers_model(model), {"fused_linear_cross_entropy": False, "cross_entropy": False})
    return True


def _missing(model: nn.Module) -> str:
    """The reason why Liger cannot be used; ``""`` if it can."""
    device = next(model.parameters()).device.type
    if device != "cuda":
        return f"Liger's kernels need a GPU, and the model is on the {device}"
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as KNOWN
    except Exception as error:  # a broken installation may raise anything
        fault = import_fault("liger_kernel", error, "liger-kernel")
        if not is_absent("liger_kernel", error):
            logger.warning("Liger is not used: %s", fault)
        return fault
    inner = _transformers_model(model)
    kind = getattr(getattr(inner, "config", None), "model_type", type(model).__name__)
    return "" if kind in KNOWN else f"Liger has no layers for {kind}"


def _transformers_model(model: nn.Module) -> nn.Module | None:
    from transformers import PreTrainedModel

    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
