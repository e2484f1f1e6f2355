"""Returns and advantages of the tokens of a response.

A masked slot inside a row (tool output, say) is a stretch of time in which the policy chose nothing: it
carries no reward and no advantage, and time goes on, so γ discounts over it. λ does not: it mixes
estimates of the policy's own decisions. Padding at the end of a row is no time at all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlmesh.rl.masking import keep, require_mask

__all__ = ["discounted_returns", "gae", "grpo"]


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
    returns = torch.zeros_like(reward)
    later = reward.new_zeros(reward.shape[0])
    for t in reversed(range(reward.shape[1])):
        later = reward[:, t] + gamma * later
        returns[:, t] = later
    return keep(returns, valid, name="returns")


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

    Advantages come unscaled: whiten them with :func:`rlmesh.rl.masking.masked_whiten` over the whole batch.
    The returns, the critic's targets, belong to the unscaled ones.

    Args:
        rewards: ``[batch, time]``.
        values: V before each token was chosen, ``[batch, time]``.
        mask: ``[batch, time]``.
        gamma, lam: in [0, 1].
        last_values: V after the last valid token, ``[batch]``, for rows that were cut off rather than ended.
            ``None``: every row ended, and nothing comes after.

    Returns:
        advantages and returns, each ``[batch, time]`` and 0 in masked slots. No gradient flows to them.

    Raises:
        ValueError: shapes differ.
        FloatingPointError: a valid slot is not finite.
    """
    valid = require_mask(mask, like=rewards, name="rewards")
    reward = keep(rewards.detach(), valid, name="rewards")
    value = keep(values.detach(), valid, name="values")
    advantages = torch.zeros_like(value)
    later_advantage = later_value = value.new_zeros(value.shape[0])
    if last_values is not None:
        later_value = keep(last_values.detach().to(value.dtype), valid.any(1), name="last_values")
    inside = valid.new_zeros(valid.shape[0])  # a valid token comes later in this row
    for t in reversed(range(value.shape[1])):
        now = valid[:, t]
        advantage = reward[:, t] + gamma * later_value - value[:, t] + gamma * lam * later_advantage
        advantages[:, t] = advantage
        gap = torch.where(inside, gamma, 1.0).to(value.dtype)
        later_advantage = torch.where(now, advantage, gap * later_advantage)
        later_value = torch.where(now, value[:, t], gap * later_value)
        inside = inside | now
    advantages = keep(advantages, valid, name="advantages")
    return advantages, keep(advantages + value, valid, name="returns")


def grpo(rewards: Tensor, groups: Tensor, *, scale: bool = True, eps: float = 1e-6) -> Tensor:
    """Advantages of whole responses, by comparison with the others to the same prompt.

    ``A[i] = (r[i] − mean r of its group) / (std r of its group + eps)`` with the standard deviation of n − 1 (Shao et
    al. 2024, arXiv:2402.03300, section 4.1.2). Without ``scale`` the division is left out, which weighs easy and hard
    prompts alike (Liu et al. 2025, arXiv:2503.20783).

    A group of one, and a group whose rewards are all equal, say nothing: advantages of 0.

    Args:
        rewards: one per response, ``[batch]``.
        groups: ``[batch]``, integers; equal where the prompt is.

    Returns:
        ``[batch]``; every token of a response has its advantage. No gradient flows to them.

    Raises:
        ValueError: shapes differ.
        FloatingPointError: a reward is not finite.
    """
    if groups.shape != rewards.shape or rewards.ndim != 1:
        raise ValueError(f"rewards {tuple(rewards.shape)} and groups {tuple(groups.shape)}: expected one each per row")
    reward = keep(rewards.detach().float(), torch.ones_like(rewards, dtype=torch.bool), name="rewards")
    _, places = groups.unique(return_inverse=True)
    size = torch.zeros(int(places.max()) + 1 if len(places) else 0, device=reward.device)
    counts = size.scatter_add(0, places, torch.ones_like(reward))
    centred = reward - (size.scatter_add(0, places, reward) / counts)[places]
    if not scale:
        return centred
    variance = size.scatter_add(0, places, centred.square()) / (counts - 1).clamp(min=1)
    return centred / (variance.sqrt()[places] + eps)
