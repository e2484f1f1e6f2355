"""Normalises observations by the mean and the standard deviation of all that was seen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlmesh.envs.connectors.connector import Connector
from rlmesh.envs.connectors.moments import RunningMoments
from rlmesh.errors import UsageError

__all__ = ["ObservationNormalizer"]


class ObservationNormalizer(Connector):
    """Observations with mean 0 and variance 1: (o - mean) / sqrt(variance + eps), clipped, as float32.

    All runners normalise by the same shared moments. What a runner sees meanwhile is kept apart, and merged when
    weights are sent to the runners, so that all observations within a fragment are normalised alike; the one that it
    begins with ended the fragment before, and stays as the policy was given it there. Before the first merge, a runner
    uses all that it has seen itself.

    Args:
        clip: the largest absolute value.
        eps: added to the variance.
    """

    def __init__(self, clip: float = 10.0, eps: float = 1e-8) -> None:
        if not (clip > 0 and 0 < eps < math.inf):
            raise UsageError(f"ObservationNormalizer: clip and eps must be above 0, eps finite, not {clip} and {eps}")
        self.clip, self.eps = float(clip), float(eps)

    def bind(self, space: Any, size: int) -> Any:
        from gymnasium import spaces

        if not isinstance(space, spaces.Box):
            raise UsageError(f"ObservationNormalizer needs observations in a Box, not in {space}")
        self._dtype = np.result_type(space.dtype, np.float32)  # float32 would round a mean such as 1.7e9 by tens
        self._shared, self._seen, self._all_seen = (RunningMoments(space.shape) for _ in range(3))
        self._use(self._shared)
        return spaces.Box(-self.clip, self.clip, space.shape, np.float32)

    def observe(self, rows: np.ndarray, first: np.ndarray, *, learn: bool) -> np.ndarray:
        if learn and np.isfinite(rows).all():  # NaN, which the runner refuses, must not stay in the moments
            self._seen.update(rows)
            if not self._shared.count:  # runners that sample ahead give away what they have seen before they get any
                self._all_seen.update(rows)
                self._use(self._all_seen)
        return self._normalized(rows)

    def episode(self, rows: np.ndarray, *, learn: bool) -> np.ndarray:
        return self.observe(rows, np.zeros(len(rows), bool), learn=learn)

    def last(self, row: np.ndarray, index: int) -> np.ndarray:
        return self._normalized(row)

    def single(self, row: np.ndarray) -> np.ndarray:
        return self._normalized(row)

    def _use(self, moments: RunningMoments) -> None:
        """Compute the factors that normalise by these moments; without any rows, nothing changes."""
        self._mean = moments.mean.astype(self._dtype)
        scale = 1 / np.sqrt(moments.variance + self.eps) if moments.count else np.ones(moments.mean.shape)
        self._scale = scale.astype(np.float32)

    def _normalized(self, rows: np.ndarray) -> np.ndarray:
        normalized: np.ndarray = np.clip((rows - self._mean) * self._scale, -self.clip, self.clip)
        return normalized.astype(np.float32, copy=False)

    def take_delta(self) -> dict[str, Any]:
        delta, self._seen = self._seen.state(), RunningMoments(self._seen.mean.shape)
        return delta

    def merge(self, deltas: Sequence[Mapping[str, Any]]) -> None:
        for delta in deltas:
            self._shared.merge(RunningMoments.of(delta))
        self._use(self._shared)

    def shared_state(self) -> dict[str, Any]:
        return self._shared.state()

    def set_shared_state(self, state: Mapping[str, Any]) -> None:
        self._shared = RunningMoments.of(state)
        self._use(self._shared if self._shared.count else self._all_seen)

    def own_state(self) -> dict[str, Any]:
        return self._seen.state()

    def set_own_state(self, state: Mapping[str, Any]) -> None:
        self._seen, self._all_seen = RunningMoments.of(state), RunningMoments.of(state)
        if not self._shared.count:
            self._use(self._all_seen)
