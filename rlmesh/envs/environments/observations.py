"""Observations as rows of one array: plain spaces unchanged, all others as vectors of features."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rlmesh.envs.environments.features import SEQUENCE_LENGTH, features_of, has_bound, whole_numbers
from rlmesh.errors import UsageError

if TYPE_CHECKING:
    import gymnasium

__all__ = ["ObservationRows"]


class ObservationRows:
    """The form in which observations of a space are stored: rows of one array.

    Box, Discrete, MultiDiscrete and MultiBinary observations are stored as they are. Dict and Tuple observations are
    flattened as ``gymnasium.spaces.flatten`` does. Text, Sequence, Graph and OneOf, also inside of Dict and Tuple,
    become vectors of floats (`rlmesh.envs.environments.features.features_of`).

    Args:
        space: the observation space.
        max_length: elements of a Sequence, and nodes and edges of a Graph, that a row has room for.

    Attributes:
        space: the space of a row.
        shape, dtype: shape and element type of a row.

    Raises:
        UsageError: the space is none of Gymnasium's.
    """

    def __init__(self, space: gymnasium.Space[Any], max_length: int = SEQUENCE_LENGTH) -> None:
        from gymnasium import spaces

        self.given = space
        self.space: Any = space
        self.flattens = not isinstance(
            space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
        )  # fmt: skip
        if self.flattens:
            width, self._write = features_of(space, max_length)
            if has_bound(space):
                self.space = spaces.flatten_space(space)
            else:
                self.space = spaces.Box(-np.inf, np.inf, (width,), np.float32)
        self._least: Any = None
        self._below: Any = None
        """Observations of a discrete space are smaller, and at least ``_least``."""
        if isinstance(space, spaces.Discrete):
            self._least, self._below = int(space.start), int(space.start + space.n)
        elif isinstance(space, spaces.MultiDiscrete):
            self._least, self._below = space.start, space.start + space.nvec
        self.shape: tuple[int, ...] = tuple(self.space.shape or ())
        self.dtype = np.dtype(self.space.dtype)

    def empty(self, *shape: int) -> np.ndarray:
        """An array of zeros for ``[*shape, *row]``."""
        return np.zeros((*shape, *self.shape), self.dtype)

    def write(self, out: np.ndarray, index: Any, observation: Any) -> None:
        """Copy an observation into ``out[index]``.

        Raises:
            UsageError: the observation has another shape than its space, or a type that loses information, or more
                elements than a row has room for, or is no category of its discrete space.
        """
        if self.flattens:
            row = self.empty()
            self._write(row, observation)
            out[index] = row
            return
        if type(observation) is not np.ndarray:
            observation = np.asarray(observation)
        if observation.shape == self.shape and observation.dtype is self.dtype:
            if self._below is not None:
                self._check_limits(observation)
            out[index] = observation
            return
        if observation.shape != self.shape:
            raise UsageError(
                f"an observation has shape {observation.shape}, its space {self.shape}: the environment returns "
                "something that its observation_space does not contain"
            )
        if observation.dtype != self.dtype and not np.can_cast(observation.dtype, self.dtype, "same_kind"):
            raise UsageError(
                f"an observation has elements of {observation.dtype}, its space of {self.dtype}: the environment "
                "returns something that its observation_space does not contain"
            )
        if self._below is not None:
            self._check_limits(observation)
        found = whole_numbers(observation, self.dtype)
        if found is None:
            raise UsageError(
                f"an observation has numbers that do not fit {self.dtype}, the type of its space: the environment "
                "returns something that its observation_space does not contain"
            )
        out[index] = found

    def _check_limits(self, observation: np.ndarray) -> None:
        if not ((observation >= self._least) & (observation < self._below)).all():
            raise UsageError(
                f"the observation {observation} is outside of the observation_space {self.given}: its "
                f"numbers begin at {self._least} and end below {self._below}"
            )
