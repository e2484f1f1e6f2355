"""`ExternalEnvRunner`: a runner whose environments are simulators that connect to it."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import numpy as np

from rlmesh.envs.batches.sample_batch import SampleBatch
from rlmesh.envs.connectors.connector import Connector
from rlmesh.envs.external.connectors import EpisodeConnectors
from rlmesh.envs.external.episodes import STRETCH, ActedSteps, ExternalEpisode, Piece, fragment_of
from rlmesh.envs.external.spec import EpisodeLost, ExternalEnv, ExternalVector
from rlmesh.envs.modules.numpy_policy import NumpyPolicy
from rlmesh.envs.runners.base import is_count
from rlmesh.envs.runners.env_runner import EnvRunner
from rlmesh.envs.runners.episode_stats import EpisodeStats
from rlmesh.errors import CallTimeout, UsageError

__all__ = ["ExternalEnvRunner"]

logger = logging.getLogger(__name__)

WARN_S = 30.0
"""Time without enough steps after which a warning says how many clients are there."""
IN_TIME = 0.95
"""Share of ``sample_timeout_s`` after which `sample` gives up."""
CALLS = ("start_episode", "get_action", "log_action", "log_returns", "end_episode")


class ExternalEnvRunner(EnvRunner):
    """Chooses actions for clients, and keeps their steps until they are sampled.

    Methods of clients come on threads of their own. Each step has the log-probability under the weights that chose it.
    An episode of a client that is gone is cut: the step without a result is dropped, and the episode counts as cut.
    Each episode has connectors of its own, which share their statistics. They process an observation when it
    arrives, even if its action has to wait for new weights.
    """

    connectors: EpisodeConnectors

    def __init__(
        self, env_creator: ExternalEnv, policy_class: Any, *, sample_timeout_s: float | None = None, **arguments: Any
    ) -> None:  # fmt: skip
        self._spec = env_creator
        self._changed = threading.Condition()
        self._clients: dict[str, object] = {}
        self._going_on: dict[tuple[str, str], ExternalEpisode] = {}
        self._pieces: list[Piece] = []
        self._sampling, self._stopped, self._weights_count = False, False, 0
        self._timeout_s = sample_timeout_s
        super().__init__(env_creator, policy_class, **arguments)

    def _vector_of(self, given: Any, num_envs: int, mode: str, restart: bool) -> Any:
        return ExternalVector(self._spec)

    def _connectors_of(self, connectors: Iterable[Connector], space: Any, learn: bool) -> EpisodeConnectors:
        return EpisodeConnectors(connectors, space, learn=learn, lock=self._changed)

    def sample(self, num_steps: int | None = None, *, num_episodes: int | None = None) -> SampleBatch:
        """Wait until clients have made enough steps, and return all of their finished steps.

        Args:
            num_steps: the least number of steps; None: ``rollout_fragment_length``.
            num_episodes: not supported.

        Raises:
            CallTimeout: there were not enough steps in time; those that are there are in the next batch.
        """
        if num_episodes is not None:
            raise UsageError("sample(num_episodes=…): external environments are sampled by num_steps")
        if num_steps is not None and not is_count(num_steps):
            raise UsageError(f"sample: a whole number of at least 1, not {num_steps!r}")
        wanted = self.rollout_fragment_length if num_steps is None else int(num_steps)
        # Before the caller gives up: otherwise the next steps would be taken for nobody.
        ends = math.inf if self._timeout_s is None else time.monotonic() + IN_TIME * self._timeout_s
        with self._changed:
            self._sampling = True
            self._changed.notify_all()
            try:
                while not self._changed.wait_for(
                    lambda: self._ready() >= wanted or self._stopped, max(0.0, min(WARN_S, ends - time.monotonic()))
                ):
                    state = (
                        f"runner {self.worker_index} waits for external environments: {self._ready()} of {wanted} "
                        f"steps, {len(self._clients)} clients connected"
                    )
                    if time.monotonic() >= ends:
                        raise CallTimeout(f"{state}; their steps stay. Connect simulators, or set sample_timeout_s")
                    logger.warning("%s", state)
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
        attendance = object()
        with self._changed:
            self._clients[client] = attendance
        try:
            yield True
            await asyncio.Event().wait()
        finally:
            if self._clients.get(client) is attendance:  # otherwise the client has a newer stream
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
        pipeline = self.connectors.begin(learn=train) if self.connectors else None
        self._going_on[client, episode_id] = ExternalEpisode(client, self._next_episode, train, pipeline)
        self._next_episode += 1

    def _get_action(self, client: str, episode_id: str, turn: int, observation: Any) -> Any:
        return self._act(client, episode_id, turn, observation, None)

    def _log_action(self, client: str, episode_id: str, turn: int, observation: Any, action: Any) -> None:
        if not self.action_space.contains(action):
            raise UsageError(f"log_action: {action!r} is not in the action space {self.action_space}")
        self._require_own_units(action)
        self._act(client, episode_id, turn, observation, action)

    def _log_returns(self, client: str, episode_id: str, turn: int, reward: float) -> None:
        episode = self._find(client, episode_id)
        if turn == episode.turn:
            raise UsageError(
                f"log_returns({episode_id!r}): the last request for an action had no answer; repeat it first, or tell "
                "by log_action what the simulator did then"
            )
        reward = float(reward)
        if not math.isfinite(reward):
            raise UsageError(f"log_returns({episode_id!r}): the reward is {reward}")
        if not episode.is_open:
            raise UsageError(f"log_returns({episode_id!r}): there was no action yet that the reward could be for")
        episode.reward += reward

    def _end_episode(self, client: str, episode_id: str, turn: int, observation: Any, truncated: bool) -> None:
        episode = self._find(client, episode_id)
        row = self._row(observation)
        if turn == episode.turn:  # the client has no answer to its last request
            self._require_asked(episode, episode_id, row)
            truncated = True  # an observation that an action was asked for does not end an episode
            if episode.is_open:
                episode.withdraw_step()
        episode.close_last_step(row)
        del self._going_on[client, episode_id]
        self._pieces += episode.take("truncated" if truncated else "terminated", last=True)
        self._give_back(episode)
        if episode.train and episode.steps:
            self._stats.returns.append(episode.total)
            self._stats.lengths.append(episode.steps)
        self._changed.notify_all()

    def _act(self, client: str, episode_id: str, turn: int, observation: Any, action: Any) -> Any:
        """The answer to a request for an action; a repeated request gets the same action, even if it was not answered.

        Args:
            turn: number of the request in its episode, from 1.
            action: the client's own; None: the policy chooses it.
        """
        episode = self._find(client, episode_id)
        row = self._row(observation)
        if turn == episode.turn:
            self._require_asked(episode, episode_id, row)
            if episode.is_open and action is None:
                return episode.answer
            if episode.is_open:  # the client did not wait any longer, and did something of its own
                self._note_own(episode, action)
                return None
        else:
            seen = episode.observed(row)
            episode.close_step(seen)  # the step is finished, even if this call waits
            episode.turn, episode.asked, episode.seen = turn, row, seen
        waits = episode.waits = object()
        self._changed.notify_all()
        key = (client, episode_id)
        self._changed.wait_for(
            lambda: self._may_act() or episode.waits is not waits or self._going_on.get(key) is not episode
        )
        if self._stopped or self._going_on.get(key) is not episode:
            raise EpisodeLost(
                f"episode {episode_id!r} was cut: {'the job ends' if self._stopped else 'its client left'}"
            )
        if episode.waits is not waits:
            raise UsageError(f"a later call asks for the action of episode {episode_id!r}; this one has ended")
        if episode.stretch is None or not episode.stretch.fits(self._weights_count):
            self._pieces += episode.take(last=True)
            explorer = self.policy.explorer(STRETCH, 1, explore=self.explore)
            explorer.go_on(episode.stretch.explorer.states if episode.stretch is not None else {})
            episode.stretch = ActedSteps(explorer, self._empty(STRETCH), self._weights_count)
        stretch = episode.stretch
        assert episode.seen is not None
        stretch.obs[stretch.count] = episode.seen
        sent = np.array(stretch.explorer.act(stretch.count, episode.seen[None])[0])
        episode.answer, episode.waits = sent.item() if sent.ndim == 0 else sent, None
        episode.open_step()
        if action is not None:
            self._note_own(episode, action)
        self._changed.notify_all()
        return episode.answer

    def _note_own(self, episode: ExternalEpisode, action: Any) -> None:
        """Put the client's action in the place of the chosen one."""
        assert episode.stretch is not None
        episode.stretch.explorer.actions[0, episode.stretch.count - 1] = action
        episode.answer = action

    def _require_own_units(self, action: Any) -> None:
        """Refuse actions of a client where batches have other units than the environment, as those of SAC and TD3."""
        if isinstance(self.policy, NumpyPolicy):  # its actions have the units of the environment
            return
        distribution = getattr(getattr(self.policy, "module", None), "distribution", None)
        if distribution is None:
            return
        as_sent = distribution.to_env(np.asarray(action, self.action_space.dtype)[None])
        if not np.array_equal(as_sent[0], action):
            raise UsageError("log_action: batches of this algorithm have scaled actions; it learns from its own only")

    def _require_asked(self, episode: ExternalEpisode, episode_id: str, row: np.ndarray) -> None:
        """Refuse another observation than that of the request that had no answer."""
        if episode.asked is None or not np.array_equal(row, episode.asked):
            raise UsageError(
                f"episode {episode_id!r}: the last request for an action had no answer, and its observation was "
                "another one. Repeat it with its observation, or tell by log_action what the simulator did then"
            )

    def _may_act(self) -> bool:
        return self._stopped or (self.has_weights and (self._sampling or not self._spec.wait_for_learner))

    def _find(self, client: str, episode_id: str) -> ExternalEpisode:
        episode = self._going_on.get((client, episode_id))
        if episode is None:
            raise EpisodeLost(f"there is no episode {episode_id!r}: it has ended or was cut; begin a new one")
        return episode

    def _row(self, observation: Any) -> np.ndarray:
        """A copy of an observation as a row; refuses other shapes, and numbers that are not finite."""
        row = self._vector.rows.empty(1)
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

    def _give_back(self, episode: ExternalEpisode) -> None:
        if episode.pipeline is not None:
            self.connectors.end(episode.pipeline)
            episode.pipeline = None

    def _leave(self, client: str) -> None:
        """Cut the episodes of a client that is gone."""
        with self._changed:
            self._clients.pop(client, None)
            for key in [key for key in self._going_on if key[0] == client]:
                episode = self._going_on.pop(key)
                self._pieces += episode.take(last=True)
                self._give_back(episode)
                self._stats.cut += episode.train and episode.steps > 0
            self._changed.notify_all()
