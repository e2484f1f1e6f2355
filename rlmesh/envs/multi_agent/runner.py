"""`MultiAgentEnvRunner`: steps environments of several agents with the policies of the agents."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from rlmesh.envs.batches.multi_agent_batch import MultiAgentBatch
from rlmesh.envs.connectors.connector import Connector
from rlmesh.envs.environments.features import SEQUENCE_LENGTH
from rlmesh.envs.environments.observations import ObservationRows
from rlmesh.envs.environments.registry import EnvCreator, did_you_mean, env_creator_of
from rlmesh.envs.modules.policy import Policy, States
from rlmesh.envs.multi_agent.connectors import AgentConnectors
from rlmesh.envs.multi_agent.env_process import EnvProcess
from rlmesh.envs.multi_agent.episodes import EpisodeBook
from rlmesh.envs.multi_agent.policies import (
    AgentEpisode,
    PolicyMapping,
    PolicySpec,
    policy_seed,
    policy_specs,
    spaces_of_policies,
)
from rlmesh.envs.multi_agent.rows import PolicyRows
from rlmesh.envs.multi_agent.vector import MultiAgentVector
from rlmesh.envs.runners.base import (
    DEFAULT_POLICY,
    LongEpisodes,
    RunnerBase,
    require_one,
    warn_of_other_environments,
)
from rlmesh.envs.runners.env_runner import CONNECTORS
from rlmesh.envs.runners.episode_stats import EpisodeStats
from rlmesh.errors import UsageError

__all__ = ["MultiAgentEnvRunner"]

MODES = ("local", "sync", "async")
"""``sync`` is ``local``, under the name of Gymnasium and RLlib."""
logger = logging.getLogger(__name__)


class MultiAgentEnvRunner(RunnerBase):
    """Environments of several agents and their policies in this process; each policy acts for all its agents at once.

    Its methods are those of `EnvRunner`; batches are `MultiAgentBatch`, and weights and results are by policy.

    Args:
        env_creator: a registered name, a class, or a function of an `EnvContext` that returns a `MultiAgentEnv`, or an
            environment of PettingZoo.
        policy_class, policy_config: of policies whose spec names no others.
        policies: see `policy_specs`; a spec's ``config`` replaces entries of ``policy_config``.
        policy_mapping_fn: see `PolicyMapping`.
        policy_configs: settings by policy, in place of ``policy_config`` and those of the specs.
        connectors: applied to the observations and rewards of each agent, or a dict of them by policy; see
            `AgentConnectors`.
        vectorize_mode: ``local`` steps environments in this process, ``async`` each in a process of its own.
        num_envs, rollout_fragment_length, …: as of `EnvRunner`.

    Raises:
        UsageError: arguments or spaces that cannot work.
    """

    def __init__(
        self, env_creator: str | type | EnvCreator, policy_class: type[Policy], *,
        policies: Any = None, policy_mapping_fn: Callable[..., str] | None = None,
        policy_config: Mapping[str, Any] | None = None, policy_configs: Mapping[str, Mapping[str, Any]] | None = None,
        env_config: Mapping[str, Any] | None = None, num_envs: int = 1, rollout_fragment_length: int = 200,
        seed: int | None = None, worker_index: int = 0, num_workers: int = 0, start: int = 0, new_obs: bool = True,
        infos: bool = True, explore: bool = True, restart_failed_sub_environments: bool = True,
        vectorize_mode: str = "local", connectors: Iterable[Connector] | Mapping[str, Iterable[Connector]] = (),
        learn_connectors: bool = True,
        max_sequence_length: int = SEQUENCE_LENGTH,
    ) -> None:  # fmt: skip
        super().__init__(
            num_envs=num_envs, rollout_fragment_length=rollout_fragment_length, seed=seed, worker_index=worker_index,
            num_workers=num_workers, start=start, env_config=env_config,
        )  # fmt: skip
        if vectorize_mode not in MODES:
            raise UsageError(
                f"vectorize_mode={vectorize_mode!r}: environments of several agents have 'local' (also named 'sync'), "
                "and 'async' for a process each"
            )
        self._new_obs, self.explore = new_obs, explore
        creator = env_creator_of(env_creator)
        made = EnvProcess if vectorize_mode == "async" else _here
        self._vector = MultiAgentVector(
            lambda i: made(partial(creator, self._context(i))), num_envs, None if seed is None else self._seed_of,
            restart=restart_failed_sub_environments,
        )  # fmt: skip
        specs = policy_specs(policies)
        self.mapping = PolicyMapping(policy_mapping_fn, specs)
        self.agents_at_once = max(1, len(self._vector.envs[0].possible_agents))
        spaces = spaces_of_policies(self._vector.envs[0], specs, self.mapping, self)
        self.policy_map: dict[str, Policy] = {}
        book: dict[str, PolicyRows] = {}
        rows = {name: ObservationRows(spaces[name][0], max_sequence_length) for name in specs}
        own = {name: each.space for name, each in rows.items()}
        self.connectors = AgentConnectors(connectors, own, learn=learn_connectors)
        for name, spec in specs.items():
            config = dict((policy_configs or {}).get(name) or {**(policy_config or {}), **(spec.config or {})})
            space = self.connectors.space(name)
            self.policy_map[name] = self._policy(name, spec, policy_class, config, space, spaces[name][1])
            rewards_of = partial(self.connectors.rewards, name) if self.connectors.has(name) else None
            book[name] = PolicyRows(self.policy_map[name], rows[name], infos=infos, rewards_of=rewards_of)
        self._book = EpisodeBook(
            book, self.mapping, num_envs, self._first_id, self, self.connectors, infos=infos,
            known=self._vector.envs[0].possible_agents,
        )  # fmt: skip

    def _policy(
        self, name: str, spec: PolicySpec, policy_class: type[Policy], config: dict[str, Any], obs: Any, action: Any
    ) -> Policy:
        seed = None if self.seed is None else policy_seed(self.seed, name)
        return (spec.policy_class or policy_class)(obs, action, self._with_seeds(config, seed))

    @property
    def module(self) -> Any:
        """The modules of all policies that have one, as a `MultiAgentRLModule`."""
        from rlmesh.envs.modules.multi_agent_module import MultiAgentRLModule

        found = {name: getattr(policy, "module", None) for name, policy in self.policy_map.items()}
        return MultiAgentRLModule({name: module for name, module in found.items() if module is not None})

    def get_policy(self, policy_id: str = DEFAULT_POLICY) -> Policy:
        """The policy of this id."""
        if policy_id not in self.policy_map:
            raise UsageError(f"there is no policy {policy_id!r}.{did_you_mean(policy_id, self.policy_map)}")
        return self.policy_map[policy_id]

    def policy_of(self, agent_id: Any) -> str:
        """The policy that an agent would have in a new episode."""
        return self.mapping(agent_id, AgentEpisode(-1), self)

    def actions_and_states(
        self, observations: Mapping[Any, Any], policy_id: str | None = None, state: States | None = None, *,
        explore: bool,
    ) -> tuple[dict[Any, Any], States]:  # fmt: skip
        """The actions for observations of the environment, by the same keys, and, of one observation, the next state.

        Args:
            observations: by agent, or by any other key if there is a ``policy_id``.
            policy_id: the policy of all of them; None: each agent's own.
            state: of a recurrent policy, before a single observation.
        """
        if policy_id is not None:
            self.get_policy(policy_id)
        by_policy: dict[str, list[Any]] = {}
        for key in observations:
            by_policy.setdefault(self.policy_of(key) if policy_id is None else policy_id, []).append(key)
        found: dict[Any, Any] = {}
        after: States = {}
        for name, keys in by_policy.items():
            require_one(self.policy_map[name], observations)
            own = self._book.rows[name]
            batch = own.observations.empty(len(keys))
            for i, key in enumerate(keys):
                own.observations.write(batch, i, observations[key])
            if self.connectors:
                batch = np.concatenate([self.connectors.shared[name].single(row[None]) for row in batch])
            explorer = self.policy_map[name].explorer(1, len(keys), explore=explore)
            explorer.go_on({key: np.array(each)[None] for key, each in (state or {}).items()})
            found.update(zip(keys, own.actions.to_env(explorer.act(0, batch)), strict=True))
            after = explorer.state_of(0)
        return {key: found[key] for key in observations}, after

    def sample(self, num_steps: int | None = None, *, num_episodes: int | None = None) -> MultiAgentBatch:
        """Step the environments, and return the steps of their agents by policy.

        A row is one action of an agent: its observation, the action, the sum of its rewards until it observes again,
        and whether it was terminated or truncated then. An action whose result is not there at the end of the batch is
        in the next one. Rewards that an agent gets before its first action are in the returns of episodes alone.

        Args:
            num_steps: steps of all environments together, rounded up to a multiple of their number.
            num_episodes: whole episodes instead. Each environment begins anew and plays its share of them.

        Returns:
            The batch, whose rows are those of one trajectory (an agent in an episode) after the other.

        Raises:
            UsageError: both arguments, or a number below 1; a runner that restarted has no weights yet; the environment
                broke the rules of `MultiAgentEnv`.
            FloatingPointError: an environment returned a reward or an observation that is NaN or infinite.
        """
        steps = self._steps_of(num_steps, num_episodes)
        if num_episodes is not None:
            share = [num_episodes // self.num_envs + (i < num_episodes % self.num_envs) for i in range(self.num_envs)]
            self._must_reset = True
            batch = self._collect(None, share)
            self._must_reset = True
            return batch
        return self._collect(steps, [0] * self.num_envs)

    def learn_on_batch(self, batch: Any) -> dict[str, Any]:
        """Let the policies learn from their parts of a batch; returns metrics by policy id."""
        parts = batch.as_multi_agent().policy_batches
        return {name: self.get_policy(name).learn_on_batch(part) for name, part in parts.items()}

    def get_weights(self, policies: Iterable[str] | None = None) -> dict[str, Any]:
        """Weights by policy id, of all policies or of those named."""
        names = self.policy_map if policies is None else policies
        weights: dict[str, Any] = {name: self.get_policy(name).get_weights() for name in names}
        return {**weights, CONNECTORS: self.connectors.shared_state()} if self.connectors else weights

    def set_weights(self, weights: Mapping[str, Any], version: int | None = None) -> None:
        """Take over weights by policy id, as `get_weights` returns them; other policies keep theirs."""
        policies = {name: self.get_policy(name) for name in weights if name != CONNECTORS}
        for name, policy in policies.items():
            policy.set_weights(weights[name])
        if CONNECTORS in weights:
            self.connectors.set_shared_state(weights[CONNECTORS])
        self.has_weights = True
        if version is not None:
            self.weights_version = version

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        """``fn(env)`` of each environment, a `MultiAgentEnv`, in the process of the environment."""
        return [env.apply(fn) if isinstance(env, EnvProcess) else fn(env) for env in self._vector.envs]

    def stop(self) -> None:
        """Close the environments."""
        self._vector.close()

    def get_state(self, *, pickle_with: Callable[[Any], bytes] | None = None) -> dict[str, Any]:
        """The environments as they are, the generators of actions, and the episodes that go on.

        Environments that cannot be pickled are left out, with a warning: a restored runner begins new episodes.

        Args:
            pickle_with: pickles the list of environments; its error is raised. None: cloudpickle, with the warning.
        """
        from rlmesh.envs.environments.pickling import EnvironmentPickler

        rngs = {name: policy.rng.bit_generator.state for name, policy in self.policy_map.items()}
        begun = self._vector.begun
        state = {
            "rngs": rngs, "counters": self._book.counters(), "starts": list(self._vector.starts), "begun": begun,
            "must_reset": self._must_reset,
        }  # fmt: skip
        if self.connectors:
            state["connectors"] = self.connectors.state()
        if not begun:
            return state
        try:
            state["envs"] = (pickle_with or EnvironmentPickler())(self._vector.envs)
        except Exception as error:
            if pickle_with is not None:
                raise
            logger.warning("the environments cannot be pickled, so a restored run begins new episodes: %s", error)
            return state
        return {**state, "book": self._book.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take over a state of `get_state`."""
        import cloudpickle

        envs = cloudpickle.loads(state["envs"]) if "envs" in state else []  # before anything changes
        for name, rng in state["rngs"].items():
            self.get_policy(name).rng.bit_generator.state = rng
        self._book.set_counters(state["counters"])
        if "connectors" in state:
            self.connectors.set_state(state["connectors"])
        self._stats = EpisodeStats()
        self._must_reset, self._book.running = True, [None] * self.num_envs
        if "envs" not in state or len(state["starts"]) != self.num_envs:
            if "envs" in state:
                warn_of_other_environments(len(state["starts"]), self.num_envs)
            later = int(state.get("begun", True))  # other seeds than those of episodes that were played already
            self._vector.begin_again([start + later for start in state["starts"]])
            return
        self._must_reset = state.get("must_reset", False)
        self._vector.close()
        self._vector.put(envs, state["starts"])
        self._book.set_state(state["book"])

    def _begin_all(self) -> None:
        """Begin an episode in each environment that is not at the start of one."""
        self._book.clear()
        for i, running in enumerate(self._book.running):
            if running is None or running.length:
                self._book.begin(i, self._vector.reset(i)[0])

    def _collect(self, steps: int | None, share: list[int]) -> MultiAgentBatch:
        """Step all environments ``steps`` times, or, without that number, until each has played its share."""
        book, vector, stats = self._book, self._vector, EpisodeStats()
        long = LongEpisodes(self.worker_index)
        if self._must_reset:
            self._begin_all()
        self._must_reset = True  # if a step raises, no half-known state goes on
        try:
            time = 0
            while time < steps if steps is not None else any(share):
                active = [i for i in range(self.num_envs) if steps is not None or share[i]]
                known = len(stats)
                book.act(active, explore=self.explore)
                vector.begin_steps({i: book.actions(i) for i in active})
                for i in active:
                    results = vector.step(i, book.actions(i))
                    if results is None:
                        book.cut(i, stats)
                    elif book.add(i, results, stats):
                        share[i] -= 1
                    if book.running[i] is None:
                        book.begin(i, vector.reset(i)[0])
                time += 1
                if steps is None:
                    long.after(1, ended=len(stats) > known)
            batch = book.take(stats.env_steps, new_obs=self._new_obs)
        except BaseException:
            book.running = [None] * self.num_envs
            raise
        self._must_reset = False
        self._stats = EpisodeStats.merged([self._stats, stats])
        return batch


def _here(make: Callable[[], Any]) -> Any:
    return make()
