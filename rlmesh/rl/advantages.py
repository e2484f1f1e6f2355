"""Returns and advantages of the tokens of a response.

A masked slot inside a row (tool output, for instance) is a time step in which the policy did not act: it has no reward
and no advantage, but γ discounts over it. λ does not, since it mixes estimates of the policy's own decisions. Padding
at the end of a row is no time step.

The recurrences over time run as a scan: log2(time) passes over the batch instead of one pass per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlmesh.rl.masking import keep, masked_whiten, require_mask

__all__ = ["discounted_returns", "gae", "reinforce_plus_plus", "suffix_scan"]


def suffix_scan(inputs: Tensor, decays: Tensor) -> Tensor:
    """The linear recurrence ``y[t] = inputs[t] + decays[t] · y[t + 1]``, from the end of the last axis backwards.

    Recursive doubling (Hillis & Steele 1986): after pass p each slot holds the sum over the 2^p slots that begin with
    it, so log2(time) passes suffice. A decay of 0 ends a segment: slots behind it are not read.

    Args:
        inputs: ``[…, time]``, finite.
        decays: the same shape, finite.

    Returns:
        ``[…, time]``.
    """
    sums, products = inputs, decays
    reach, time = 1, inputs.shape[-1]
    while reach < time:
        ahead = torch.nn.functional.pad(sums[..., reach:], (0, reach))
        sums = sums + products * ahead
        # Padded with 0: products beyond the end only multiply the zeros that `ahead` is padded with.
        products = products * torch.nn.functional.pad(products[..., reach:], (0, reach))
        reach *= 2
    return sums


def discounted_returns(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """Sum of the rewards from each token on, discounted by position.

    ``G[b, t] = Σ_{s ≥ t, s valid} γ^(s − t) · r[b, s]`` (Sutton & Barto, *Reinforcement Learning*, 3.3).

    Args:
        rewards: ``[batch, time]``.
        mask: ``[batch, time]``; applied before anything is discounted.
        gamma: discount in [0, 1].

    Returns:
        ``[batch, time]``, 0 in masked slots. No gradient flows to them.

    Raises:
        ValueError: shapes differ.
        FloatingPointError: a valid slot is not finite.
    """
    valid = require_mask(mask, like=rewards, name="rewards")
    reward = keep(rewards.detach(), valid, name="rewards")
    return keep(suffix_scan(reward, torch.full_like(reward, gamma)), valid, name="returns")


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    lam: float,
    last_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation.

    With t′ the next valid token of the row after t and n = t′ − t:

    ``δ[t] = r[t] + γⁿ · V[t′] − V[t]``,  ``A[t] = δ[t] + γⁿ · λ · A[t′]``,  ``return[t] = A[t] + V[t]``

    (Schulman et al. 2015, arXiv:1506.02438, equation 16, where every n is 1). After the last valid token,
    A is 0 and V is ``last_values``, one step on.

    Advantages are unscaled: whiten them with :func:`rlmesh.rl.masking.masked_whiten` over the whole batch. The
    returns, the critic's targets, belong to the unscaled advantages.

    Args:
        rewards: ``[batch, time]``.
        values: V before each token was sampled, ``[batch, time]``.
        mask: ``[batch, time]``.
        gamma, lam: in [0, 1].
        last_values: V after the last valid token, ``[batch]``, for rows that were cut off rather than ended.
            ``None``: every row ended, and V after it is 0.

    Returns:
        advantages and returns, each ``[batch, time]`` and 0 in masked slots. No gradient flows to them.

    Raises:
        ValueError: shapes differ.
        FloatingPointError: a valid slot is not finite.
    """
    valid = require_mask(mask, like=rewards, name="rewards")
    reward = keep(rewards.detach(), valid, name="rewards")
    value = keep(values.detach(), valid, name="values")
    if not value.shape[1]:
        return torch.zeros_like(value), torch.zeros_like(value)
    # The discount of a slot: γ up to the row's last valid token, and 1 after it, since padding is no time step.
    later_valid = valid.flip(1).cumsum(1).flip(1) - valid.long() > 0
    gap = torch.ones_like(value).masked_fill(later_valid, gamma)
    following_value = suffix_scan(value, gap.masked_fill(valid, 0.0))
    if last_values is not None:
        last = keep(last_values.detach().to(value.dtype), valid.any(1), name="last_values")
        # The padding after a row gets `last_values`, which the last valid token reads as the next value.
        following_value = torch.where(later_valid | valid, following_value, last.unsqueeze(1))
        end = last.unsqueeze(1)
    else:
        end = value.new_zeros(value.shape[0], 1)
    next_value = torch.cat([following_value[:, 1:], end], 1)
    delta = keep(reward + gamma * next_value - value, valid, name="temporal differences")
    advantages = suffix_scan(delta, gap.masked_fill(valid, gamma * lam))
    advantages = keep(advantages, valid, name="advantages")
    return advantages, keep(advantages + value, valid, name="returns")


def reinforce_plus_plus(rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """REINFORCE++: discounted returns of the tokens, whitened over the whole batch.

    ``A = (G − mean G) / std G`` with G of :func:`discounted_returns` and the statistics over all valid tokens of the
    batch (Hu et al. 2025, arXiv:2501.03262). The KL penalty belongs in the rewards
    (:func:`rlmesh.rl.kl.token_rewards`).

    Args:
        rewards: per token, ``[batch, time]``.
        mask: ``[batch, time]``; of the *whole* batch, over which the statistics are taken.
        gamma: discount in [0, 1].

    Returns:
        ``[batch, time]``, 0 in masked slots. No gradient flows to them.

    Raises:
        ValueError: shapes differ.
        FloatingPointError: a valid slot is not finite.
    """
    return masked_whiten(discounted_returns(rewards, mask, gamma=gamma), mask)
