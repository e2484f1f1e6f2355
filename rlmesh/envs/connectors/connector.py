"""`Connector`: one step between environments and the policy; `ConnectorPipeline`: several of them in a row."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlmesh.errors import UsageError

__all__ = ["Connector", "ConnectorPipeline"]


class Connector:
    """Base of connectors. All methods work on the rows of all environments of a runner at once.

    A subclass defines `bind` if it changes the observation space, `observe` and `last` if it changes observations, and
    `clip_rewards` if it changes rewards. What it learns from data goes into `take_delta`, `merge` and the states.
    """

    def bind(self, space: Any, size: int) -> Any:
        """Prepare for ``size`` environments whose observations are in ``space``; returns the space that comes out."""
        return space

    def observe(self, rows: np.ndarray, first: np.ndarray, *, learn: bool) -> np.ndarray:
        """The observations that the policy gets.

        Args:
            rows: observations ``[environments, …]``; they must not be changed.
            first: True where an episode begins with this observation, ``[environments]``.
            learn: False leaves statistics as they are.
        """
        return rows

    def episode(self, rows: np.ndarray, *, learn: bool) -> np.ndarray:
        """The observations ``[time, …]`` of a recorded episode from its beginning on; of a connector that was bound for
        one environment. The observation after the last step goes through `last`."""
        seen = [self.observe(rows[i : i + 1], np.array([i == 0]), learn=learn) for i in range(len(rows))]
        return np.concatenate(seen)

    def last(self, row: np.ndarray, index: int) -> np.ndarray:
        """The last observation ``[…]`` of an episode of environment ``index``; called before the next one begins."""
        return row

    def single(self, row: np.ndarray) -> np.ndarray:
        """One observation ``[1, …]`` outside of an episode."""
        return row

    def clip_rewards(self, rewards: np.ndarray) -> np.ndarray:
        """The rewards that the policy learns from, of rewards ``[environments, time]``."""
        return rewards

    def take_delta(self) -> Any:
        """The statistics since the last call, to be merged with those of other runners; None if there are none."""
        return None

    def merge(self, deltas: Sequence[Any]) -> None:
        """Add the deltas of all runners, in the order of the runners, to the shared state."""

    def shared_state(self) -> Any:
        """The state that is equal on all runners; None if there is none."""
        return None

    def set_shared_state(self, state: Any) -> None:
        """Take over a state of `shared_state`."""

    def own_state(self) -> Any:
        """The state of this runner alone, for its checkpoint."""
        return None

    def set_own_state(self, state: Any) -> None:
        """Take over a state of `own_state`."""


class ConnectorPipeline:
    """The connectors of one runner, as copies of those of the configuration.

    Args:
        connectors: applied in this order.
        space: observation space of the environments.
        size: number of environments.
        learn: False leaves statistics as they are, for evaluation.

    Attributes:
        space: the space of observations that the policy gets.

    Raises:
        UsageError: one of them is no connector, or does not fit the space.
    """

    def __init__(self, connectors: Iterable[Connector], space: Any, size: int, *, learn: bool = True) -> None:
        self.connectors = [copy.deepcopy(connector) for connector in connectors]
        self.learn = learn
        for connector in self.connectors:
            if not isinstance(connector, Connector):
                raise UsageError(
                    f"connectors: {connector!r} is no connector; give objects such as FrameStack(4) or "
                    "ObservationNormalizer()"
                )
            space = connector.bind(space, size)
        self.space, self._shape = space, tuple(space.shape or ())

    def __bool__(self) -> bool:
        return bool(self.connectors)

    def observe(self, rows: np.ndarray, first: np.ndarray) -> np.ndarray:
        """The observations that the policy gets, in memory that nobody else writes to."""
        for connector in self.connectors:
            rows = connector.observe(rows, first, learn=self.learn)
        if rows.shape[1:] != self._shape:  # NumPy would broadcast them
            raise UsageError(
                f"{type(self.connectors[-1]).__name__}.observe returned rows of shape {rows.shape[1:]}; the space that "
                f"its bind returned has {self._shape}"
            )
        return rows

    def last(self, row: np.ndarray, index: int) -> np.ndarray:
        """The last observation of an episode, as the policy would get it."""
        for connector in self.connectors:
            row = connector.last(row, index)
        return row

    def single(self, row: np.ndarray) -> np.ndarray:
        """One observation ``[1, …]`` outside of an episode, for a single action.

        Raises:
            UsageError: a connector needs earlier observations.
        """
        for connector in self.connectors:
            row = connector.single(row)
        return row

    def rewards(self, rewards: np.ndarray) -> np.ndarray:
        """The rewards that the policy learns from, ``[environments, time]``."""
        for connector in self.connectors:
            rewards = connector.clip_rewards(rewards)
        return rewards

    def take_delta(self) -> list[Any]:
        """The statistics of each connector since the last call."""
        return [connector.take_delta() for connector in self.connectors]

    def merge(self, deltas: Sequence[Sequence[Any]]) -> None:
        """Add the deltas of several runners, in their order."""
        for number, connector in enumerate(self.connectors):
            connector.merge([delta[number] for delta in deltas if delta[number] is not None])

    def shared_state(self) -> list[Any]:
        """The states that are equal on all runners."""
        return [connector.shared_state() for connector in self.connectors]

    def set_shared_state(self, states: Sequence[Any]) -> None:
        """Take over the states of another runner."""
        for connector, state in zip(self.connectors, states, strict=True):
            connector.set_shared_state(state)

    def state(self) -> Mapping[str, Any]:
        """Everything, for the checkpoint of this runner."""
        return {"shared": self.shared_state(), "own": [connector.own_state() for connector in self.connectors]}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take over a state of `state`."""
        self.set_shared_state(state["shared"])
        for connector, own in zip(self.connectors, state["own"], strict=True):
            connector.set_own_state(own)
