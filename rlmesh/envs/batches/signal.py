"""`SignalWatch`: notices that batches have nothing to learn from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rlmesh.envs.batches import columns

__all__ = ["SignalWatch"]

logger = logging.getLogger(__name__)

LEAST_STEPS, LEAST_BATCHES = 10_000, 10
"""A policy has so many steps, in so many batches, before anything is said of it."""
EQUAL = 1e-6
"""Advantages whose range is less than this share of the largest target of a value count as equal."""


@dataclass
class _Seen:
    """Counts and ranges of the batches of one policy.

    Attributes:
        reward: the only reward; None before the first step.
        ended_at: the only time at which an episode was terminated; None if none was.
        varies: rewards differ, or rewards other than 0 stop at different times.
        flat_batches, flat_steps: the last batches in a row whose advantages are equal, and their rows.
        said: what was logged.
    """

    batches: int = 0
    steps: int = 0
    reward: float | None = None
    ended_at: int | None = None
    varies: bool = False
    flat_batches: int = 0
    flat_steps: int = 0
    said: bool = False


class SignalWatch:
    """Watches the rewards and advantages of a run, by policy, and says once if a policy learns nothing from them.

    Two things count. All rewards since the start of the run are equal; if they are not 0, all episodes that were
    terminated have the same length too, since the length changes the return. Or the advantages of all rows of many
    batches in a row are equal: their gradient is 0 in the mean, and 0 after standardising.
    """

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def add(self, policy_id: str, batch: Mapping[str, Any]) -> None:
        """Take in the rows of a batch of one policy; it has ``rewards``."""
        seen = self._seen.setdefault(policy_id, _Seen())
        count = len(batch[columns.REWARDS]) if columns.REWARDS in batch else 0
        if not count:
            return
        if not seen.varies:
            self._compare(seen, batch)
        seen.batches += 1
        seen.steps += count
        if columns.ADVANTAGES in batch:
            flat = count > 1 and _are_equal(batch[columns.ADVANTAGES], batch.get(columns.VALUE_TARGETS))
            seen.flat_batches, seen.flat_steps = (seen.flat_batches + 1, seen.flat_steps + count) if flat else (0, 0)

    def _compare(self, seen: _Seen, batch: Mapping[str, Any]) -> None:
        rewards = batch[columns.REWARDS]
        least, most = float(rewards.min()), float(rewards.max())
        seen.varies = least != most or seen.reward not in (None, least)
        seen.reward = least
        if seen.varies or not least or columns.TERMINATEDS not in batch or columns.T not in batch:
            return
        for time in np.unique(batch[columns.T][np.asarray(batch[columns.TERMINATEDS], bool)]).tolist():
            seen.varies = seen.varies or seen.ended_at not in (None, time)
            seen.ended_at = time

    def warnings(self) -> list[str]:
        """One text for each policy that has nothing to learn from; each is logged when it is there first."""
        found = []
        for policy_id, seen in self._seen.items():
            if (text := _text(policy_id, seen)) is None:
                continue
            found.append(text)
            if not seen.said:
                seen.said = True
                logger.warning(text)
        return found

    def get_state(self) -> dict[str, Any]:
        """The counts and ranges of each policy."""
        return {policy_id: asdict(seen) for policy_id, seen in self._seen.items()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take over a state of `get_state`."""
        self._seen = {policy_id: _Seen(**each) for policy_id, each in state.items()}


def _are_equal(advantages: np.ndarray, targets: np.ndarray | None) -> bool:
    largest = 0.0 if targets is None else float(np.abs(targets).max())
    return float(np.ptp(advantages)) <= EQUAL * largest


def _text(policy_id: str, seen: _Seen) -> str | None:
    if not seen.varies and seen.steps >= LEAST_STEPS and seen.batches >= LEAST_BATCHES:
        if not seen.reward:
            ends = ""
        elif seen.ended_at is None:
            ends = ", and no episode was terminated"
        else:
            ends = f", and every terminated episode has {seen.ended_at + 1} steps"
        return (
            f"the policy {policy_id!r} learns nothing: in all {seen.batches} batches so far, {seen.steps:,} rows, the "
            f"reward is {seen.reward:g}{ends}. Check what the environment's step() returns as reward, whether "
            "a connector clips all rewards to one value, and, if rewards are rare, whether random actions ever get one"
        )
    if seen.flat_steps >= LEAST_STEPS and seen.flat_batches >= LEAST_BATCHES:
        return (
            f"the policy {policy_id!r} learns nothing: all advantages of the last {seen.flat_batches} batches, "
            f"{seen.flat_steps:,} rows, are equal within each batch. Check whether rewards depend on actions, the "
            "column advantages, and gamma and lambda_"
        )
    return None
