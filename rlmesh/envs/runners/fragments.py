"""Fragments: consecutive steps of all environments of a runner, before they become a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from rlmesh.envs.batches import columns
from rlmesh.envs.batches.estimates import fragment_gae
from rlmesh.envs.batches.sample_batch import SampleBatch

__all__ = ["Fragment"]


@dataclass
class Fragment:
    """Steps of ``size`` environments during ``steps`` time steps; columns are ``[environments, time, …]``.

    Attributes:
        columns: by name; `to_batch` makes each of them ``[rows, …]``, environment after environment.
        valid: False where the row is no step, and is dropped.
        after: the observations after the last step, ``[environments, …]``.
        ended: environment, time and last observation of each episode that ended within the fragment.
        states: of a recurrent policy, before the observations of ``after``: by name, ``[environments, …]``.
        ended_states: the states before the last observations of ``ended``, in their order.
    """

    size: int
    steps: int
    columns: dict[str, np.ndarray]
    valid: np.ndarray
    after: np.ndarray
    ended: list[tuple[int, int, np.ndarray]] = field(default_factory=list)
    states: dict[str, np.ndarray] = field(default_factory=dict)
    ended_states: list[dict[str, np.ndarray]] = field(default_factory=list)

    def flat(self, name: str) -> np.ndarray:
        """A column as ``[environments · time, …]``, without a copy."""
        column = self.columns[name]
        return column.reshape(self.size * self.steps, *column.shape[2:])

    def goes_on(self) -> np.ndarray:
        """True where the next row is the next step of the same episode, ``[environments, time]``."""
        done = self.columns[columns.TERMINATEDS] | self.columns[columns.TRUNCATEDS]
        result: np.ndarray = ~done & self.valid
        result[:, :-1] &= self.valid[:, 1:]
        result[:, -1] = False
        return result

    def next_values(self, values: np.ndarray, values_of: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """The value of the observation after each step, ``[environments, time]``.

        After a terminal step it is 0. After a truncated step it is that of the episode's final observation, not of the
        next episode's first one. After the last step of the fragment it is that of the observation to act on next. An
        episode that is cut because its environment broke ends with the observation that the last action was chosen for.

        Args:
            values: of the observations before the steps, ``[environments, time]``.
            values_of: computes values of observations ``[rows, …]``.
        """
        cut_short = [(i, t, last) for i, t, last in self.ended if not self.columns[columns.TERMINATEDS][i, t]]
        after = values_of(np.concatenate([self.after, *(last[None] for _, _, last in cut_short)]))
        result = np.empty_like(values)
        result[:, :-1] = values[:, 1:]
        result[:, -1] = after[: self.size]
        for (i, t, _), value in zip(cut_short, after[self.size :], strict=True):
            result[i, t] = value
        result[self.columns[columns.TERMINATEDS]] = 0.0
        return result

    def last_states(self) -> dict[str, np.ndarray]:
        """The states before the observations of which `next_values` asks for values, in its order."""
        if not self.states:
            return {}
        ends = zip(self.ended, self.ended_states, strict=True)
        kept = [state for (i, t, _), state in ends if not self.columns[columns.TERMINATEDS][i, t]]
        return {
            name: np.concatenate([states, *(each[name][None] for each in kept)]) for name, states in self.states.items()
        }

    def add_advantages(self, values: np.ndarray, next_values: np.ndarray, gamma: float, lambda_: float) -> None:
        """Add values, advantages and value targets (`fragment_gae`).

        Args:
            values, next_values: ``[environments, steps]``, before and after each step.
        """
        given = self.columns
        advantages, targets = fragment_gae(
            given[columns.REWARDS].T, values.T, next_values.T, self.goes_on().T, gamma, lambda_
        )
        given[columns.VF_PREDS] = values
        given[columns.ADVANTAGES], given[columns.VALUE_TARGETS] = advantages.T, targets.T

    def add_new_obs(self) -> None:
        """Add the column ``new_obs``: the observation after each step, the final one at the end of an episode."""
        obs = self.columns[columns.OBS]
        new_obs = np.empty_like(obs)
        new_obs[:, :-1], new_obs[:, -1] = obs[:, 1:], self.after
        for i, t, last in self.ended:
            new_obs[i, t] = last
        self.columns[columns.NEW_OBS] = new_obs

    def to_batch(self) -> SampleBatch:
        """The valid rows, environment after environment, each in the order of time."""
        names = sorted(self.columns)
        if self.valid.all():
            return SampleBatch({name: self.flat(name) for name in names})
        rows = np.flatnonzero(self.valid)
        return SampleBatch({name: self.flat(name)[rows] for name in names})
