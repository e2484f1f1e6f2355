"""`EnvRunner`: steps its environments with its policy and returns batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from rlmesh.envs.batches import columns
from rlmesh.envs.batches.sample_batch import SampleBatch
from rlmesh.envs.connectors.connector import Connector, ConnectorPipeline
from rlmesh.envs.environments.features import SEQUENCE_LENGTH
from rlmesh.envs.environments.gym_vector import GymVector
from rlmesh.envs.environments.local_vector import LocalVector
from rlmesh.envs.environments.registry import EnvCreator, did_you_mean, env_creator_of
from rlmesh.envs.modules.policy import Policy, States
from rlmesh.envs.multi_agent.pettingzoo_env import multi_agent_env_of
from rlmesh.envs.runners.base import (
    DEFAULT_POLICY,
    LongEpisodes,
    RunnerBase,
    require_one,
    warn_of_other_environments,
)
from rlmesh.envs.runners.buffers import ArrayPool
from rlmesh.envs.runners.episode_stats import EpisodeStats
from rlmesh.envs.runners.fragments import Fragment
from rlmesh.errors import UsageError

__all__ = ["EnvRunner", "RolloutWorker"]

logger = logging.getLogger(__name__)

KEPT = ("_obs", "_raw", "_eps_id", "_t", "_returns", "_states")
"""Arrays of a runner's state, if its environments can be pickled."""
CONNECTORS = "__connectors__"
"""Key of the connectors' shared state among the weights."""
EPISODE_CHUNK = 64
"""Time steps between two looks at the number of finished episodes, when episodes are asked for."""
VECTORIZE_MODES = ("local", "sync", "async", "vector_entry_point", "envpool")


