"""Stacks the last observations of an episode, so that the policy sees movement."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlmesh.envs.connectors.connector import Connector
from rlmesh.errors import UsageError

__all__ = ["FrameStack"]


class FrameStack(Connector):
    """The last ``frames`` observations of an episode as one, the oldest first.

    Vectors ``[n]`` become ``[frames · n]``, images ``[height, width]`` become ``[height, width, frames]``, and images
    with channels ``[height, width, channels]`` become ``[height, width, frames · channels]``, or ``[channels, height,
    width]`` ``[frames · channels, height, width]``: the shorter of the first and the last axis is that of the channels.
    At the start of an episode, its first observation takes the place of earlier ones.

    Args:
        frames: number of observations.

    Raises:
        UsageError: the space has no such form, or has so many channels after stacking that the networks of
            `rlmesh.envs` would take another axis for that of the channels.
    """

    def __init__(self, frames: int = 4) -> None:
        if frames < 1:
            raise UsageError(f"FrameStack: frames must be at least 1, not {frames}")
        self.frames = frames

    def bind(self, space: Any, size: int) -> Any:
        from gymnasium import spaces

        if not isinstance(space, spaces.Box) or not 1 <= len(space.shape) <= 3:
            raise UsageError(f"FrameStack needs observations in a Box of one to three axes, not in {space}")
        self._channels_first = len(space.shape) == 3 and space.shape[0] < space.shape[-1]
        self._past = np.zeros((size, self.frames, *space.shape), space.dtype)
        low, high = (self._joined(np.stack([bound] * self.frames)[None])[0] for bound in (space.low, space.high))
        shape = low.shape
        taken_for_first = len(shape) == 3 and shape[0] < shape[-1]
        if taken_for_first != self._channels_first and sorted(shape)[1] >= 16:  # large enough for convolutions
            raise UsageError(
                f"FrameStack({self.frames}) makes images of {shape} from {space.shape}: with more channels than rows, "
                "networks take another axis for the channels. Stack fewer frames, or scale the images up"
            )
        return spaces.Box(low, high, dtype=space.dtype.type)

    def _joined(self, past: np.ndarray) -> np.ndarray:
        """Observations ``[n, frames, …]`` as ``[n, …]``."""
        if past.ndim == 3:
            return past.reshape(len(past), -1)
        if self._channels_first:
            return past.reshape(len(past), -1, *past.shape[3:])
        moved = np.moveaxis(past, 1, 3)
        return np.ascontiguousarray(moved.reshape(*moved.shape[:3], -1))

    def observe(self, rows: np.ndarray, first: np.ndarray, *, learn: bool) -> np.ndarray:
        past = self._past
        past[:, :-1] = past[:, 1:]
        past[:, -1] = rows
        if first.any():
            past[first] = rows[first][:, None]
        joined = self._joined(past)
        return joined.copy() if np.shares_memory(joined, past) else joined

    def last(self, row: np.ndarray, index: int) -> np.ndarray:
        joined: np.ndarray = self._joined(np.concatenate([self._past[index, 1:], row[None]])[None])[0]
        return joined

    def single(self, row: np.ndarray) -> np.ndarray:
        raise UsageError(
            f"a policy that sees {self.frames} stacked observations has no action for one; play episodes by evaluate() "
            "or an EnvRunner"
        )

    def own_state(self) -> np.ndarray:
        return self._past.copy()

    def set_own_state(self, state: Any) -> None:
        self._past = np.array(state)
