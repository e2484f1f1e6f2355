"""The episodes of several agents: who acts, which results belong to which action, and when each agent's part ends."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from typing import Any

import numpy as np

from rlmesh.envs.batches.multi_agent_batch import MultiAgentBatch
from rlmesh.envs.environments.local_vector import EMPTY_INFO
from rlmesh.envs.environments.registry import did_you_mean
from rlmesh.envs.environments.step_checks import reward_of
from rlmesh.envs.multi_agent.connectors import AgentConnectors
from rlmesh.envs.multi_agent.environment import ALL
from rlmesh.envs.multi_agent.policies import AgentEpisode, PolicyMapping
from rlmesh.envs.multi_agent.rows import AgentTrack, PolicyRows
from rlmesh.envs.runners.episode_stats import EpisodeStats
from rlmesh.errors import UsageError

__all__ = ["EpisodeBook"]

IDLE_STEPS = 10_000
"""Steps in a row in which no agent acts, after which an environment counts as one that never ends."""
StepResults = tuple[Mapping[Any, Any], Mapping[Any, Any], Mapping[Any, Any], Mapping[Any, Any], Mapping[Any, Any]]


class EpisodeBook:
    """The episodes that go on in the environments of a runner, and the rows of their agents.

    Args:
        rows: rows by policy.
        mapping: chooses the policy of an agent.
        size: number of environments.
        first_id: the first number of a trajectory.
        runner: the runner, for the mapping and for error texts.
        connectors: of the policies.
        infos: keep infos.
        known: the agents that may take part; empty if the environment does not name them.

    Attributes:
        running: the episode of each environment; None: it must be begun.
    """

    def __init__(
        self, rows: Mapping[str, PolicyRows], mapping: PolicyMapping, size: int, first_id: int, runner: Any,
        connectors: AgentConnectors, *, infos: bool, known: Collection[Any] = (),
    ) -> None:  # fmt: skip
        self._known = frozenset(known)
        self.rows, self.mapping, self._runner, self._infos = dict(rows), mapping, runner, infos
        self.running: list[RunningEpisode | None] = [None] * size
        self._next_id, self._connectors = first_id, connectors

    def clear(self) -> None:
        """Forget all rows whose results are missing."""
        for rows in self.rows.values():
            rows.clear()

    def begin(self, i: int, observations: Mapping[Any, Any]) -> None:
        """Begin an episode in environment i with its first observations."""
        self.running[i] = running = RunningEpisode(self._new_id(), i)
        for agent_id, observation in observations.items():
            running.ready.append(self._join(running, agent_id, observation))

    def act(self, environments: Iterable[int], *, explore: bool) -> None:
        """Choose the actions of all agents whose turn it is, each policy's at once."""
        waiting: dict[str, list[AgentTrack]] = {}
        for i in environments:
            for track in self._of(i).ready:
                waiting.setdefault(track.policy_id, []).append(track)
        for policy_id, tracks in waiting.items():
            self.rows[policy_id].act(tracks, explore=explore)

    def actions(self, i: int) -> dict[Any, Any]:
        """The actions for environment i, by agent."""
        return {track.agent_id: track.action for track in self._of(i).ready}

    def add(self, i: int, results: StepResults, stats: EpisodeStats) -> bool:
        """Take in the results of a step of environment i; True if its episode has ended.

        Raises:
            UsageError: the environment broke a rule of `MultiAgentEnv`.
            FloatingPointError: a reward or an observation is NaN or infinite.
        """
        observations, rewards, terminateds, truncateds, infos = results
        if ALL not in terminateds:
            raise UsageError(f"{self._place(i)}: terminateds has no key {ALL!r}, which says if the episode is over")
        running = self._of(i)
        running.length += 1
        stats.env_steps += 1
        self._add_rewards(i, running, rewards)
        over, cut_off = bool(terminateds[ALL]), bool(truncateds.get(ALL, False))
        ready = []
        for track in list(running.tracks.values()):
            agent_id = track.agent_id
            if track.done:
                if agent_id in observations:
                    raise UsageError(f"{self._place(i)}: agent {agent_id!r} was done, and has an observation again")
                continue
            terminated, truncated = bool(terminateds.get(agent_id)), bool(truncateds.get(agent_id))
            if not (terminated or truncated):
                terminated, truncated = over, cut_off and not over
            there = agent_id in observations
            if not (terminated or truncated or there):
                continue
            if there:
                track.observation = self._row(i, track, observations[agent_id], is_last=terminated or truncated)
            elif not terminated and track.row >= 0:
                raise UsageError(
                    f"{self._place(i)}: agent {agent_id!r} was truncated without an observation of it: return its last "
                    "one, from which the value after its last step is estimated"
                )
            if track.row >= 0:
                info = deepcopy(infos.get(agent_id) or EMPTY_INFO) if self._infos else None
                self.rows[track.policy_id].close(track, terminated=terminated, truncated=truncated, info=info)
                stats.agent_steps += 1
            if terminated or truncated:
                track.done = True
                self.rows[track.policy_id].end(track)
            else:
                ready.append(track)
        for agent_id, observation in observations.items():
            if agent_id not in running.tracks:
                if over or cut_off or terminateds.get(agent_id) or truncateds.get(agent_id):
                    continue  # it came and went without an action
                ready.append(self._join(running, agent_id, observation))
        running.ready = ready
        running.idle = 0 if ready else running.idle + 1
        if over or cut_off:
            self._count(running, stats)
            self.running[i] = None
            return True
        if running.idle > IDLE_STEPS:
            raise UsageError(
                f"{self._place(i)}: no agent has acted for {IDLE_STEPS} steps, and the episode is not over"
            )
        return False

    def cut(self, i: int, stats: EpisodeStats) -> None:
        """End the episode of environment i, which broke: actions without results leave no rows."""
        for track in self._of(i).tracks.values():
            if not track.done:
                self.rows[track.policy_id].drop(track)
        stats.cut += 1
        self.running[i] = None

    def take(self, env_steps: int, *, new_obs: bool) -> MultiAgentBatch:
        """All rows that have their results."""
        live: dict[str, list[AgentTrack]] = {name: [] for name in self.rows}
        for running in self.running:
            for track in running.tracks.values() if running is not None else ():
                if not track.done:
                    live[track.policy_id].append(track)
        parts = {name: rows.take(live[name], new_obs=new_obs) for name, rows in self.rows.items()}
        return MultiAgentBatch({name: part for name, part in parts.items() if part is not None}, env_steps)

    def get_state(self) -> dict[str, Any]:
        """The episodes that go on, and the rows that wait for their results."""
        rows = {name: rows.get_state() for name, rows in self.rows.items()}
        return {"running": deepcopy(self.running), "rows": rows}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take over a state of `get_state`."""
        self.running = deepcopy(state["running"])
        for name, rows in state["rows"].items():
            self.rows[name].set_state(rows)

    def counters(self) -> dict[str, Any]:
        """The next number of a trajectory."""
        return {"next_id": self._next_id}

    def set_counters(self, counters: Mapping[str, Any]) -> None:
        """Take over counters of `counters`."""
        self._next_id = counters["next_id"]

    def _of(self, i: int) -> RunningEpisode:
        running = self.running[i]
        assert running is not None
        return running

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _join(self, running: RunningEpisode, agent_id: Any, observation: Any) -> AgentTrack:
        policy_id = self.mapping(agent_id, running, self._runner)
        track = AgentTrack(agent_id, policy_id, len(running.tracks), self._new_id(), np.zeros(0))
        if self._connectors:
            alive = (each for other in self.running if other is not None for each in other.tracks.values())
            taken = {each.place for each in alive if each.policy_id == policy_id and not each.done}
            track.place = self._connectors.free_place(policy_id, taken)
        track.observation = self._row(running.env_id, track, observation, is_first=True)
        track.total = running.early.pop(agent_id, 0.0)
        running.tracks[agent_id] = track
        running.policies[agent_id] = policy_id
        return track

    def _row(
        self, i: int, track: AgentTrack, observation: Any, *, is_first: bool = False, is_last: bool = False
    ) -> np.ndarray:
        """An observation of an agent, as its policy gets it."""
        form = self.rows[track.policy_id].observations
        row = form.empty(1)
        form.write(row, 0, observation)
        # The sum is the cheaper check; it may overflow though all elements are finite.
        if row.dtype.kind == "f" and not math.isfinite(row.sum()) and not np.isfinite(row).all():
            raise FloatingPointError(
                f"{self._place(i)} gave agent {track.agent_id!r} an observation with NaN or infinity"
            )
        if self._connectors and is_last:
            row = self._connectors.last(track.policy_id, track.place, row)
        elif self._connectors:
            row = self._connectors.observe(track.policy_id, track.place, row, first=is_first)
        found: np.ndarray = row[0]
        return found

    def _add_rewards(self, i: int, running: RunningEpisode, rewards: Mapping[Any, Any]) -> None:
        for agent_id, given in rewards.items():
            reward = reward_of(given, self._place(i))
            if not math.isfinite(reward):
                raise FloatingPointError(f"{self._place(i)} gave agent {agent_id!r} the reward {reward}")
            track = running.tracks.get(agent_id)
            if track is None and self._known and agent_id not in self._known:
                raise UsageError(
                    f"{self._place(i)} returned a reward for {agent_id!r}, which is none of its agents."
                    + did_you_mean(str(agent_id), map(str, self._known))
                )
            if track is None:
                running.early[agent_id] = running.early.get(agent_id, 0.0) + reward
            elif track.done and reward:
                raise UsageError(f"{self._place(i)}: agent {agent_id!r} was done, and has a reward again")
            else:
                track.total += reward
                if track.row >= 0:
                    track.reward += reward

    def _count(self, running: RunningEpisode, stats: EpisodeStats) -> None:
        tracks = running.tracks.values()
        stats.returns.append(sum(track.total for track in tracks) + sum(running.early.values()))
        stats.lengths.append(running.length)
        stats.of_agents.append({str(track.agent_id): (track.policy_id, track.total) for track in tracks})

    def _place(self, i: int) -> str:
        return f"environment {i} of runner {self._runner.worker_index}"


class RunningEpisode(AgentEpisode):
    """The episode of one environment.

    Attributes:
        tracks: its agents, by their ids; those that are done too.
        ready: agents that act next.
        length: number of steps.
        idle: number of steps since an agent acted.
        early: rewards of agents that have not observed yet.
    """

    def __init__(self, episode_id: int, env_id: int) -> None:
        super().__init__(episode_id, env_id)
        self.tracks: dict[Any, AgentTrack] = {}
        self.ready: list[AgentTrack] = []
        self.length = self.idle = 0
        self.early: dict[Any, float] = {}
