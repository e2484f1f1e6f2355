"""The divergence of a policy from its reference, and token rewards with this divergence as a penalty."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor

from rlmesh.rl.algorithms.choices import KLEstimator
from rlmesh.rl.masking import keep, require_finite, require_mask

__all__ = ["KLController", "KLEstimator", "kl_estimate", "token_rewards"]


def kl_estimate(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    estimator: KLEstimator,
    *,
    unbiased_gradient: bool = False,
) -> Tensor:
    """Estimate KL(policy ‖ reference) at each token from the log-probabilities of the sampled token.

    With d = log π(token) − log π_ref(token):

    ======  ============  ==================================================================
    ``k1``  d             unbiased, high variance, may be negative
    ``k2``  d² / 2        biased, low variance, never negative; its gradient is that of the KL
    ``k3``  e^−d − 1 + d  unbiased, low variance, never negative
    ======  ============  ==================================================================

    Source: J. Schulman, "Approximating KL divergence" (2020), for tokens sampled by the policy itself.

    ``k1`` is for rewards, where no gradient flows. As a term of a *loss* its gradient is ∇ log π, which does not
    depend on the reference and is zero on average: it regularises nothing. So ``k1`` is refused where a gradient would
    flow. Use ``k2`` there, or ``unbiased_gradient``.

    The gradient of ``k3`` as a loss is that of the reverse divergence, KL(reference ‖ policy), to first order. With
    ``unbiased_gradient`` the value is the estimator's and the gradient is d · ∇ log π, that of ``k2``, whose mean over
    the policy's own samples is the gradient of KL(policy ‖ reference).

    Args:
        log_probs: of the policy, ``[batch, time]``.
        ref_log_probs: of the reference, ``[batch, time]``; no gradient flows to it.
        mask: ``[batch, time]``.
        estimator: ``k1``, ``k2`` or ``k3``.
        unbiased_gradient: give the estimate the gradient of the divergence; for losses.

    Returns:
        ``[batch, time]``, 0 in masked slots.

    Raises:
        ValueError: shapes differ, the estimator is unknown, or ``k1`` would be differentiated.
        FloatingPointError: a valid slot is not finite.
    """
    if estimator not in get_args(KLEstimator):
        raise ValueError(f"unknown KL estimator {estimator!r}: use one of {', '.join(get_args(KLEstimator))}")
    if estimator == "k1" and not unbiased_gradient and log_probs.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "k1 inside a loss has a gradient that does not depend on the reference: use 'k2' or unbiased_gradient=True "
            "for a KL loss, or detach log_probs (or torch.no_grad()) for a KL penalty in the reward"
        )
    d = keep(log_probs, mask, name="log_probs") - keep(ref_log_probs.detach(), mask, name="ref_log_probs")
    if unbiased_gradient:
        value, slope = kl_estimate(log_probs.detach(), ref_log_probs, mask, estimator), d.square() / 2
        return value + (slope - slope.detach())
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    k3 = torch.expm1(-d) + d
    require_finite(k3, torch.ones_like(k3, dtype=torch.bool), name="k3")
    return k3


def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, *, coefficient: float) -> Tensor:
    """The reward of each token: the KL penalty, plus the score of the row at its last valid token.

    ``r[b, t] = −coefficient · kl[b, t] + (t is the last valid of b) · scores[b]``, as in Ouyang et al. 2022
    (InstructGPT), arXiv:2203.02155, and Ziegler et al. 2019, arXiv:1909.08593. The mask is applied first: the KL of
    tokens that the policy did not sample (tool output, padding) is in no return.

    Args:
        scores: one per sequence, ``[batch]``.
        kl: ``[batch, time]``.
        mask: ``[batch, time]``; a row without valid tokens gets no reward.
        coefficient: weight of the penalty, ≥ 0.

    Returns:
        ``[batch, time]``, 0 in masked slots.

    Raises:
        ValueError: shapes differ.
        FloatingPointError: a score of a row with valid tokens, or a valid slot, is not finite.
    """
    penalty = keep(kl, mask, name="kl")
    valid = require_mask(mask, like=kl, name="kl")
    if scores.shape != kl.shape[:1]:
        raise ValueError(f"scores has shape {tuple(scores.shape)}: expected one per row of kl, ({kl.shape[0]},)")
    counted = keep(scores.to(kl.dtype), valid.any(1), name="scores")
    last = valid & (valid.flip(1).cumsum(1).flip(1) == 1)
    return torch.where(last, counted.unsqueeze(1), torch.zeros_like(penalty)) - coefficient * penalty


@dataclass(frozen=True, slots=True)
class KLController:
    """The coefficient of the KL penalty: fixed, or controlled so that the KL stays near ``target``.

    Adaptive (Ziegler et al. 2019, arXiv:1909.08593, section 2.2): with e = clip(kl / target − 1, ±0.2),
    ``coefficient ← coefficient · (1 + e · samples / horizon)``.

    Attributes:
        coefficient: the current value, ≥ 0.
        target: desired KL per sequence, in nats; ``None`` keeps the coefficient fixed.
        horizon: number of samples after which a steady error of 0.2 has changed it by about 20 %.
    """

    coefficient: float
    target: float | None = None
    horizon: int = 10_000

    def __post_init__(self) -> None:
        if self.coefficient < 0 or self.horizon < 1 or (self.target is not None and self.target <= 0):
            raise ValueError(f"coefficient must be ≥ 0, target > 0 and horizon ≥ 1: {self}")

    def updated(self, kl: float, *, samples: int) -> KLController:
        """The controller after a batch of ``samples`` sequences whose mean KL was ``kl`` nats."""
        if self.target is None:
            return self
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return replace(self, coefficient=self.coefficient * max(1.0 + error * samples / self.horizon, 0.0))