class EnvRunner(RunnerBase):
    """Environments and a policy in this process: `sample` steps all environments with one forward pass per step.

    Args:
        env_creator: a registered name, a Gymnasium id, a class, or a function of an `EnvContext` that returns a
            Gymnasium environment or vector environment.
        policy_class: class of the policy, called with observation space, action space and ``policy_config``.
        env_config: passed to the creator.
        num_envs: number of environments; a vector environment has its own number.
        rollout_fragment_length: steps of each environment of a `sample()` without arguments.
        seed: seeds environments (each with a seed of its own) and policy; None: unseeded.
        worker_index, num_workers: number of this runner, and of all remote ones.
        start: how often this runner was restarted; new starts get new seeds and episode ids.
        new_obs, infos: collect these columns.
        explore: sample actions; False takes the most probable ones.
        restart_failed_sub_environments: an environment that raises is made again; False: its error is raised.
        vectorize_mode: ``local`` steps environments in this process; ``envpool`` takes the environments of EnvPool; the
            others are those of ``gymnasium.make_vec``, for ids of Gymnasium.
        connectors: change observations and rewards on their way to the policy; see `rlmesh.envs.connectors`.
        learn_connectors: False leaves the statistics of connectors as they are.
        max_sequence_length: room for elements of Sequence and Graph observations; see `ObservationRows`.

    Raises:
        UsageError: arguments or spaces that cannot work.
    """

    def __init__(
        self, env_creator: str | type | EnvCreator, policy_class: type[Policy], *,
        policy_config: Mapping[str, Any] | None = None, env_config: Mapping[str, Any] | None = None, num_envs: int = 1,
        rollout_fragment_length: int = 200, seed: int | None = None, worker_index: int = 0, num_workers: int = 0,
        start: int = 0, new_obs: bool = True, infos: bool = True, explore: bool = True,
        restart_failed_sub_environments: bool = True, vectorize_mode: str = "local",
        connectors: Iterable[Connector] = (), learn_connectors: bool = True,
        max_sequence_length: int = SEQUENCE_LENGTH,
    ) -> None:  # fmt: skip
        super().__init__(
            num_envs=num_envs, rollout_fragment_length=rollout_fragment_length, seed=seed, worker_index=worker_index,
            num_workers=num_workers, start=start, env_config=env_config,
        )  # fmt: skip
        self._new_obs, self._infos, self.explore = new_obs, infos, explore
        self._max_length = max_sequence_length
        self._vector = self._vector_of(env_creator, num_envs, vectorize_mode, restart_failed_sub_environments)
        self.num_envs = self._vector.size
        spaces = self._vector.rows.space
        self.connectors = self._connectors_of(connectors, spaces, learn_connectors)
        config = self._with_seeds(dict(policy_config or {}), seed)
        self.policy = policy_class(self.observation_space, self._vector.action_space, config)
        self.policy_map: dict[str, Policy] = {DEFAULT_POLICY: self.policy}
        self._obs, self._raw = self._empty(self.num_envs), self._vector.rows.empty(self.num_envs)
        self._states: States = {}  # of a recurrent policy; those of the beginning, if empty
        self._pool = ArrayPool()
        self._counted = (0, 0)  # episodes and cuts before the fragment of now
        self._obs_known, self._next_episode = False, self._first_id
        self._eps_id = np.zeros(self.num_envs, np.int64)
        self._t = np.zeros(self.num_envs, np.int64)
        self._returns = np.zeros(self.num_envs)

    def _connectors_of(self, connectors: Iterable[Connector], space: Any, learn: bool) -> ConnectorPipeline:
        return ConnectorPipeline(connectors, space, self.num_envs, learn=learn)

    @property
    def observation_space(self) -> Any:
        """The space of a row of the column ``obs``."""
        return self.connectors.space

    def _empty(self, *shape: int) -> np.ndarray:
        """An array of zeros for observations as the policy gets them."""
        space = self.observation_space
        return np.zeros((*shape, *(space.shape or ())), space.dtype)

    @property
    def action_space(self) -> Any:
        return self._vector.action_space

    def get_policy(self, policy_id: str = DEFAULT_POLICY) -> Policy:
        """The policy of this id."""
        if policy_id != DEFAULT_POLICY:
            raise UsageError(f"there is no policy {policy_id!r}: this runner has {DEFAULT_POLICY!r} only")
        return self.policy

    def actions_and_states(
        self, observations: Mapping[Any, Any], policy_id: str | None = None, state: States | None = None, *,
        explore: bool,
    ) -> tuple[dict[Any, Any], States]:  # fmt: skip
        """The actions for observations of the environment, by the same keys, and, of one observation, the next state.

        Args:
            state: of a recurrent policy, before a single observation.
        """
        policy = self.get_policy(policy_id or DEFAULT_POLICY)
        require_one(policy, observations)
        rows = self._vector.rows.empty(len(observations))
        for i, observation in enumerate(observations.values()):
            self._vector.rows.write(rows, i, observation)
        if self.connectors:
            rows = np.concatenate([self.connectors.single(row[None]) for row in rows])
        explorer = policy.explorer(1, len(rows), explore=explore)
        explorer.go_on({name: np.array(each)[None] for name, each in (state or {}).items()})
        actions = self._vector.actions.to_env(explorer.act(0, rows))
        return dict(zip(observations, actions, strict=True)), explorer.state_of(0)

    def sample(self, num_steps: int | None = None, *, num_episodes: int | None = None) -> SampleBatch:
        """Step the environments, and return their steps as a batch.

        Args:
            num_steps: steps of all environments together, rounded up to a multiple of their number. Episodes go on in
                the next call.
            num_episodes: whole episodes instead. Each environment begins anew and plays its share of them, so that
                short episodes are not preferred.

        Returns:
            Rows of one environment after the other, each in the order of time. Without arguments:
            ``rollout_fragment_length`` steps of each environment.

        Raises:
            UsageError: both arguments, or a number below 1; a runner that restarted has no weights yet.
            FloatingPointError: an environment returned a reward or an observation that is NaN or infinite.
        """
        steps = self._steps_of(num_steps, num_episodes)
        if num_episodes is not None:
            return self._episodes(num_episodes)
        try:
            return self._finish(self._collect(steps))
        except BaseException:
            self._forget_counts()
            raise

    def learn_on_batch(self, batch: SampleBatch) -> dict[str, Any]:
        """Let the policy learn; returns metrics by policy id."""
        return {DEFAULT_POLICY: self.policy.learn_on_batch(batch)}

    def get_weights(self) -> dict[str, Any]:
        """Weights by policy id."""
        weights = {DEFAULT_POLICY: self.policy.get_weights()}
        return {**weights, CONNECTORS: self.connectors.shared_state()} if self.connectors else weights

    def set_weights(self, weights: Mapping[str, Any], version: int | None = None) -> None:
        """Take over weights by policy id, as `get_weights` returns them.

        Args:
            version: number of these weights, kept as `weights_version`; None leaves that number as it is.
        """
        unknown = [policy_id for policy_id in weights if policy_id not in (DEFAULT_POLICY, CONNECTORS)]
        if unknown:
            raise UsageError(f"set_weights: {{{DEFAULT_POLICY!r}: weights}}; there is no policy {unknown[0]!r}")
        self.policy.set_weights(weights[DEFAULT_POLICY])
        if CONNECTORS in weights:
            self.connectors.set_shared_state(weights[CONNECTORS])
        self.has_weights = True
        if version is not None:
            self.weights_version = version

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        """``fn(env)`` of each environment; of a vector environment of Gymnasium, of it as a whole."""
        return [fn(env) for env in getattr(self._vector, "envs", [getattr(self._vector, "env", None)])]

    def get_state(self, *, pickle_with: Callable[[Any], bytes] | None = None) -> dict[str, Any]:
        """The environments as they are, the generator of actions, and the episodes that go on.

        Environments that cannot be pickled are left out, with a warning: a restored runner begins new episodes.

        Args:
            pickle_with: pickles the list of environments; its error is raised. None: cloudpickle, with the warning.
        """
        from rlmesh.envs.environments.pickling import EnvironmentPickler

        state: dict[str, Any] = {"rng": self.policy.rng.bit_generator.state, "next_episode": self._next_episode}
        if self.connectors:
            state["connectors"] = self.connectors.state()
        state |= {"starts": list(self._vector.starts), "begun": self._vector.begun}
        if not (state["begun"] and isinstance(self._vector, LocalVector)):
            return state
        try:
            state["envs"] = (pickle_with or EnvironmentPickler())(self._vector.envs)
        except Exception as error:
            if pickle_with is not None:
                raise
            logger.warning("the environments cannot be pickled, so a restored run begins new episodes: %s", error)
            return state
        flags = {"must_reset": self._must_reset, "obs_known": self._obs_known}
        return {**state, **flags, **{name: getattr(self, name).copy() for name in KEPT}}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take over a state of `get_state`."""
        import cloudpickle

        envs = cloudpickle.loads(state["envs"]) if "envs" in state else []  # before anything changes
        self.policy.rng.bit_generator.state = state["rng"]
        self._next_episode, self._stats = state["next_episode"], EpisodeStats()
        if "connectors" in state:
            self.connectors.set_state(state["connectors"])
        self._must_reset, self._obs_known = True, False
        later = int(state.get("begun", True))  # other seeds than those of episodes that were played already
        starts = [start + later for start in state.get("starts", [0])]
        if not isinstance(self._vector, LocalVector):
            self._vector.begin_again(max(starts))
        elif "envs" not in state or len(state["_obs"]) != self.num_envs:
            if "envs" in state:
                warn_of_other_environments(len(state["_obs"]), self.num_envs)
            self._vector.begin_again(starts)
        else:
            self._vector.close()
            self._vector.put(envs, state["starts"])
            self._must_reset, self._obs_known = state.get("must_reset", False), state.get("obs_known", True)
            for name in KEPT:
                setattr(self, name, state[name].copy())

    def stop(self) -> None:
        """Close the environments."""
        self._vector.close()

    def _vector_of(self, given: Any, num_envs: int, mode: str, restart: bool) -> LocalVector | GymVector:
        from gymnasium.vector import VectorEnv

        if mode not in VECTORIZE_MODES:
            raise UsageError(f"there is no vectorize_mode {mode!r}.{did_you_mean(mode, VECTORIZE_MODES)}")
        seeds = None if self.seed is None else self._seed_of
        if mode != "local":
            import gymnasium

            creator: Any = env_creator_of(given)
            env_id = getattr(creator, "env_id", None)
            if env_id is None:
                raise UsageError(f"vectorize_mode={mode!r} is for ids; a creator returns its own VectorEnv")
            if mode == "envpool":
                return self._envpool_of(env_id, num_envs)
            creator.register()
            config = dict(self.env_config)
            if mode in ("sync", "async"):  # observations are copied into the fragment at once: no copy before
                config["vector_kwargs"] = {"copy": False, **config.get("vector_kwargs", {})}
            first: Any = gymnasium.make_vec(env_id, num_envs, vectorization_mode=mode, **config)
        else:
            creator = env_creator_of(given)
            first = creator(self._context(0))
        if isinstance(first, VectorEnv):
            own = mode in ("sync", "async") or hasattr(first, "env_fns")
            places = range(first.num_envs)

            def first_seeds(start: int) -> list[int] | int:
                return [self._seed_of(i, start) for i in places] if own else self._seed_of(0, start)

            return GymVector(first, None if seeds is None else first_seeds, infos=self._infos)
        if multi_agent_env_of(first) is not None:
            raise UsageError(f"{type(first).__name__} has several agents: use MultiAgentEnvRunner, or an algorithm")
        if not all(hasattr(first, name) for name in ("reset", "step", "observation_space", "action_space")):
            raise UsageError(f"the creator returned {type(first).__name__}, which is no Gymnasium environment")
        return LocalVector(
            lambda i: creator(self._context(i)), num_envs, seeds, restart=restart, infos=self._infos, first=first,
            max_sequence_length=self._max_length,
        )  # fmt: skip

    def _envpool_of(self, env_id: str, num_envs: int) -> GymVector:
        from rlmesh.envs.environments.envpool_vector import EnvPoolVector

        run = int(np.random.default_rng().integers(2**31)) if self.seed is None else self.seed  # EnvPool's is 42
        seeds = lambda start: [self._seed_of(i, start, run) for i in range(num_envs)]  # noqa: E731
        return EnvPoolVector(env_id, num_envs, seeds, config=self.env_config, infos=self._infos)

    def _begin_all(self) -> None:
        # Connectors get observations as the environments gave them, which are kept for those that begin no episode.
        raw = self._raw if self.connectors else self._obs
        self._vector.reset(raw, self._t > 0 if self._obs_known else np.ones(self.num_envs, bool))
        if self.connectors:
            self._require_numbers("a first observation", raw, 0)
            self._obs = self.connectors.observe(raw, np.ones(self.num_envs, bool))
        self._obs_known, self._states = True, {}
        for i in range(self.num_envs):
            self._new_episode(i)
        self._must_reset = False

    def _new_episode(self, i: int) -> None:
        self._eps_id[i] = self._next_episode
        self._next_episode += 1
        self._t[i] = 0
        self._returns[i] = 0.0

    def _collect(self, steps: int) -> Fragment:
        """Step all environments ``steps`` times."""
        self._counted = (len(self._stats), self._stats.cut)
        if self._must_reset:
            self._begin_all()
        n = self.num_envs
        after, connectors = self._empty(n), self.connectors
        obs = self._pool.empty((n, steps, *after.shape[1:]), after.dtype)
        raw = self._raw if connectors else None
        rewards, valid = np.zeros((n, steps), np.float32), np.ones((n, steps), bool)
        terminateds, truncateds = np.zeros((n, steps), bool), np.zeros((n, steps), bool)
        t, eps_id = np.zeros((n, steps), np.int64), np.zeros((n, steps), np.int64)
        infos: Any = np.empty((n, steps), object) if self._infos else None
        ended: list[tuple[int, int, np.ndarray]] = []
        ended_states: list[States] = []
        explorer = self.policy.explorer(steps, n, explore=self.explore)
        explorer.go_on(self._states)
        obs[:, 0] = self._obs
        self._must_reset, self._obs_known = True, False  # if a step raises, no half-known state goes on
        for time in range(steps):
            t[:, time], eps_id[:, time] = self._t, self._eps_id
            actions = explorer.act(time, obs[:, time])
            out = obs[:, time + 1] if time + 1 < steps else after
            outcome = self._vector.step(actions, out if raw is None else raw)
            rewards[:, time], valid[:, time] = outcome.rewards, outcome.valid
            terminateds[:, time], truncateds[:, time] = outcome.terminateds, outcome.truncateds
            if infos is not None:
                infos[:, time] = outcome.infos
            self._returns += outcome.rewards
            self._t += outcome.valid
            for i, last in zip(outcome.ended, outcome.final, strict=True):
                self._require_numbers("a last observation", last, time, i)
                ended.append((i, time, connectors.last(last, i)))
                ended_states.append(explorer.state_of(i))
                self._stats.returns.append(float(self._returns[i]))
                self._stats.lengths.append(int(self._t[i]))
                self._new_episode(i)
            for i in outcome.cut:
                self._stats.cut += 1
                self._new_episode(i)
            if raw is not None or explorer.states:
                first = ~outcome.valid
                if not self._vector.resets_later:
                    first[outcome.ended] = True
                explorer.begin(first)
                if raw is not None:
                    self._require_numbers("an observation", raw, time)
                    out[:] = connectors.observe(raw, first)
        self._obs, self._states = after, explorer.states
        self._must_reset, self._obs_known = False, True
        given = {
            columns.OBS: obs, columns.REWARDS: rewards, columns.TERMINATEDS: terminateds,
            columns.TRUNCATEDS: truncateds, columns.T: t, columns.EPS_ID: eps_id, **explorer.columns(),
        }  # fmt: skip
        if infos is not None:
            given[columns.INFOS] = infos
        self._require_numbers("a reward", rewards)
        self._require_numbers("an observation", obs)
        self._require_numbers("an observation", after, steps - 1)
        if (changed := connectors.rewards(rewards)) is not rewards:
            given[columns.ENV_REWARDS], given[columns.REWARDS] = rewards, changed
        return Fragment(n, steps, given, valid, after, ended, explorer.states, ended_states)

    def _require_numbers(self, name: str, array: np.ndarray, time: int | None = None, env: int | None = None) -> None:
        """Refuse NaN and infinity, which would spread to all weights.

        Args:
            array: ``[environments, time, …]``, without the axes whose place is given.
        """
        if array.dtype.kind != "f" or np.isfinite(array).all():
            return
        place = np.argwhere(~np.isfinite(array))[0].tolist()
        i = place.pop(0) if env is None else env
        step = place.pop(0) if time is None else time
        self._must_reset, self._obs_known = True, False
        raise FloatingPointError(
            f"environment {i} of runner {self.worker_index} returned {name} that is NaN or infinite, in step {step} of "
            "the fragment"
        )

    def _forget_counts(self) -> None:
        """Count no episode of a fragment that an error kept from its reader."""
        count, self._stats.cut = self._counted
        del self._stats.returns[count:], self._stats.lengths[count:]

    def _finish(self, fragment: Fragment) -> SampleBatch:
        if self._new_obs:
            fragment.add_new_obs()
        self.policy.postprocess_fragment(fragment)
        batch = fragment.to_batch()
        self._stats.env_steps += len(batch)
        return batch

    def _episodes(self, wanted: int) -> SampleBatch:
        """Play ``wanted`` whole episodes, shared among the environments; steps beyond the share are dropped."""
        self._must_reset = True
        share = np.full(self.num_envs, wanted // self.num_envs)
        share[: wanted % self.num_envs] += 1
        stats, self._stats = self._stats, EpisodeStats()
        try:
            parts = self._parts_of_episodes(share)
        except BaseException:  # episodes of earlier calls stay counted, those of this one are not
            self._stats = stats
            raise
        self._must_reset = True
        return self._whole(parts, stats)

    def _parts_of_episodes(self, share: np.ndarray) -> list[SampleBatch]:
        """Batches with the steps of the next episodes of each environment, as many as its share."""
        parts: list[SampleBatch] = []
        long = LongEpisodes(self.worker_index)
        while (share > 0).any():
            fragment = self._collect(EPISODE_CHUNK)
            long.after(EPISODE_CHUNK, ended=bool(fragment.ended))
            lasts = np.where(share > 0, EPISODE_CHUNK, 0)
            for i, time, _ in fragment.ended:
                if share[i] > 0:
                    share[i] -= 1
                    if share[i] == 0:
                        lasts[i] = time + 1
            fragment.valid &= np.arange(EPISODE_CHUNK) < lasts[:, None]
            parts.append(self._finish(fragment))
        return parts

    def _whole(self, parts: list[SampleBatch], stats: EpisodeStats) -> SampleBatch:
        """Join parts of episodes, and count the episodes that are kept."""
        batch: SampleBatch = SampleBatch.concat_samples(parts)
        batch = batch[np.argsort(batch[columns.EPS_ID], kind="stable")]
        stats.cut += self._stats.cut
        stats.env_steps += len(batch)
        for episode in batch.split_by_episode():
            if episode[columns.DONES][-1]:
                rewards = episode.get(columns.ENV_REWARDS, episode[columns.REWARDS])
                stats.returns.append(float(rewards.sum(dtype=np.float64)))
                stats.lengths.append(len(episode))
        self._stats = stats
        return batch


RolloutWorker = EnvRunner
