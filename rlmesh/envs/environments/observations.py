"""Observations as rows of one array: plain spaces unchanged, dict and tuple spaces flattened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rlmesh.errors import UsageError

if TYPE_CHECKING:
    import gymnasium

__all__ = ["ObservationRows"]


class ObservationRows:
    """The form in which observations of a space are stored: rows of one array.

    Box, Discrete, MultiDiscrete and MultiBinary observations are stored as they are. Dict and Tuple observations are
    flattened as ``gymnasium.spaces.flatten`` does, so that ``obs`` is one vector per step.

    Attributes:
        space: the space of a row.
        shape, dtype: shape and element type of a row.

    Raises:
        UsageError: rows of this space would differ in length (Text, Graph, Sequence).
    """

    def __init__(self, space: gymnasium.Space[Any]) -> None:
        from gymnasium import spaces

        self.given = space
        self.space: Any
        self.flattens = isinstance(space, spaces.Dict | spaces.Tuple)
        if self.flattens:
            if not space.is_np_flattenable:
                raise UsageError(f"the observation space {space} has parts of variable length, which no column holds")
            self.space = spaces.flatten_space(space)
        elif isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
            self.space = space
        else:
            raise UsageError(
                f"the observation space {space} is not supported; there are Box, Discrete, MultiDiscrete, MultiBinary, "
                "and Dict and Tuple of them"
            )
        self.shape: tuple[int, ...] = tuple(self.space.shape or ())
        self.dtype = np.dtype(self.space.dtype)

    def empty(self, *shape: int) -> np.ndarray:
        """An array of zeros for ``[*shape, *row]``."""
        return np.zeros((*shape, *self.shape), self.dtype)

    def write(self, out: np.ndarray, index: Any, observation: Any) -> None:
        """Copy an observation into ``out[index]``.

        Raises:
            UsageError: the observation has another shape than its space, or a type that loses information.
        """
        if self.flattens:
            from gymnasium.spaces.utils import flatten

            observation = flatten(self.given, observation)
        elif type(observation) is not np.ndarray:
            observation = np.asarray(observation)
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
        out[index] = observation
