"""Rows of one policy: the steps of all its agents, while their results arrive."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlmesh.envs.batches import columns
from rlmesh.envs.batches.sample_batch import SampleBatch
from rlmesh.envs.environments.actions import ActionRows
from rlmesh.envs.environments.observations import ObservationRows
from rlmesh.envs.modules.policy import Explorer, Policy, States
from rlmesh.envs.runners.fragments import Fragment

__all__ = ["AgentFragment", "AgentTrack", "PolicyRows"]

EXPLORER_STEPS = 32
"""Steps for which an explorer is made, for each number of agents that act together."""
OPEN, CLOSED, DROPPED = 0, 1, 2


@dataclass(slots=True)
class AgentTrack:
    """One agent in one episode.

    Attributes:
        agent_id, policy_id: the agent, and the policy that it has in this episode.
        index: place of the agent among the agents of the episode.
        eps_id: number of this trajectory, unique over all runners.
        observation: the last one, as a row, as the policy gets it.
        t: number of actions so far.
        row: place of the row that waits for its result; -1: none.
        reward: sum of the rewards since the last action.
        total: sum of all rewards.
        action: the last action, as the environment takes it.
        done: True once the agent is terminated or truncated.
        state: of a recurrent policy, after the last action; empty: the initial one.
        before: of a recurrent policy, the state before the last action.
        place: number of the agent's pipeline of connectors among those of the policy.
    """

    agent_id: Any
    policy_id: str
    index: int
    eps_id: int
    observation: np.ndarray
    t: int = 0
    row: int = -1
    reward: float = 0.0
    total: float = 0.0
    action: Any = None
    done: bool = False
    state: States = field(default_factory=dict)
    before: States = field(default_factory=dict)
    place: int = -1

    def state_of_observation(self) -> States:
        """The state before the last observation, which an open row belongs to."""
        return self.state if self.row < 0 else self.before


class AgentFragment(Fragment):
    """The trajectories of several agents, one after the other, as if one environment had made them."""

    def goes_on(self) -> np.ndarray:
        """True where the next row is the next step of the same trajectory, ``[1, rows]``."""
        result = super().goes_on()
        eps_id = self.columns[columns.EPS_ID]
        result[:, :-1] &= eps_id[:, 1:] == eps_id[:, :-1]
        return result


class PolicyRows:
    """Rows of one policy, in the order of its actions. A row is open until its agent observes again or is done.

    Args:
        policy: acts.
        rows: form of observations, as the environment gives them.
        infos: keep infos.
        rewards_of: the rewards that the policy learns from, ``[time]``, of those of an agent with this ``place``; None:
            the environment's.
    """

    def __init__(
        self, policy: Policy, rows: ObservationRows, *, infos: bool,
        rewards_of: Callable[[int, np.ndarray], np.ndarray] | None = None,
    ) -> None:  # fmt: skip
        self.policy, self.observations, self.actions = policy, rows, ActionRows(policy.action_space)
        self._rewards_of = rewards_of
        self._infos = infos
        self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self.count = 0
        self._state = np.zeros(0, np.int8)
        self._columns: dict[str, np.ndarray] = {}
        self._explorers: dict[int, tuple[Explorer, list[slice]]] = {}
        self._last: dict[int, tuple[np.ndarray, States, int]] = {}

    def act(self, tracks: Sequence[AgentTrack], *, explore: bool) -> None:
        """Choose actions for agents, and open a row for each of them."""
        number, first = len(tracks), self.count
        observations = np.stack([track.observation for track in tracks])
        explorer, places = self._explorers.get(number) or self._new_explorer(number, explore=explore)
        explorer.go_on_with([track.state for track in tracks])
        before = [explorer.state_of(i) for i in range(number)] if explorer.states else None
        sent = self.actions.to_env(explorer.act(len(places), observations))
        places.append(slice(first, first + number))
        self._grow(first + number)
        self.count += number
        self._put(columns.OBS, slice(first, self.count), observations)
        self._put(columns.EPS_ID, slice(first, self.count), np.array([track.eps_id for track in tracks]))
        self._put(columns.T, slice(first, self.count), np.array([track.t for track in tracks]))
        self._put(columns.AGENT_INDEX, slice(first, self.count), np.array([track.index for track in tracks]))
        self._state[first : self.count] = OPEN
        for i, track in enumerate(tracks):
            track.row, track.action = first + i, sent[i]
            if before is not None:
                track.before, track.state = before[i], explorer.state_of(i)
            track.t += 1
        if len(places) == EXPLORER_STEPS:
            self._flush(number)

    def close(self, track: AgentTrack, *, terminated: bool, truncated: bool, info: Any = None) -> None:
        """Give an agent's open row its results."""
        row = track.row
        self._put(columns.REWARDS, slice(row, row + 1), np.array([track.reward], np.float32))
        self._put(columns.TERMINATEDS, slice(row, row + 1), np.array([terminated]))
        self._put(columns.TRUNCATEDS, slice(row, row + 1), np.array([truncated]))
        if self._infos:
            object_row = np.empty(1, object)
            object_row[0] = info
            self._put(columns.INFOS, slice(row, row + 1), object_row)
        self._state[row] = CLOSED
        track.row, track.reward = -1, 0.0

    def end(self, track: AgentTrack) -> None:
        """Note the last observation of a trajectory, the state before it, and the agent's connectors."""
        self._last[track.eps_id] = track.observation, track.state_of_observation(), track.place

    def drop(self, track: AgentTrack) -> None:
        """Leave out an agent's open row, whose result never comes. The trajectory ends with its observation."""
        self.end(track)
        if track.row >= 0:
            self._state[track.row] = DROPPED
            track.row = -1

    def take(self, tracks: Sequence[AgentTrack], *, new_obs: bool) -> SampleBatch | None:
        """The closed rows as a batch, trajectory after trajectory; None if there are none. Open rows stay.

        Args:
            tracks: the agents of this policy whose trajectories go on.
            new_obs: add the column ``new_obs``.
        """
        for number in list(self._explorers):
            self._flush(number)
        for track in tracks:
            self._last.setdefault(track.eps_id, (track.observation, track.state_of_observation(), track.place))
        state = self._state[: self.count]
        closed, opened = np.flatnonzero(state == CLOSED), np.flatnonzero(state == OPEN)
        batch = self._batch(closed, new_obs=new_obs) if len(closed) else None
        self._columns = {name: column[opened] for name, column in self._columns.items()}
        self._state, self.count, self._last = self._state[opened], len(opened), {}
        places = {int(row): place for place, row in enumerate(opened)}
        for track in tracks:
            if track.row >= 0:
                track.row = places[track.row]
        return batch

    def _batch(self, closed: np.ndarray, *, new_obs: bool) -> SampleBatch:
        ids, times = self._columns[columns.EPS_ID][closed], self._columns[columns.T][closed]
        order = closed[np.lexsort((times, ids))]
        given = {name: column[order][None] for name, column in self._columns.items()}
        ids = given[columns.EPS_ID][0]
        ends = [*np.flatnonzero(ids[1:] != ids[:-1]).tolist(), len(ids) - 1]
        lasts = [self._last[int(ids[end])] for end in ends]
        ended = [(0, end, last) for end, (last, _, _) in zip(ends, lasts, strict=True)]
        states = [state for _, state, _ in lasts]
        if self._rewards_of is not None:
            self._change_rewards(given, self._rewards_of, ends, [place for _, _, place in lasts])
        fragment = AgentFragment(
            1, len(ids), given, np.ones((1, len(ids)), bool), ended[-1][2][None], ended,
            {name: each[None] for name, each in states[-1].items()}, states,
        )  # fmt: skip
        if new_obs:
            fragment.add_new_obs()
        self.policy.postprocess_fragment(fragment)
        return fragment.to_batch()

    def _change_rewards(
        self, given: dict[str, np.ndarray], rewards_of: Callable[[int, np.ndarray], np.ndarray], ends: list[int],
        places: list[int],
    ) -> None:  # fmt: skip
        """Let connectors change the rewards of each trajectory; those of the environment stay in ``env_rewards``."""
        own = given[columns.REWARDS][0]
        parts = np.split(own, np.array(ends[:-1], np.int64) + 1)
        changed = [rewards_of(place, part) for place, part in zip(places, parts, strict=True)]
        if any(one is not other for one, other in zip(changed, parts, strict=True)):
            joined = np.concatenate(changed).astype(np.float32)
            given[columns.ENV_REWARDS], given[columns.REWARDS] = given[columns.REWARDS], joined[None]

    def _new_explorer(self, number: int, *, explore: bool) -> tuple[Explorer, list[slice]]:
        self._explorers[number] = (self.policy.explorer(EXPLORER_STEPS, number, explore=explore), [])
        return self._explorers[number]

    def _flush(self, number: int) -> None:
        """Write what an explorer has collected to the rows of its steps."""
        explorer, places = self._explorers.pop(number)
        for name, column in explorer.columns().items():
            for time, place in enumerate(places):
                self._put(name, place, column[:, time])

    def _grow(self, needed: int) -> None:
        if needed > len(self._state):
            size = max(needed, 2 * len(self._state), 64)
            self._state = _grown(self._state, size)
            self._columns = {name: _grown(column, size) for name, column in self._columns.items()}

    def _put(self, name: str, place: slice, values: np.ndarray) -> None:
        if name not in self._columns:
            self._columns[name] = np.zeros((len(self._state), *values.shape[1:]), values.dtype)
        self._columns[name][place] = values

    def get_state(self) -> dict[str, Any]:
        """The open rows."""
        return {"columns": {name: column[: self.count].copy() for name, column in self._columns.items()},
                "count": self.count}  # fmt: skip

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take over a state of `get_state`."""
        self.clear()
        self.count = state["count"]
        self._state = np.full(self.count, OPEN, np.int8)
        self._columns = {name: column.copy() for name, column in state["columns"].items()}


def _grown(column: np.ndarray, size: int) -> np.ndarray:
    larger = np.zeros((size, *column.shape[1:]), column.dtype)
    larger[: len(column)] = column
    return larger
