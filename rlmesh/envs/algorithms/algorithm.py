"""`Algorithm`: an environment, runners, a policy and the way it learns."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from rlmesh.envs.algorithms import checkpoint
from rlmesh.envs.algorithms.algorithm_config import AlgorithmConfig
from rlmesh.envs.algorithms.results import EpisodeWindow, ResultDict
from rlmesh.envs.algorithms.train_ops import synchronous_parallel_sample, train_one_step
from rlmesh.envs.batches.signal import SignalWatch
from rlmesh.envs.learners.learner_group import LearnerGroup
from rlmesh.envs.modules.policy import Policy
from rlmesh.envs.runners.base import DEFAULT_POLICY
from rlmesh.envs.runners.env_runner_group import EnvRunnerGroup
from rlmesh.errors import UsageError

__all__ = ["Algorithm"]


class Algorithm:
    """Base of algorithms: `train` calls `training_step`, which a subclass may override; the rest stays the same.

    Args:
        config: an `AlgorithmConfig`, or a mapping of settings that differ from the defaults.
        env: replaces the environment of the config.

    Attributes:
        config: the settings.
        env_runner_group: the runners; its local one holds the policy that learns.
        learner_group: updates the policies of the local runner.
        iteration: number of calls of `train`.
        window: the last episodes.
        signal: watches whether rewards and advantages have anything to learn from.

    Raises:
        UsageError: faults of the settings, all in one.
    """

    def __init__(self, config: AlgorithmConfig | Mapping[str, Any] | None = None, env: Any = None) -> None:
        if not isinstance(config, AlgorithmConfig):
            config = self.get_default_config().update_from_dict(config or {})
        assert isinstance(config, AlgorithmConfig)
        if env is not None:
            config = config.copy().environment(env)
        config.validate()
        config.freeze()
        self.config = config
        self.iteration = self.env_steps_trained = self.agent_steps_trained = 0
        self.time_total_s = 0.0
        self.window = EpisodeWindow(config["metrics_num_episodes_for_smoothing"])
        self.signal = SignalWatch()
        self._evaluation: EnvRunnerGroup | None = None
        try:
            self.setup(config)
        except BaseException:
            Algorithm.stop(self)  # a subclass may have failed after the runners were started
            raise

    @classmethod
    def get_default_config(cls) -> AlgorithmConfig:
        """The settings that an algorithm without a config has."""
        return AlgorithmConfig(cls)

    def setup(self, config: AlgorithmConfig) -> None:
        """Make the runners and learners; a subclass that overrides this method calls it first."""
        self.env_runner_group = EnvRunnerGroup(
            **self._runner_arguments(config), num_env_runners=config["num_env_runners"],
            max_restarts=restarts_of(config),
        )  # fmt: skip
        number = config["num_learners"]
        settings = {"timeout_s": config["sample_timeout_s"], "max_restarts": config["max_learner_restarts"]}
        try:
            self.learner_group = LearnerGroup(
                self.env_runner.policy_map,
                config["policies_to_train"],
                num_learners=number,
                **settings if number else {},
            )
        except BaseException:
            self.env_runner_group.stop()
            raise

    def _runner_arguments(self, config: AlgorithmConfig) -> dict[str, Any]:
        fragment = config["rollout_fragment_length"]
        return {
            **config.runner_policies(), "env_creator": config["env"], "env_config": config["env_config"],
            "num_envs": config["num_envs_per_env_runner"], "seed": config["seed"],
            "new_obs": self.wants_new_obs, "infos": False, "explore": config["explore"],
            "restart_failed_sub_environments": config["restart_failed_sub_environments"],
            "vectorize_mode": config["vectorize_mode"], "sample_timeout_s": config["sample_timeout_s"],
            "connectors": config.runner_connectors(), "max_sequence_length": config["max_sequence_length"],
            **({} if fragment == "auto" else {"rollout_fragment_length": fragment}),
        }  # fmt: skip

    wants_new_obs = False
    """True for algorithms whose batches have the column ``new_obs``; it doubles the size of a batch."""
    learns_from_rewards = True
    """False for algorithms whose batches are not watched for rewards that are all equal."""

    @property
    def env_runner(self) -> Any:
        """The local runner: an `EnvRunner`, or, with several agents, a `MultiAgentEnvRunner`."""
        return self.env_runner_group.local_env_runner

    @property
    def workers(self) -> EnvRunnerGroup:
        """`env_runner_group`, under its older name."""
        return self.env_runner_group

    def training_step(self) -> ResultDict:
        """Sample a batch, learn from it, send the weights to the runners; returns results by policy id."""
        of_agents = self.config["count_steps_by"] == "agent_steps"
        counted = {"max_agent_steps" if of_agents else "max_env_steps": self.config["train_batch_size"]}
        batch = synchronous_parallel_sample(worker_set=self.env_runner_group, **counted)
        results = train_one_step(self, batch)
        self.env_runner_group.sync_weights()
        return results

    def train(self) -> ResultDict:
        """One iteration: training steps until ``min_env_steps_per_iteration`` steps are sampled, at least one.

        Returns:
            ``env_runners`` (returns and lengths of the last episodes, counts), ``learners`` (what the last
            `training_step` returned), counts and times; ``evaluation``, if it was due; ``warnings``, a list of texts,
            while a policy has nothing to learn from.
        """
        began = time.monotonic()
        from rlmesh.envs.runners.episode_stats import EpisodeStats

        parts: list[EpisodeStats] = []
        steps = 0
        try:
            while True:
                learners = self.training_step()
                parts.append(self.env_runner_group.take_stats())
                steps += parts[-1].env_steps
                if steps >= self.config["min_env_steps_per_iteration"]:
                    break
        except BaseException:  # the steps before it were sampled and learnt from
            self.window.add(EpisodeStats.merged(parts))
            raise
        stats = EpisodeStats.merged(parts)
        self.window.add(stats)
        self.iteration += 1
        result = self._result(stats, learners, time.monotonic() - began)
        if warnings := self.signal.warnings():
            result["warnings"] = warnings
        interval = self.config["evaluation_interval"]
        if interval is not None and self.iteration % interval == 0:
            result["evaluation"] = self.evaluate()
        return result

    step = train

    def _result(self, stats: Any, learners: Mapping[str, Any], seconds: float) -> ResultDict:
        self.time_total_s += seconds
        episodes = self.window.summary(stats)
        return ResultDict(
            training_iteration=self.iteration, env_runners=episodes, learners=learners,
            info={"learner": learners, "num_env_steps_trained": self.env_steps_trained,
                  "num_agent_steps_trained": self.agent_steps_trained},
            episode_reward_mean=episodes["episode_return_mean"], episode_len_mean=episodes["episode_len_mean"],
            num_env_steps_sampled_lifetime=self.window.env_steps, timesteps_total=self.window.env_steps,
            time_this_iter_s=seconds, time_total_s=self.time_total_s,
        )  # fmt: skip

    def count_trained(self, env_steps: int, agent_steps: int) -> None:
        """Count steps that the policies were trained on."""
        self.env_steps_trained += env_steps
        self.agent_steps_trained += agent_steps

    def evaluate(self) -> ResultDict:
        """Play with the policy of now, by default without exploration, in environments of their own.

        Returns:
            ``env_runners``: returns and lengths of these episodes alone.
        """
        config = self.config.of_evaluation()
        if self._evaluation is None:
            arguments = self._runner_arguments(config)
            seed = config["seed"]
            arguments["seed"] = None if seed is None else seed + 1_000_003
            arguments["policy_config"] = {**arguments["policy_config"], "estimate_advantages": None}
            if "policy_configs" in arguments:
                arguments["policy_configs"] = {
                    name: {**each, "estimate_advantages": None} for name, each in arguments["policy_configs"].items()
                }
            arguments["learn_connectors"] = False
            number = config["evaluation_num_env_runners"]
            self._evaluation = EnvRunnerGroup(**arguments, num_env_runners=number, max_restarts=restarts_of(config))
        self._evaluation.local_env_runner.set_weights(self.env_runner.get_weights())
        self._evaluation.sync_weights()
        amount, episodes = config["evaluation_duration"], config["evaluation_duration_unit"] == "episodes"
        if not episodes:  # those that go on were begun by the policy of the last evaluation
            self._evaluation.begin_episodes()
        self._evaluation.sample_all(**{"num_episodes" if episodes else "num_steps": amount})
        stats = self._evaluation.take_stats()
        window = EpisodeWindow(max(1, len(stats)))
        window.add(stats)
        summary = window.summary(stats)
        return ResultDict(env_runners=summary, episode_reward_mean=summary["episode_return_mean"])

    def get_policy(self, policy_id: str = DEFAULT_POLICY) -> Policy:
        """The policy of this id, as it learns.

        Raises:
            UsageError: there is none; names the nearest one.
        """
        policy: Policy = self.env_runner.get_policy(policy_id)
        return policy

    def get_module(self, module_id: str = DEFAULT_POLICY) -> Any:
        """The `RLModule` of a policy."""
        return self.get_policy(module_id).module  # type: ignore[attr-defined]

    def compute_single_action(
        self, observation: Any, state: Any = None, *, policy_id: str = DEFAULT_POLICY, explore: bool | None = None
    ) -> Any:
        """The action for one observation of the environment.

        Args:
            state: of a recurrent policy, before this observation: a dict of arrays, as the last call returned it; None
                at the start of an episode.
            policy_id: with several agents, the policy that chooses it.
            explore: None: the setting ``explore``.

        Returns:
            The action; of a recurrent policy ``(action, state, {})`` with the state after the observation.
        """
        import numpy as np

        chosen = self.config["explore"] if explore is None else explore
        actions, states = self.env_runner.actions_and_states({0: observation}, policy_id, state, explore=chosen)
        action = actions[0]
        action = action.item() if isinstance(action, np.generic | np.ndarray) and np.ndim(action) == 0 else action
        return (action, states, {}) if self.get_policy(policy_id).is_recurrent() else action

    def compute_actions(
        self, observations: Mapping[Any, Any], policy_id: str | None = None, *, explore: bool | None = None
    ) -> dict[Any, Any]:
        """The actions for observations of the environment, by the same keys.

        Args:
            observations: by agent; by any key if ``policy_id`` is given, or if there is one agent.
            policy_id: the policy of all of them; None: each agent's own, by the ``policy_mapping_fn``.
            explore: None: as the config says.
        """
        if not isinstance(observations, Mapping):
            raise UsageError("compute_actions takes a dict of observations; for one observation, compute_single_action")
        chosen = self.config["explore"] if explore is None else explore
        actions: dict[Any, Any] = self.env_runner.actions_and_states(observations, policy_id, explore=chosen)[0]
        return actions

    def get_weights(self, policies: Iterable[str] | None = None) -> dict[str, Any]:
        """Weights by policy id, of all policies or of those named."""
        weights: dict[str, Any] = self.env_runner.get_weights()
        if policies is None:
            return weights
        return {name: weights[name] for name in policies if self.get_policy(name)}

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        """Take over weights by policy id, and send them to all runners."""
        self.env_runner.set_weights(weights)
        self.env_runner_group.sync_weights()

    def get_state(self) -> dict[str, Any]:
        """Counters, policies, learners: all that training needs, apart from environments."""
        return {
            "policies": {name: policy.get_state() for name, policy in self.env_runner.policy_map.items()},
            "window": self.window.get_state(),
            "counters": {name: getattr(self, name) for name in checkpoint.COUNTERS},
            "connectors": self.env_runner.connectors.shared_state(), "signal": self.signal.get_state(),
        }  # fmt: skip

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take over a state of `get_state`, and send the weights to all runners."""
        for name, each in state["policies"].items():
            self.get_policy(name).set_state(each)
        self.window.set_state(state["window"])
        for name, value in state["counters"].items():
            setattr(self, name, value)
        self.env_runner.connectors.set_shared_state(state["connectors"])
        self.signal.set_state(state["signal"])
        self.env_runner_group.sync_weights()

    def save(self, checkpoint_dir: str | Path) -> str:
        """Write a checkpoint into a folder; the folder is there as a whole or not at all.

        Returns:
            The folder.
        """
        return checkpoint.save(self, Path(checkpoint_dir))

    save_to_path = save

    def restore(self, checkpoint_dir: str | Path) -> None:
        """Go on from a checkpoint of `save`. With the same seed and settings, training on a CPU gives the same numbers
        as without the interruption, if the environments can be pickled; otherwise new episodes begin.

        Raises:
            UsageError: there is no checkpoint, or it is of another algorithm or of other networks.
        """
        checkpoint.restore(self, Path(checkpoint_dir))

    restore_from_path = restore

    @classmethod
    def from_checkpoint(cls, checkpoint_dir: str | Path) -> Self:
        """The algorithm of a checkpoint, with its settings.

        The settings are unpickled, which can run code: open only folders that you trust.
        """
        config = checkpoint.config_of(Path(checkpoint_dir))
        algorithm: Self = (config.algorithm_class if cls is Algorithm else cls)(config)  # type: ignore[assignment]
        algorithm.restore(checkpoint_dir)
        return algorithm

    def stop(self) -> None:
        """Close environments, and end the jobs of remote runners; a second call does nothing."""
        groups = ("learner_group", "env_runner_group", "_evaluation")
        for group in (getattr(self, name, None) for name in groups):
            if group is not None:
                group.stop()

    cleanup = stop

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def restarts_of(config: AlgorithmConfig) -> int:
    """The number of restarts of remote runners that the settings allow."""
    return int(config["max_env_runner_restarts"]) if config["restart_failed_env_runners"] else 0
