"""Algorithms with several policies: results by policy, checkpoints, remote runners; and that they learn."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlmesh.envs import (
    Algorithm,
    AlgorithmConfig,
    APPOConfig,
    DQNConfig,
    EnvRunnerGroup,
    IMPALAConfig,
    ModulePolicy,
    MultiAgentBatch,
    MultiAgentRLModule,
    PGConfig,
    PolicySpec,
    PPOConfig,
    RLModule,
    SACConfig,
    make_multi_agent,
    synchronous_parallel_sample,
)
from rlmesh.envs.connectors import ObservationNormalizer
from rlmesh.envs.multi_agent.runner import MultiAgentEnvRunner
from rlmesh.envs.replay import MultiAgentReplayBuffer, PrioritizedReplayBuffer
from rlmesh.errors import UsageError

from ..environments import Target
from .environments import Always, Anything, Convoy, Event, Scripted, Shift


def convoy(config: AlgorithmConfig, seed: int = 0) -> AlgorithmConfig:
    return (
        config.environment(Convoy)
        .multi_agent(policies={"first", "second"}, policy_mapping_fn=lambda agent_id, episode, **kwargs: agent_id)
        .env_runners(num_envs_per_env_runner=4)
        .rl_module(model_config={"fcnet_hiddens": (32,)})
        .debugging(seed=seed)
    )


def ppo() -> PPOConfig:
    return PPOConfig().training(train_batch_size=400, minibatch_size=100, lr=5e-3, gamma=0.5)


def weights_of(algorithm: Algorithm, policy_id: str) -> np.ndarray:
    weights = algorithm.get_weights()[policy_id]
    return np.concatenate([weights[name].ravel() for name in sorted(weights)])


def trained(config: AlgorithmConfig, wanted: float, iterations: int, agent: str | None = None) -> float:
    """The return of an evaluation after training until the mean return is reached."""
    with config.build() as algorithm:
        for _ in range(iterations):
            result = algorithm.train()["env_runners"]
            mean = result["agent_episode_returns_mean"].get(agent, -np.inf) if agent else result["episode_return_mean"]
            if mean >= wanted:
                break
        result = algorithm.evaluate()["env_runners"]
        return float(result["agent_episode_returns_mean"][agent] if agent else result["episode_return_mean"])


def test_ppo_learns_with_a_policy_for_each_agent() -> None:
    """10 is the largest return: two agents, five steps. One policy alone cannot reach more than 5."""
    assert trained(convoy(ppo()), 9.0, 30) >= 9.0


@pytest.mark.slow
def test_dqn_learns_with_a_policy_for_each_agent() -> None:
    config = DQNConfig().training(
        gamma=0.5, num_steps_sampled_before_learning_starts=200, training_intensity=8,
        epsilon=[[0, 1.0], [2000, 0.02]], lr=2e-3, n_step=1, target_network_update_freq=50,
    )  # fmt: skip
    assert trained(convoy(config.env_runners(rollout_fragment_length=16)), 8.5, 12) >= 9.0


@pytest.mark.slow
@pytest.mark.parametrize("config", [IMPALAConfig(), APPOConfig()])
def test_impala_and_appo_learn_with_a_policy_for_each_agent(config: AlgorithmConfig) -> None:
    config = convoy(config.copy().training(train_batch_size=80, lr=5e-3, gamma=0.5))
    config.env_runners(num_env_runners=0, rollout_fragment_length=10).reporting(min_env_steps_per_iteration=800)
    assert trained(config, 9.5, 12) >= 9.5


@pytest.mark.slow
def test_one_policy_learns_for_agents_that_come_and_go() -> None:
    """Each worker takes three steps, the last one two: 29 is the largest return."""
    config = PPOConfig().environment(Shift).training(train_batch_size=400, minibatch_size=200, lr=3e-3, gamma=0.0)
    config.env_runners(num_envs_per_env_runner=4).debugging(seed=0)
    with config.build() as algorithm:
        assert list(algorithm.env_runner.policy_map) == ["default_policy"]
        results = [algorithm.train()["env_runners"] for _ in range(15)]
        result = results[-1]
        assert result["num_agent_steps_sampled"] > result["num_env_steps_sampled"]
        assert set(result["module_episode_returns_mean"]) == {"default_policy"}
        assert algorithm.evaluate()["env_runners"]["episode_return_mean"] >= 27.5


def test_results_are_by_policy() -> None:
    with convoy(ppo().training(num_epochs=1)).build() as algorithm:
        result = algorithm.train()
        learners = result["learners"]
        assert learners.keys() == {"first", "second"}
        for each in learners.values():
            assert each["num_agent_steps_trained"] == 400
            assert {"policy_loss", "vf_loss", "entropy", "curr_lr"} <= each["learner_stats"].keys()
        assert result["info"]["num_env_steps_trained"] == 400
        assert result["info"]["num_agent_steps_trained"] == 800
        runners = result["env_runners"]
        assert runners["num_env_steps_sampled"] == 400
        assert runners["num_agent_steps_sampled"] == 800
        assert runners["agent_episode_returns_mean"].keys() == {"first", "second"}
        assert sum(runners["policy_reward_mean"].values()) == pytest.approx(runners["episode_return_mean"])
        assert not np.array_equal(weights_of(algorithm, "first"), weights_of(algorithm, "second"))
        assert "first:" in str(result)


def test_policies_that_are_not_trained_stay_as_they_are() -> None:
    config = convoy(ppo()).multi_agent(policies_to_train=["second"])
    with config.build() as algorithm:
        before = {name: weights_of(algorithm, name) for name in ("first", "second")}
        result = algorithm.train()
        assert result["learners"].keys() == {"second"}
        assert result["info"]["num_agent_steps_trained"] == 400
        assert np.array_equal(before["first"], weights_of(algorithm, "first"))
        assert not np.array_equal(before["second"], weights_of(algorithm, "second"))
    chosen = convoy(ppo()).multi_agent(policies_to_train=lambda name, batch: name == "first")
    with chosen.build() as algorithm:
        assert algorithm.train()["learners"].keys() == {"first"}


def test_a_policy_that_a_function_stops_training_is_not_updated_from_replay() -> None:
    trained = {"first", "second"}
    config = convoy(DQNConfig()).multi_agent(policies_to_train=lambda policy_id, batch: policy_id in trained)
    config.training(num_steps_sampled_before_learning_starts=50).reporting(min_env_steps_per_iteration=200)
    with config.env_runners(rollout_fragment_length=20).build() as algorithm:
        assert algorithm.train()["learners"].keys() == {"first", "second"}
        trained.remove("second")
        learners: dict[str, Any] = {name: algorithm.get_policy(name) for name in ("first", "second")}
        updates = {name: policy.learner.updates for name, policy in learners.items()}
        assert algorithm.train()["learners"].keys() == {"first"}
        assert learners["first"].learner.updates > updates["first"]
        assert learners["second"].learner.updates == updates["second"]


def test_replay_needs_policies_with_modules() -> None:
    class Learns(Always):
        def learn_on_batch(self, batch: Any) -> dict[str, Any]:
            return {}

    policies = {"first": PolicySpec(), "second": PolicySpec(Learns)}
    for to_train in (None, lambda policy_id, batch: True):
        config = convoy(DQNConfig()).multi_agent(policies=policies, policies_to_train=to_train)
        with pytest.raises(UsageError, match="the policy 'second' is a Learns: leave it out"):
            config.build().train()


def test_policies_of_fixed_rules_and_settings_by_policy() -> None:
    policies: dict[str, Any] = {
        "learner": PolicySpec(config={"lr": 0.5, "model_config": {"fcnet_hiddens": (8,)}}),
        "fixed": PolicySpec(Always, config={}), "random": Anything,
    }  # fmt: skip
    config = (
        ppo()
        .environment(Convoy)
        .multi_agent(policies=policies, policy_mapping_fn=lambda a, e: "learner" if a == "first" else "fixed")
    )
    with pytest.raises(UsageError, match=r"the policy 'fixed' \(Always\) has no learn_on_batch"):
        config.copy().build()
    with config.multi_agent(policies_to_train={"learner"}).build() as algorithm:
        result = algorithm.train()
        assert result["learners"]["learner"]["learner_stats"]["curr_lr"] == 0.5
        assert algorithm.get_module("learner").encoder[1].out_features == 8
        assert isinstance(algorithm.get_policy("random"), Anything)


@pytest.mark.parametrize("config", [ppo(), DQNConfig().training(num_steps_sampled_before_learning_starts=64)])
def test_a_restored_run_goes_on_exactly(tmp_path: Path, config: AlgorithmConfig) -> None:
    """Episodes go on, and actions whose results were missing get them."""
    config = convoy(config.copy().training(train_batch_size=66).reporting(min_env_steps_per_iteration=1), seed=5)
    if isinstance(config, PPOConfig):
        config.training(minibatch_size=33)
    else:
        config.env_runners(rollout_fragment_length=17)
    with config.build() as whole:
        results = [whole.train() for _ in range(4)]
        expected = {name: weights_of(whole, name) for name in ("first", "second")}
    with config.build() as first:
        first.train()
        first.train()
        first.save(tmp_path / "checkpoint")
        first.train()
    with Algorithm.from_checkpoint(tmp_path / "checkpoint") as second:
        second.train()
        result = second.train()
        for name, weights in expected.items():
            assert np.array_equal(weights_of(second, name), weights), name
    for name in ("env_runners", "learners", "training_iteration", "timesteps_total"):
        assert result[name] == results[-1][name], name


def test_actions_of_policies() -> None:
    with convoy(ppo()).build() as algorithm:
        actions = algorithm.compute_actions({"first": 0, "second": 1}, explore=False)
        assert set(actions) == {"first", "second"}
        for name in ("first", "second"):
            single = algorithm.compute_single_action(1, policy_id=name, explore=False)
            many = algorithm.compute_actions({5: 1, 6: 1}, policy_id=name, explore=False)
            assert many == {5: single, 6: single}
        with pytest.raises(UsageError, match=r"no policy 'fist'. Did you mean 'first'"):
            algorithm.compute_actions({"first": 0}, policy_id="fist")
        with pytest.raises(UsageError, match=r"no policy 'default_policy'. Valid: first, second"):
            algorithm.get_policy()
        module = algorithm.env_runner.module
        assert isinstance(module, MultiAgentRLModule)
        assert module["first"] is algorithm.get_module("first")
        assert isinstance(module["second"], RLModule)
        assert (list(module), len(module), "third" in module) == (["first", "second"], 2, False)


def test_steps_of_agents_may_be_counted() -> None:
    config = convoy(ppo().training(num_epochs=1)).multi_agent(count_steps_by="agent_steps")
    with config.build() as algorithm:
        result = algorithm.train()
        assert result["info"]["num_agent_steps_trained"] == 400
        assert result["env_runners"]["num_env_steps_sampled"] == 200
        batch = synchronous_parallel_sample(worker_set=algorithm.env_runner_group, max_agent_steps=16)
        assert isinstance(batch, MultiAgentBatch)
        assert (batch.agent_steps(), batch.env_steps()) == (16, 8)


def test_replay_by_policy() -> None:
    config = convoy(DQNConfig().training(num_steps_sampled_before_learning_starts=0))
    config.reporting(min_env_steps_per_iteration=80)
    with config.env_runners(rollout_fragment_length=8).build() as algorithm:
        result = algorithm.train()
        replay = algorithm.replay  # type: ignore[attr-defined]
        assert isinstance(replay, MultiAgentReplayBuffer)
        assert replay.buffers.keys() == {"first", "second"}
        assert all(isinstance(each, PrioritizedReplayBuffer) for each in replay.buffers.values())
        assert result["learners"]["first"]["num_agent_steps_trained"] > 0


def test_a_sac_for_copies_of_one_environment() -> None:
    config = SACConfig().environment(make_multi_agent(Target), env_config={"num_agents": 2})
    config.training(num_steps_sampled_before_learning_starts=20, train_batch_size=32)
    config.env_runners(rollout_fragment_length=20)
    with config.reporting(min_env_steps_per_iteration=40).build() as algorithm:
        result = algorithm.train()
        assert result["env_runners"]["num_agent_steps_sampled"] == 2 * result["env_runners"]["num_env_steps_sampled"]
        assert result["learners"]["default_policy"]["num_agent_steps_trained"] > 0


def alternating(context: Any) -> Scripted:
    script = [Event(("a",)), Event(("b",), {"a": 1.0}), Event((), {"b": 1.0}, terminated=("__all__",))]
    env = Scripted([script])
    env.possible_agents = ("a", "b")
    return env


@pytest.mark.slow
def test_remote_runners_make_the_same_batches(tmp_path: Path) -> None:
    """Two remote runners give, row for row, what two local ones with their numbers give; one is killed later."""
    settings: dict[str, Any] = {"policies": ["a", "b"], "num_envs": 2, "seed": 9}
    config = PGConfig().environment(alternating).multi_agent(policies=["a", "b"]).env_runners(num_env_runners=2)
    config.env_runners(num_envs_per_env_runner=2).training(train_batch_size=40).debugging(seed=9)
    with config.build() as algorithm:
        group = algorithm.env_runner_group
        local = [
            MultiAgentEnvRunner(
                alternating, worker_index=i, num_workers=2, infos=False, new_obs=False,
                **{**config.runner_policies(), **settings},
            )
            for i in (1, 2)
        ]  # fmt: skip
        for runner in local:
            runner.set_weights(group.local_env_runner.get_weights())
        remote = group.sample(36)
        assert remote == MultiAgentBatch.concat_samples([runner.sample(18) for runner in local])
        group.take_stats()
        assert algorithm.train()["learners"]["b"]["num_agent_steps_trained"] == 20
        pid = group.foreach_worker(lambda runner: os.getpid(), local_env_runner=False)[0]
        os.kill(pid, signal.SIGKILL)
        result = algorithm.train()["env_runners"]
        assert result["num_env_steps_sampled"] == 40
        assert result["episode_return_mean"] == 2.0
        weights = algorithm.get_weights()["a"]
        for its in group.foreach_worker(lambda runner: runner.get_weights()["a"], local_env_runner=False):
            assert all(np.array_equal(weights[name], its[name]) for name in weights)


@pytest.mark.slow
def test_two_policies_balance_a_pole_each() -> None:
    """The copies of CartPole are independent, and each has its policy: 400 steps of each pole."""
    config = (
        PPOConfig()
        .environment(make_multi_agent("CartPole-v1"), env_config={"num_agents": 2})
        .multi_agent(policies={"p0", "p1"}, policy_mapping_fn=lambda agent_id, episode: f"p{agent_id}")
        .training(train_batch_size=1024, minibatch_size=128)
        .debugging(seed=0)
    )
    assert trained(config, 900.0, 60) >= 800.0


def test_weights_of_the_policies_that_are_named_are_sent() -> None:
    """RLlib's argument ``policies`` was taken, and all policies were sent."""
    env = make_multi_agent("CartPole-v1")
    group = EnvRunnerGroup(
        policy_class=ModulePolicy, env_creator=env, policies=["a", "b"], env_config={"num_agents": 2},
        policy_mapping_fn=lambda agent, episode: "ab"[agent], connectors=[ObservationNormalizer()],
    )  # fmt: skip
    group.keep_weights()
    before = group.kept_weights[0]
    local = group.local_env_runner
    changed = {name: {key: each + 1 for key, each in before[name].items()} for name in ("a", "b")}
    local.set_weights(changed)
    group.keep_weights(["b"])
    after = group.kept_weights[0]
    assert after.keys() == before.keys()
    for key, each in before["a"].items():
        assert np.array_equal(after["a"][key], each)
        assert np.array_equal(after["b"][key], changed["b"][key])
    group.sync_weights(policies=("a", "b"), inference_only=True)
    with pytest.raises(UsageError, match="there is no policy 'c'"):
        group.sync_weights(policies=["c"])
    with pytest.raises(UsageError, match="sync_weights\\(to_worker_indices=…\\): there is no such argument"):
        group.sync_weights(to_worker_indices=[1])
