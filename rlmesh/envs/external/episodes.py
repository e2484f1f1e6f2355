"""The episodes of external environments in a runner: rows that wait to be sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlmesh.envs.batches import columns
from rlmesh.envs.connectors.connector import ConnectorPipeline
from rlmesh.envs.modules.policy import Explorer, States
from rlmesh.envs.runners.fragments import Fragment

__all__ = ["ActedSteps", "ExternalEpisode", "Piece", "fragment_of"]

STRETCH = 64
"""Steps for which an explorer is made at once."""


@dataclass
class Piece:
    """Consecutive steps of one episode.

    Attributes:
        columns: by name, ``[steps, …]``.
        after: the observation after the last step.
        states: of a policy with memory, after the last step.
        ended: ``terminated`` or ``truncated`` if the last step ends the episode.
    """

    columns: dict[str, np.ndarray]
    after: np.ndarray
    states: States
    ended: str = ""

    def __len__(self) -> int:
        return len(self.columns[columns.OBS])


class ActedSteps:
    """Steps of an episode that one explorer acted in, with the weights of one version.

    Attributes:
        obs, rewards: of its steps, ``[STRETCH, …]``.
        count: steps whose action was chosen.
        taken: steps that were sampled already.
    """

    def __init__(self, explorer: Explorer, obs: np.ndarray, version: int) -> None:
        self.explorer, self.obs, self.version = explorer, obs, version
        self.rewards = np.zeros(STRETCH, np.float32)
        self.count = self.taken = 0
        self.withdrawn = False  # the explorer has acted once more

    def fits(self, version: int) -> bool:
        """True if the next step can be acted in with this explorer."""
        return self.version == version and self.count < STRETCH


@dataclass
class ExternalEpisode:
    """An episode of a client.

    Attributes:
        eps_id: its number in batches.
        train: its steps are sampled.
        pipeline: its connectors; None without any.
        stretch: the steps since the last change of weights; None before the first action.
        steps: actions that were chosen.
        reward: rewards since the last action.
        total: rewards of the finished steps.
        next_obs: the observation after the last step; None while the step of the last action is not finished.
        turn: number of the last request for an action.
        asked: the observation of this request; None before the first one.
        seen: the same, as the policy gets it.
        answer: what this request is answered by; None while it waits.
        waits: stands for the call that waits for the answer; a later call with this request takes its place.
    """

    client: str
    eps_id: int
    train: bool
    pipeline: ConnectorPipeline | None = None
    stretch: ActedSteps | None = None
    steps: int = 0
    reward: float = 0.0
    total: float = 0.0
    next_obs: np.ndarray | None = None
    turn: int = 0
    asked: np.ndarray | None = None
    seen: np.ndarray | None = None
    answer: Any = None
    waits: object = None

    @property
    def is_open(self) -> bool:
        """True if the step of the last action is not finished."""
        return self.stretch is not None and self.next_obs is None

    @property
    def ready(self) -> int:
        """Steps that can be sampled: finished ones before the last action, whose step may still end the episode."""
        if self.stretch is None or not self.train:
            return 0
        return max(0, self.stretch.count - self.stretch.taken - 1)

    def observed(self, row: np.ndarray) -> np.ndarray:
        """An observation that an action is asked for, as the policy gets it; called once for each of them."""
        if self.pipeline is None:
            return row
        observation: np.ndarray = self.pipeline.observe(row[None], np.array([self.turn == 0]))[0]
        return observation

    def close_last_step(self, row: np.ndarray) -> None:
        """Finish the step of the last action with the observation that ends the episode."""
        if self.is_open:
            self.close_step(row if self.pipeline is None else self.pipeline.last(row, 0))

    def close_step(self, next_obs: np.ndarray) -> None:
        """Finish the step of the last action with the rewards since then, and the observation after it."""
        if self.stretch is None or self.next_obs is not None:
            return
        self.stretch.rewards[self.stretch.count - 1] = self.reward
        self.total += self.reward
        self.reward, self.next_obs = 0.0, next_obs

    def open_step(self) -> None:
        """Count an action that was chosen in the stretch."""
        assert self.stretch is not None
        self.stretch.count += 1
        self.steps += 1
        self.next_obs = None

    def withdraw_step(self) -> None:
        """Forget the last action, which nobody has carried out."""
        assert self.stretch is not None
        self.stretch.count -= 1
        self.stretch.withdrawn = True
        self.steps -= 1
        self.reward, self.next_obs = 0.0, self.seen

    def take(self, ended: str = "", *, last: bool = False) -> list[Piece]:
        """The steps that can be sampled and were not taken before, as at most one piece.

        Args:
            ended: how the last step ends the episode.
            last: take the step of the last action too, if it is finished: no later call can end the episode with it.
        """
        stretch, length = self.stretch, self.ready
        if stretch is not None and self.train and last and self.next_obs is not None:
            length = stretch.count - stretch.taken
        if stretch is None or not length:
            return []
        part = slice(stretch.taken, stretch.taken + length)
        after = stretch.obs[part.stop] if part.stop < stretch.count else self.next_obs
        assert after is not None
        first = self.steps - (stretch.count - part.start)
        rewards = stretch.rewards[part].copy()
        changed = rewards if self.pipeline is None else self.pipeline.rewards(rewards[None])[0]
        own = {} if np.shares_memory(changed, rewards) else {columns.ENV_REWARDS: rewards}
        steps = {
            columns.OBS: stretch.obs[part].copy(), columns.REWARDS: changed, **own,
            columns.T: np.arange(first, first + length), columns.EPS_ID: np.full(length, self.eps_id),
            **{name: column[0, part].copy() for name, column in stretch.explorer.columns().items()},
        }  # fmt: skip
        stretch.taken = part.stop
        states = stretch.explorer.states_before(part.stop, stretch.count + stretch.withdrawn)
        return [Piece(steps, after.copy(), states, ended)]


def fragment_of(pieces: Sequence[Piece]) -> Fragment:
    """The pieces as one fragment, each at the end of its row of time, so that the last step is in the last column."""
    size, steps = len(pieces), max(map(len, pieces))
    given: dict[str, np.ndarray] = {}
    for name, column in pieces[0].columns.items():
        given[name] = np.zeros((size, steps, *column.shape[1:]), column.dtype)
    valid = np.zeros((size, steps), bool)
    given[columns.TERMINATEDS], given[columns.TRUNCATEDS] = np.zeros((2, size, steps), bool)
    ended, ended_states = [], []
    for i, piece in enumerate(pieces):
        part = slice(steps - len(piece), steps)
        valid[i, part] = True
        for name, column in piece.columns.items():
            given[name][i, part] = column
        if piece.ended:
            given[columns.TERMINATEDS if piece.ended == "terminated" else columns.TRUNCATEDS][i, -1] = True
            ended.append((i, steps - 1, piece.after))
            ended_states.append(piece.states)
    states = {name: np.stack([piece.states[name] for piece in pieces]) for name in pieces[0].states}
    after = np.stack([piece.after for piece in pieces])
    return Fragment(size, steps, given, valid, after, ended, states, ended_states)
