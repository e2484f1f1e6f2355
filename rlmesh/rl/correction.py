"""Importance weights for samples of a policy that differs from the trainer's.

An engine samples with its own kernels, dtypes and sometimes older weights, so the behaviour policy μ differs a
little from the trainer's policy π_old of the same weights. The gradient of a sample is right on average only if it is
weighted by ``w = π_old / μ``. Long products of such weights have a large variance, so weights are bounded
(``truncated``), or tokens and sequences with extreme weights leave the batch (``masked``, ``rejected``).

A weight of 0 would leave the token in the divisor of the loss. So :func:`correct` returns both the weights and the mask
of the tokens that stay.

Top-p, top-k and min-p sampling renormalise over the kept tokens: an engine then reports log-probabilities of the
truncated distribution, which differ from those of the whole vocabulary by the log of the kept mass.
:func:`whole_vocabulary` removes that difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlmesh.rl.algorithms.choices import Correction, Level
from rlmesh.rl.masking import keep, masked_mean, masked_sum, require_mask

__all__ = ["Corrected", "Correction", "Level", "correct", "whole_vocabulary"]


@dataclass(frozen=True, slots=True)
class Corrected:
    """Importance weights, and the tokens that stay in the batch.

    Attributes:
        weights: ``[batch, time]``; 1 where nothing is corrected, 0 where the mask is False. Without gradient.
        mask: ``[batch, time]``, the tokens that stay: count these for the loss's divisor.
        bounded: ``[batch, time]``, True where a weight was set to a bound.
    """

    weights: Tensor
    mask: Tensor
    bounded: Tensor


def correct(log_probs: Tensor, sampled_log_probs: Tensor, mask: Tensor, how: Correction) -> Corrected:
    """Weigh the engine's samples by ``π_old / μ``, within bounds.

    Args:
        log_probs: log π_old by the trainer, ``[batch, time]``; each row is one whole sequence.
        sampled_log_probs: log μ by the engine when it sampled, ``[batch, time]``, of the whole vocabulary
            (:func:`whole_vocabulary`).
        mask: ``[batch, time]``, True at the tokens that the engine sampled.
        how: level and bounds.

    Raises:
        ValueError: shapes differ.
        FloatingPointError: a valid slot is not finite.
    """
    valid = require_mask(mask, like=log_probs, name="log_probs")
    gap = keep(log_probs.detach(), valid, name="log_probs")
    gap = gap - keep(sampled_log_probs.detach(), valid, name="sampled_log_probs")
    if how.level == "token":
        log_weight = gap
    else:
        reduce = masked_sum if how.level == "sequence" else masked_mean
        log_weight = reduce(gap, valid, dim=1).unsqueeze(1).expand_as(gap)
    # Logarithms are compared and bounded, since the product over a long sequence would overflow.
    low = -torch.inf if how.lower is None or how.lower == 0 else float(torch.tensor(how.lower).double().log())
    high = float(torch.tensor(how.upper).double().log())
    beyond = valid & ((log_weight > high) | (log_weight < low))
    stays = valid & ~beyond if how.beyond == "mask" else valid
    if how.reject_below is not None:
        too_low = valid & (gap < float(torch.tensor(how.reject_below).double().log()))
        stays = stays & ~too_low.any(1, keepdim=True)
    weights = log_weight.clamp(low, high).exp() if how.weigh else torch.ones_like(gap)
    bounded = beyond & stays if how.beyond == "truncate" else torch.zeros_like(valid)
    return Corrected(torch.where(stays, weights, 0.0).to(gap.dtype), stays, bounded)


def whole_vocabulary(sampled_log_probs: Tensor, kept_log_mass: Tensor, mask: Tensor) -> Tensor:
    """Log-probabilities under the whole vocabulary, from those of a truncated distribution.

    Truncated sampling (top-p, top-k, min-p) draws from ``p / m`` over the kept tokens, whose mass is m, so
    ``log p = log (p / m) + log m``. The trainer computes log p; without this step its ratio to the engine is off by
    1 / m even where both hold the same weights.

    Args:
        sampled_log_probs: of the truncated distribution, ``[batch, time]``.
        kept_log_mass: log of the mass of the kept tokens, ``[batch, time]``, ≤ 0 up to rounding.
        mask: ``[batch, time]``.

    Returns:
        ``[batch, time]``, 0 in masked slots.

    Raises:
        ValueError: shapes differ.
        FloatingPointError: a valid slot is not finite.
    """
    return keep(sampled_log_probs, mask, name="sampled_log_probs") + keep(kept_log_mass, mask, name="kept_log_mass")
