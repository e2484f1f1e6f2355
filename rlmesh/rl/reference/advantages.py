"""Twins of :mod:`rlmesh.rl.advantages`."""

from __future__ import annotations

import numpy as np

from rlmesh.rl.reference.masking import Array, Mask, masked_whiten, valid_slots


def discounted_returns(rewards: Array, mask: Mask, *, gamma: float) -> Array:
    """Σ over valid s ≥ t of γ^(s − t) · r[s]."""
    out = np.zeros(rewards.shape)
    for b, t in valid_slots(mask):
        out[b, t] = sum(gamma ** (s - t) * rewards[b, s] for s in range(t, rewards.shape[1]) if mask[b, s])
    return out


def gae(
    rewards: Array,
    values: Array,
    mask: Mask,
    *,
    gamma: float,
    lam: float,
    last_values: Array | None = None,
) -> tuple[Array, Array]:
    """Advantages as the explicit sum of temporal differences, and returns = advantages + values."""
    advantages, returns = np.zeros(rewards.shape), np.zeros(rewards.shape)
    for b in range(rewards.shape[0]):
        times = [t for t in range(rewards.shape[1]) if mask[b, t]]
        deltas = []
        for i, t in enumerate(times):
            if i + 1 < len(times):
                after = gamma ** (times[i + 1] - t) * values[b, times[i + 1]]
            else:
                after = 0.0 if last_values is None else gamma * last_values[b]
            deltas.append(rewards[b, t] + after - values[b, t])
        for i, t in enumerate(times):
            advantages[b, t] = sum(gamma ** (times[j] - t) * lam ** (j - i) * deltas[j] for j in range(i, len(times)))
            returns[b, t] = advantages[b, t] + values[b, t]
    return advantages, returns


def reinforce_plus_plus(rewards: Array, mask: Mask, *, gamma: float = 1.0) -> Array:
    """Discounted returns, whitened over all valid tokens."""
    return masked_whiten(discounted_returns(rewards, mask, gamma=gamma), mask)
