"""Losses on pairs of a preferred and another response, expressed as advantages and returns.

The gradient of a loss on pairs depends on both responses, which may be in different packs. So the factor of each
response is computed before the step, from the log-probabilities or values by the weights before the step. With one
optimizer step per batch the gradient is that of the loss itself.

Rows are in pairs: the preferred response, then the other one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlmesh.rl.masking import keep

__all__ = ["PairTerms", "dpo", "ranked_returns"]


class PairTerms(NamedTuple):
    """The terms of pairs.

    Attributes:
        tokens: ``[2 · pairs, time]``, advantages or returns, 0 in masked slots.
        margins: ``[pairs]``, of the preferred response over the other; the loss is ``−log σ(margin)``.
    """

    tokens: Tensor
    margins: Tensor

    @property
    def metrics(self) -> dict[str, float]:
        """The mean loss, the share of pairs that are ranked right, and the mean margin."""
        return {
            "loss": float(-logsigmoid(self.margins).mean()),
            "accuracy": float((self.margins > 0).double().mean()),
            "margin": float(self.margins.mean()),
        }


def dpo(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, *, beta: float) -> PairTerms:
    """Advantages whose policy gradient, summed over tokens and divided by the pairs, is that of direct preference
    optimisation (Rafailov et al. 2023, arXiv:2305.18290).

    With ``r = β · Σ (log π − log π_ref)`` over the tokens of a response, the loss of a pair is ``−log σ(r₊ − r₋)``. Its
    gradient is ``∓ β · σ(r₋ − r₊) · ∇ log π`` at each token of the preferred (−) and of the other response (+).

    Args:
        log_probs: log-probabilities by the policy, ``[2 · pairs, time]``.
        ref_log_probs: log-probabilities by the reference, of the same shape.
        mask: a mask of the same shape.
        beta: weight of the divergence from the reference, > 0.

    Raises:
        ValueError: shapes differ, the rows are no pairs, or beta is not positive.
        FloatingPointError: a valid slot is not finite.
    """
    if beta <= 0:
        raise ValueError(f"beta must be > 0, got {beta}")
    own = keep(log_probs.detach().double(), mask, name="log_probs")
    rewards = beta * (own - keep(ref_log_probs.detach().double(), mask, name="ref_log_probs")).sum(1)
    margins = _margins(rewards)
    factor = beta * _signed(torch.sigmoid(-margins))
    return PairTerms(torch.where(mask, factor.unsqueeze(1), 0.0), margins)


def ranked_returns(values: Tensor, mask: Tensor) -> PairTerms:
    """Returns with which the critic's squared error has the gradient of the loss of Bradley and Terry (1952), as in
    Ouyang et al. 2022 (arXiv:2203.02155): ``−log σ(v₊ − v₋)`` for the values of a pair.

    The squared error is ``½ · (V − R)²``, averaged over the ``2 · pairs`` responses: so ``R = V ± 2 · σ(v₋ − v₊)``.

    Args:
        values: ``[2 · pairs, time]``.
        mask: of the same shape, with one valid slot per row: the value of the whole response.

    Raises:
        ValueError: shapes differ, the rows are no pairs, or a row has not exactly one valid slot.
        FloatingPointError: a valid slot is not finite.
    """
    if not bool((mask.sum(1) == 1).all()):
        raise ValueError("each response has one value: the mask must have exactly one valid slot per row")
    own = keep(values.detach().double(), mask, name="values")
    margins = _margins(own.sum(1))
    factor = 2 * _signed(torch.sigmoid(-margins))
    return PairTerms(torch.where(mask, own + factor.unsqueeze(1), 0.0), margins)


def _margins(rewards: Tensor) -> Tensor:
    if len(rewards) % 2 or not len(rewards):
        raise ValueError(f"{len(rewards)} responses are no pairs")
    return rewards[0::2] - rewards[1::2]


def _signed(factors: Tensor) -> Tensor:
    """``[2 · pairs]``: the factor of each pair, positive for the preferred response and negative for the other."""
    return torch.stack([factors, -factors], 1).flatten()
