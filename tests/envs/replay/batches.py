"""Batches of made-up episodes, whose columns tell where each step comes from."""

from __future__ import annotations

from typing import Any

import numpy as np


def episode(number: int, length: int, *, first: int = 0, ends: str | None = "terminated") -> dict[str, Any]:
    """Steps ``first`` to ``first + length - 1`` of an episode: obs is [episode, t], the reward depends on both."""
    t = np.arange(first, first + length)
    ended = np.zeros(length, bool)
    ended[-1:] = ends is not None
    obs = np.stack([np.full(length, number), t], axis=1).astype(np.float32)
    return {
        "obs": obs,
        "new_obs": obs + np.array([0, 1], np.float32),
        "actions": t % 3,
        "rewards": (number + t / 8).astype(np.float32),
        "terminateds": ended & (ends == "terminated"),
        "truncateds": ended & (ends == "truncated"),
        "eps_id": np.full(length, number),
        "t": t,
    }


def together(*batches: dict[str, Any]) -> dict[str, Any]:
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def transitions(first: int, count: int) -> dict[str, Any]:
    """Rows without episodes: obs is the row's number."""
    numbers = np.arange(first, first + count)
    return {"obs": numbers.astype(np.float32)[:, None], "rewards": numbers * 0.5}
