"""Twins of :mod:`rlmesh.rl.group_advantages`."""

from __future__ import annotations

from collections.abc import Callable
from math import comb

import numpy as np

from rlmesh.rl.reference.masking import Array, Mask, Tokens, masked_whiten


def _by_group(groups: Tokens, valid: Mask | None, advantage: Callable[[int, list[int]], float]) -> Array:
    """``advantage(i, members)`` of each valid response i, with the valid members of its group; 0 elsewhere."""
    out = np.zeros(len(groups))
    for i in range(len(groups)):
        members = [j for j in range(len(groups)) if groups[j] == groups[i] and (valid is None or valid[j])]
        if i in members:
            out[i] = advantage(i, members)
    return out


def grpo(rewards: Array, groups: Tokens, *, scale: bool = True, eps: float = 1e-6, valid: Mask | None = None) -> Array:
    """(r − mean) / (std + eps) within each group, std with n − 1; 0 in a group of one."""

    def advantage(i: int, members: list[int]) -> float:
        mean = sum(rewards[j] for j in members) / len(members)
        std = np.sqrt(sum((rewards[j] - mean) ** 2 for j in members) / max(len(members) - 1, 1))
        return float((rewards[i] - mean) / (std + eps if scale else 1.0))

    return _by_group(groups, valid, advantage)


def dr_grpo(rewards: Array, groups: Tokens, *, valid: Mask | None = None) -> Array:
    """r − mean of the group."""
    return grpo(rewards, groups, scale=False, valid=valid)


def rloo(rewards: Array, groups: Tokens, *, valid: Mask | None = None) -> Array:
    """r − mean of the other responses; 0 in a group of one."""

    def advantage(i: int, members: list[int]) -> float:
        others = [rewards[j] for j in members if j != i]
        return float(rewards[i] - sum(others) / len(others)) if others else 0.0

    return _by_group(groups, valid, advantage)


def remax(rewards: Array, greedy_rewards: Array, *, valid: Mask | None = None) -> Array:
    """r − reward of the greedy response."""
    return _by_group(np.arange(len(rewards)), valid, lambda i, _: float(rewards[i] - greedy_rewards[i]))


def opo(rewards: Array, groups: Tokens, lengths: Array, *, valid: Mask | None = None) -> Array:
    """r − mean of the group weighted by length."""

    def advantage(i: int, members: list[int]) -> float:
        total = sum(lengths[j] for j in members)
        return float(rewards[i] - (sum(lengths[j] * rewards[j] for j in members) / total if total else 0.0))

    return _by_group(groups, valid, advantage)


def pass_at_k(correct: Mask, groups: Tokens, *, k: int, valid: Mask | None = None) -> Array:
    """The mean, over all choices of k members that include the response, of (pass − mean) / std of the choices.

    A choice passes if one of its members is right; mean and std are those of all choices.
    """

    def advantage(i: int, members: list[int]) -> float:
        n, wrong = len(members), sum(not correct[j] for j in members)
        if n < k:
            return 0.0
        passed = 1 - comb(wrong, k) / comb(n, k)
        std = np.sqrt(passed * (1 - passed))
        if std == 0:
            return 0.0
        mine = 1.0 if correct[i] else 1 - comb(wrong - 1, k - 1) / comb(n - 1, k - 1)
        return float((mine - passed) / std)

    return _by_group(groups, valid, advantage)


def reinforce_plus_plus_baseline(rewards: Array, groups: Tokens, mask: Mask, *, valid: Mask | None = None) -> Array:
    """r − mean of the group at each token, whitened over all valid tokens of valid responses."""
    rows = dr_grpo(rewards, groups, valid=valid)
    usable = mask if valid is None else mask & valid[:, None]
    return masked_whiten(spread(rows, mask), usable)


def spread(advantages: Array, mask: Mask) -> Array:
    """The response's advantage at each valid token."""
    out = np.zeros(mask.shape)
    for b in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            if mask[b, t]:
                out[b, t] = advantages[b]
    return out
