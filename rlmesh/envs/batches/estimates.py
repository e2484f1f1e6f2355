"""Returns and advantages of fragments of trajectories, computed for all environments of a runner at once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlmesh.envs.batches import columns
from rlmesh.errors import UsageError

__all__ = ["discounted_returns", "fragment_gae", "rows_that_go_on"]


def fragment_gae(
    rewards: np.ndarray, values: np.ndarray, next_values: np.ndarray, goes_on: np.ndarray, gamma: float, lambda_: float
) -> tuple[np.ndarray, np.ndarray]:
    """Generalized advantage estimation (Schulman et al. 2016, equation 16) over a fragment.

    ``δ = r + γ·V(s') − V(s)``, ``A_t = δ_t + γλ·A_{t+1}`` where step t + 1 continues the episode of step t.

    Args:
        rewards: ``[time, environments]``.
        values: V of the observation before the step.
        next_values: V of the observation after the step: 0 after a terminal step; after a truncated step, and at the
            edge of the fragment, the value of the final observation.
        goes_on: True where the next row is the next step of the same episode.
        gamma, lambda_: discount and decay, both within [0, 1].

    Returns:
        Advantages and value targets (``A + V``), float32, ``[time, environments]``.
    """
    _check(gamma, lambda_)
    deltas = rewards.astype(np.float64) + gamma * next_values - values
    decay = gamma * lambda_ * goes_on
    advantages = np.empty_like(deltas)
    ahead = np.zeros(deltas.shape[1:])
    for time in range(len(deltas) - 1, -1, -1):
        ahead = deltas[time] + decay[time] * ahead
        advantages[time] = ahead
    return advantages.astype(np.float32), (advantages + values).astype(np.float32)


def discounted_returns(rewards: np.ndarray, next_values: np.ndarray, goes_on: np.ndarray, gamma: float) -> np.ndarray:
    """Discounted sums of rewards until the end of the episode or of the fragment, where ``next_values`` take over.

    Arguments as for `fragment_gae`; give zeros as ``next_values`` for returns without bootstrapping.
    """
    _check(gamma, 1.0)
    returns = np.empty(rewards.shape)
    ahead = np.zeros(rewards.shape[1:])
    for time in range(len(rewards) - 1, -1, -1):
        ahead = rewards[time] + gamma * np.where(goes_on[time], ahead, next_values[time])
        returns[time] = ahead
    return returns.astype(np.float32)


def rows_that_go_on(batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """True where the next row of a batch is the next step of the same episode, ``[rows]``.

    Args:
        batch: has the columns ``eps_id``, ``t``, ``terminateds`` and ``truncateds``. Fragments of any number of
            environments may follow each other.
    """
    episode, t = batch[columns.EPS_ID], batch[columns.T]
    goes_on: np.ndarray = ~(batch[columns.TERMINATEDS] | batch[columns.TRUNCATEDS])
    goes_on[:-1] &= (episode[1:] == episode[:-1]) & (t[1:] == t[:-1] + 1)
    goes_on[-1:] = False
    return goes_on


def _check(gamma: float, lambda_: float) -> None:
    if not (0.0 <= gamma <= 1.0 and 0.0 <= lambda_ <= 1.0):
        raise UsageError(f"gamma and lambda_ are within 0 and 1, not {gamma} and {lambda_}")
