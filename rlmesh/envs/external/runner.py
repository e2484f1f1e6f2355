"""`ExternalEnvRunner`: a runner whose environments are simulators that connect to it."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np

from rlmesh.envs.batches.sample_batch import SampleBatch
from rlmesh.envs.external.episodes import STRETCH, ActedSteps, ExternalEpisode, Piece, fragment_of
from rlmesh.envs.external.spec import EpisodeLost, ExternalEnv, ExternalVector
from rlmesh.envs.runners.env_runner import EnvRunner, is_count
from rlmesh.envs.runners.episode_stats import EpisodeStats
from rlmesh.errors import UsageError

__all__ = ["ExternalEnvRunner"]

logger = logging.getLogger(__name__)

WARN_S = 30.0
"""Time without enough steps after which a warning says how many clients are there."""
CALLS = ("start_episode", "get_action", "log_action", "log_returns", "end_episode")


class ExternalEnvRunner(EnvRunner):
    """Chooses actions for clients, and keeps their steps until they are sampled.

    Methods of clients come on threads of their own. Each step has the log-probability under the weights that chose it.
    An episode of a client that is gone is cut: the step without a result is dropped, and the episode counts as cut.
    """

    def __init__(self, env_creator: ExternalEnv, policy_class: Any, **arguments: Any) -> None:
        self._spec = env_creator
        self._changed = threading.Condition()
        self._clients: set[str] = set()
        self._going_on: dict[tuple[str, str], ExternalEpisode] = {}
        self._pieces: list[Piece] = []
        self._sampling, self._stopped, self._weights_count = False, False, 0
        super().__init__(env_creator, policy_class, **arguments)

    def _vector_of(self, given: Any, num_envs: int, mode: str, restart: bool) -> Any:
        return ExternalVector(self._spec)

    def sample(self, num_steps: int | None = None, *, num_episodes: int | None = None) -> SampleBatch:
        """Wait until clients have made enough steps, and return all of their finished steps.

        Args:
            num_steps: the least number of steps; None: ``rollout_fragment_length``.
            num_episodes: not supported.
        """
        if num_episodes is not None:
            raise UsageError("sample(num_episodes=…): external environments are sampled by num_steps")
        if num_steps is not None and not is_count(num_steps):
            raise UsageError(f"sample: a whole number of at least 1, not {num_steps!r}")
        wanted = self.rollout_fragment_length if num_steps is None else int(num_steps)
        with self._changed:
            self._sampling = True
            self._changed.notify_all()
            try:
                while not self._changed.wait_for(lambda: self._ready() >= wanted or self._stopped, WARN_S):
                    logger.warning(
                        "runner %d waits for external environments: %d of %d steps, %d clients connected",
                        self.worker_index, self._ready(), wanted, len(self._clients),
                    )  # fmt: skip
                if self._stopped:
                    raise UsageError("the runner was stopped while it waited for external environments")
                pieces = self._taken()
            finally:
                self._sampling = False
        return self._finish(fragment_of(pieces))

    def take_stats(self) -> EpisodeStats:
        with self._changed:
            return super().take_stats()

    def set_weights(self, weights: Mapping[str, Any], version: int | None = None) -> None:
        with self._changed:
            super().set_weights(weights, version)
            self._weights_count += 1
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        super().stop()

    def clients(self) -> int:
        """The number of connected clients."""
        return len(self._clients)

    async def attend(self, client: str) -> AsyncIterator[bool]:
        """A stream that lasts as long as a client: when it ends, the episodes of the client are cut."""
        with self._changed:
            self._clients.add(client)
        try:
            yield True
            await asyncio.Event().wait()
        finally:
            self._leave(client)

    def call(self, client: str, method: str, *args: Any) -> Any:
        """A method of a client."""
        if method not in CALLS:
            raise UsageError(f"external environments have no method {method!r}; they have {', '.join(CALLS)}")
        with self._changed:
            if client not in self._clients:
                raise EpisodeLost(f"client {client} is not connected to this runner any more: begin a new episode")
            return getattr(self, f"_{method}")(client, *args)

    def _start_episode(self, client: str, episode_id: str, train: bool) -> None:
        if (client, episode_id) in self._going_on:
            raise UsageError(f"start_episode({episode_id!r}): this episode goes on already")
        self._going_on[client, episode_id] = ExternalEpisode(client, self._next_episode, train)
        self._next_episode += 1

    def _get_action(self, client: str, episode_id: str, observation: Any) -> Any:
        return self._act(client, episode_id, observation, None)

    def _log_action(self, client: str, episode_id: str, observation: Any, action: Any) -> None:
        if not self.action_space.contains(action):
            raise UsageError(f"log_action: {action!r} is not in the action space {self.action_space}")
        self._act(client, episode_id, observation, action)

    def _log_returns(self, client: str, episode_id: str, reward: float) -> None:
        episode = self._find(client, episode_id)
        reward = float(reward)
        if not math.isfinite(reward):
            raise UsageError(f"log_returns({episode_id!r}): the reward is {reward}")
        if not episode.is_open:
            raise UsageError(f"log_returns({episode_id!r}): there was no action yet that the reward could be for")
        episode.reward += reward

    def _end_episode(self, client: str, episode_id: str, observation: Any, truncated: bool) -> None:
        episode = self._find(client, episode_id)
        episode.close_step(self._row(observation))
        del self._going_on[client, episode_id]
        self._pieces += episode.take("truncated" if truncated else "terminated")
        if episode.train and episode.steps:
            self._stats.returns.append(episode.total)
            self._stats.lengths.append(episode.steps)
        self._changed.notify_all()

    def _act(self, client: str, episode_id: str, observation: Any, action: Any) -> Any:
        episode = self._find(client, episode_id)
        row = self._row(observation)
        episode.close_step(row)  # the step is finished, also if this call waits
        self._changed.notify_all()
        self._changed.wait_for(lambda: self._may_act() or self._going_on.get((client, episode_id)) is not episode)
        if self._stopped or self._going_on.get((client, episode_id)) is not episode:
            raise EpisodeLost(
                f"episode {episode_id!r} was cut: {'the job ends' if self._stopped else 'its client left'}"
            )
        if episode.stretch is None or not episode.stretch.fits(self._weights_count):
            self._pieces += episode.take()
            explorer = self.policy.explorer(STRETCH, 1, explore=self.explore)
            explorer.go_on(episode.stretch.explorer.states if episode.stretch is not None else {})
            episode.stretch = ActedSteps(explorer, self._empty(STRETCH), self._weights_count)
        stretch = episode.stretch
        stretch.obs[stretch.count] = row
        sent = stretch.explorer.act(stretch.count, row[None])
        if action is not None:
            self._require_own_units(stretch, action, sent)
            stretch.explorer.actions[0, stretch.count] = action
        episode.open_step()
        chosen = np.array(sent[0])
        return chosen.item() if chosen.ndim == 0 else chosen

    def _require_own_units(self, stretch: ActedSteps, action: Any, sent: np.ndarray) -> None:
        """Refuse actions of a client where batches have other units than the environment, as those of SAC and TD3."""
        distribution = getattr(getattr(self.policy, "module", None), "distribution", None)
        if distribution is None:
            return
        as_sent = distribution.to_env(np.asarray(action, self.action_space.dtype)[None])
        if not np.array_equal(as_sent[0], action):
            raise UsageError("log_action: batches of this algorithm have scaled actions; it learns from its own only")

    def _may_act(self) -> bool:
        return self._stopped or (self.has_weights and (self._sampling or not self._spec.wait_for_learner))

    def _find(self, client: str, episode_id: str) -> ExternalEpisode:
        episode = self._going_on.get((client, episode_id))
        if episode is None:
            raise EpisodeLost(f"there is no episode {episode_id!r}: it has ended or was cut; begin a new one")
        return episode

    def _row(self, observation: Any) -> np.ndarray:
        """A copy of an observation as a row; refuses other shapes, and numbers that are not finite."""
        row = self._empty(1)
        self._vector.rows.write(row, 0, observation)
        if row.dtype.kind == "f" and not np.isfinite(row).all():
            raise UsageError("an observation has a number that is NaN or infinite")
        only: np.ndarray = row[0]
        return only

    def _ready(self) -> int:
        return sum(map(len, self._pieces)) + sum(episode.ready for episode in self._going_on.values())

    def _taken(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        for episode in self._going_on.values():
            pieces += episode.take()
        return pieces

    def _leave(self, client: str) -> None:
        """Cut the episodes of a client that is gone."""
        with self._changed:
            self._clients.discard(client)
            for key in [key for key in self._going_on if key[0] == client]:
                episode = self._going_on.pop(key)
                self._pieces += episode.take()
                self._stats.cut += episode.train and episode.steps > 0
            self._changed.notify_all()
