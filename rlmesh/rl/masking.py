"""Statistics over the valid tokens only.

A mask is applied with ``where``, never by multiplication: zero times NaN is NaN, so a product would let one
bad value in a padded slot poison the whole batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["keep", "masked_mean", "masked_sum", "masked_whiten", "require_finite", "require_mask"]


def require_mask(mask: Tensor, *, like: Tensor, name: str) -> Tensor:
    """``mask`` as booleans, after a check that its shape is that of ``like``.

    Broadcasting is refused, since a mask of shape ``[batch, 1]`` or ``[time]`` is far more often a mistake
    than a wish, and one that changes every mean without an error.

    Args:
        mask: boolean, or numbers of which all but 0 count as True.
        like: the tensor that it belongs to.
        name: what ``like`` is called in the message.

    Raises:
        ValueError: the shapes differ.
    """
    if mask.shape != like.shape:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}, but {name} has {tuple(like.shape)}: they must be equal; "
            "expand the mask yourself if you meant to broadcast it"
        )
    return mask if mask.dtype == torch.bool else mask != 0


def require_finite(x: Tensor, mask: Tensor, *, name: str) -> None:
    """Check that no valid slot holds NaN or infinity.

    Waits for the device once, which is little against the step that would train on NaN.

    Raises:
        FloatingPointError: at least one does; the message gives how many, where, and the first value.
    """
    bad = mask & ~torch.isfinite(x.detach())
    if bool(bad.any()):
        first = tuple(int(i) for i in bad.nonzero()[0])
        raise FloatingPointError(
            f"{name} holds {int(bad.sum())} values that are not finite in valid slots, "
            f"the first at {list(first)}: {x[first].item()}"
        )


def keep(x: Tensor, mask: Tensor, *, name: str = "x") -> Tensor:
    """``x`` where the mask is True, 0 elsewhere; the gradient of masked slots is 0 too.

    Apply it *before* a function whose slope could be infinite (``exp``, ``log``): masking its result leaves
    0 · inf = NaN in the backward pass.

    Args:
        x: any shape.
        mask: the same shape.
        name: what ``x`` is called in messages.

    Raises:
        ValueError: the shapes differ.
        FloatingPointError: a valid slot is not finite.
    """
    valid = require_mask(mask, like=x, name=name)
    require_finite(x, valid, name=name)
    return torch.where(valid, x, torch.zeros((), dtype=x.dtype, device=x.device))


def masked_sum(x: Tensor, mask: Tensor, *, dim: int | None = None, name: str = "x") -> Tensor:
    """Sum over the valid slots, of all of ``x`` or along ``dim``."""
    kept = keep(x, mask, name=name)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, *, dim: int | None = None, name: str = "x") -> Tensor:
    """Mean over the valid slots, of all of ``x`` or along ``dim``; 0 where none is valid.

    This is the mean of *what is at hand*. For a loss that is split over micro-batches or ranks, use
    :func:`rlmesh.rl.losses.aggregate`, which divides by the count of the whole batch.
    """
    total = masked_sum(x, mask, dim=dim, name=name)
    valid = mask != 0
    count = valid.sum() if dim is None else valid.sum(dim)
    return total / count.clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    """Scale the valid slots to variance 1 and, with ``shift_mean``, to mean 0; masked slots become 0.

    ``(x − mean) / sqrt(var + eps)`` with the population variance (divided by n, as in Ziegler et al. 2019,
    arXiv:1909.08593, whose rewards and advantages are whitened so), hence defined for a single value.

    Args:
        x: any shape, usually advantages ``[batch, time]`` of the *whole* batch: whitening the shards of a
            batch each by itself is another function.
        mask: the same shape.
        shift_mean: False keeps the mean and scales only.
        eps: added to the variance.
    """
    valid = require_mask(mask, like=x, name="x")
    mean = masked_mean(x, valid)
    deviation = keep(x, valid) - mean
    variance = masked_mean(deviation.square(), valid)
    white = deviation * torch.rsqrt(variance + eps)
    if not shift_mean:
        white = white + mean
    return keep(white, valid)
