"""Several learners: together they do what one learner does with the whole batch."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlmesh.envs import (
    ActorCriticModule,
    EnvRunner,
    IMPALAConfig,
    LearnerGroup,
    MARWILConfig,
    ModulePolicy,
    MultiAgentBatch,
    Policy,
    PPOConfig,
    SampleBatch,
)
from rlmesh.envs.algorithms.algorithm_config import AlgorithmConfig
from rlmesh.envs.learners.learner import Learner
from rlmesh.envs.learners.partners import LearnerShare, Partners
from rlmesh.envs.learners.remote.learners import RemoteLearners, shares_of
from rlmesh.errors import RLMeshError, UsageError

from .recurrent.tasks import MODELS, Exact, ToDouble


class Doubled(ActorCriticModule):
    """The built-in module in float64, so that learners can be compared beyond rounding."""

    def setup(self) -> None:
        super().setup()
        assert isinstance(self.encoder, torch.nn.Sequential)
        assert isinstance(self.value_encoder, torch.nn.Sequential)
        self.encoder[0] = self.value_encoder[0] = ToDouble()  # instead of the layer that makes float32
        self.double()


class ThreadPartners(Partners):
    """Learners in threads of this process, whose sums meet at a barrier."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.tensors: list[torch.Tensor] = []
        self.lock, self.barrier = threading.Lock(), threading.Barrier(size)

    def add(self, tensor: torch.Tensor) -> None:
        with self.lock:
            self.tensors.append(tensor)
        self.barrier.wait(30)
        total = torch.stack([each.detach() for each in self.tensors]).sum(0)
        self.barrier.wait(30)
        tensor.detach().copy_(total)
        self.tensors = []
        self.barrier.wait(30)


def settings_of(kind: str) -> AlgorithmConfig:
    config: AlgorithmConfig
    kind, _, memory = kind.partition("-")
    whole, memory = memory == "batch", memory if memory != "batch" else ""
    if kind == "PPO":
        config = PPOConfig().training(train_batch_size=96, minibatch_size=20, num_epochs=3, kl_coeff=0.2, lr=3e-3)
        config = config.training(standardize_advantages="batch" if whole else True)
    else:
        config = IMPALAConfig().training(train_batch_size=96, num_epochs=3, lr=3e-3).env_runners(num_env_runners=0)
    model = {"module_class": Exact, "model_config": MODELS[memory]} if memory else {"module_class": Doubled}
    return config.environment("CartPole-v1").rl_module(**model).debugging(seed=4)


def batch_for(config: AlgorithmConfig, fragments: tuple[int, ...] = (9, 25, 14)) -> SampleBatch:
    """Fragments of some lengths of two environments, sampled by another policy than that which learns."""
    more = {"estimate_advantages": config.get("estimate_advantages"), "gamma": 0.99, "lambda_": 0.95, "seed": 1}
    more |= {name: config[name] for name in ("module_class", "model_config") if config["model_config"]}
    runner = EnvRunner("CartPole-v1", ModulePolicy, policy_config=more, num_envs=2, seed=1)
    batch: SampleBatch = SampleBatch.concat_samples([runner.sample(2 * steps) for steps in fragments])
    real = {name: column.astype(np.float64) for name, column in batch.items() if column.dtype == np.float32}
    return SampleBatch({**batch, **real})


def policy_of(config: AlgorithmConfig) -> ModulePolicy:
    space = gym.make("CartPole-v1")
    given = {**config.policy_config(), "seed": 4}
    return ModulePolicy(space.observation_space, space.action_space, given)


def parameters(policy: ModulePolicy) -> np.ndarray:
    weights = policy.get_weights()
    return np.concatenate([weights[name].ravel() for name in sorted(weights)])


def together(learners: list[Learner], shares: list[tuple[SampleBatch, LearnerShare]]) -> list[Any]:
    """The results of updates at the same time."""
    results: list[Any] = [None] * len(learners)

    def run(i: int) -> None:
        try:
            results[i] = learners[i].update_share(*shares[i])
        except BaseException as error:
            results[i] = error
            if not isinstance(error, FloatingPointError):  # which all raise
                learners[i].partners.barrier.abort()  # type: ignore[attr-defined]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(learners))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.mark.parametrize("kind", ["PPO", "PPO-batch", "IMPALA", "PPO-lstm", "PPO-attention", "IMPALA-lstm"])
@pytest.mark.parametrize("bounds", [(0, 48, 96), (0, 10, 96), (0, 30, 31, 96), (0, 0, 96)])
def test_uneven_shares_give_the_gradients_of_the_whole_batch(kind: str, bounds: tuple[int, ...]) -> None:
    config = settings_of(kind)
    batch = batch_for(config)
    alone = policy_of(config)
    edges = alone.learner.edges(batch)
    places = [0, *(int(edges[np.abs(edges - each).argmin()]) for each in bounds[1:-1]), len(batch)]
    partners = ThreadPartners(len(places) - 1)
    policies = [policy_of(config) for _ in places[1:]]
    for policy in policies:
        policy.learner.partners = partners
    for _ in range(3):
        expected = alone.learner.update(batch)
        shares = alone.learner.shares(batch, places)
        results = together([policy.learner for policy in policies], shares)
        for policy, result in zip(policies, results, strict=True):
            assert isinstance(result, dict), result
            np.testing.assert_allclose(parameters(policy), parameters(alone), rtol=1e-6, atol=1e-9)
            assert np.array_equal(parameters(policy), parameters(policies[0]))  # bit for bit
            assert result.keys() == expected.keys()
            for name in result:
                assert result[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name


def test_a_loss_that_is_no_number_at_one_learner_changes_none() -> None:
    config = settings_of("PPO")
    batch = batch_for(config)
    batch["advantages"] = np.where(np.arange(len(batch)) == 3, np.nan, batch["advantages"])
    partners = ThreadPartners(2)
    policies = [policy_of(config) for _ in range(2)]
    before = parameters(policies[0])
    for policy in policies:
        policy.learner.partners = partners
    shares = [(batch[:40], LearnerShare(0, 96)), (batch[40:], LearnerShare(40, 96))]
    assert [type(each) for each in together([p.learner for p in policies], shares)] == [FloatingPointError] * 2
    assert all(np.array_equal(parameters(policy), before) for policy in policies)


def test_marwil_keeps_its_average_if_an_update_fails() -> None:
    config = MARWILConfig().environment("CartPole-v1")
    space = gym.make("CartPole-v1")
    policy = ModulePolicy(space.observation_space, space.action_space, {**config.policy_config(), "seed": 0})
    learner: Any = policy.learner
    before, weights = learner.squared_norm, parameters(policy)
    batch = SampleBatch({
        "obs": np.zeros((4, 4), np.float32), "actions": np.zeros(4, np.int64),
        "value_targets": np.full(4, 1e30, np.float32),
    })  # fmt: skip
    with pytest.raises(FloatingPointError):
        policy.learn_on_batch(batch)
    assert learner.squared_norm == before
    assert np.array_equal(parameters(policy), weights)


def test_policies_of_fixed_rules_need_no_remote_learners(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    class NoJob:
        def __init__(self, policies: Any, number: int, **settings: Any) -> None:
            given.update(policies)

        def update(self, parts: Any) -> Any:
            return {name: {} for name in parts}

    monkeypatch.setattr("rlmesh.envs.learners.remote.learners.RemoteLearners", NoJob)
    env = gym.make("CartPole-v1")
    policies = {
        "red": ModulePolicy(env.observation_space, env.action_space),
        "blue": Policy(env.observation_space, env.action_space),
    }
    batch = MultiAgentBatch({name: SampleBatch(obs=np.zeros((2, 4), np.float32)) for name in policies}, 2)
    group = LearnerGroup(policies, lambda name, batch: name == "red", num_learners=2)
    assert (list(given), list(group.update(batch))) == (["red"], ["red"])
    with pytest.raises(UsageError, match="policies_to_train names 'blue', and Policy has no learn_on_batch"):
        LearnerGroup(policies, lambda name, batch: True, num_learners=2).update(batch)


def test_learners_have_a_deadline_also_without_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteLearners, "_start", lambda self, *_: None)
    assert RemoteLearners({}, 2, timeout_s=None).timeout_s == 600


def test_shares_begin_at_edges() -> None:
    assert shares_of(10, np.arange(10), 3) == [0, 3, 6, 10]
    assert shares_of(10, np.array([0, 7]), 2) == [0, 7, 10]
    assert shares_of(10, np.array([0]), 3) == [0, 0, 10, 10]
    assert shares_of(2, np.arange(2), 4) == [0, 0, 1, 1, 2]


def pids_of(group: LearnerGroup) -> list[int]:
    assert group._remote is not None
    found = group._remote._group.call("pid").result()
    return [int(pid) for pid in found]


def compared(group: LearnerGroup, config: AlgorithmConfig, one: ModulePolicy, act: Callable[[int], None]) -> None:
    """Updates of the group and of one learner; ``act(i)`` is called before each of them."""
    for i in range(4):
        act(i)
        batch = batch_for(config, (9 + i, 25, 14))
        result = group.update(batch)["default_policy"]
        expected = one.learn_on_batch(batch)
        policy = group.policies["default_policy"]
        assert isinstance(policy, ModulePolicy)
        np.testing.assert_allclose(parameters(policy), parameters(one), rtol=1e-6, atol=1e-9)
        assert result["num_agent_steps_trained"] == len(batch)
        assert result["learner_stats"]["total_loss"] == pytest.approx(
            expected["learner_stats"]["total_loss"], rel=1e-4, abs=1e-5
        )


@pytest.mark.parametrize(
    "kind",
    ["PPO", pytest.param("IMPALA", marks=pytest.mark.slow), pytest.param("PPO-lstm", marks=pytest.mark.slow)],
)
def test_remote_learners_update_as_one_and_come_back_with_the_last_weights(kind: str, tmp_path: Path) -> None:
    config = settings_of(kind)
    policy, one = policy_of(config), policy_of(config)
    with LearnerGroup({"default_policy": policy}, num_learners=2, timeout_s=60, run_dir=str(tmp_path / "run")) as group:
        assert len(group) == 2

        def act(i: int) -> None:
            if i == 1:  # a learner dies between two updates
                os.kill(pids_of(group)[1], signal.SIGKILL)
            elif i == 2:  # weights and optimizer are set here, not at the learners
                group.save(tmp_path / "state")
                group.set_weights({"default_policy": {n: v * 0 for n, v in policy.get_weights().items()}})
                group.restore(tmp_path / "state")
                policy.set_weights({name: value * 0.5 for name, value in policy.get_weights().items()})
                one.set_weights({name: value * 0.5 for name, value in one.get_weights().items()})

        compared(group, config, one, act)
        bad = batch_for(config)
        with pytest.raises(UsageError, match="needs the column 'actions'"):
            group.update(SampleBatch({name: bad[name] for name in bad if name != "actions"}))
        before = parameters(policy)
        bad["action_logp"] = np.where(np.arange(len(bad)) == 90, np.nan, bad["action_logp"])
        with pytest.raises(FloatingPointError, match="policy_loss"):
            group.update(bad)
        assert np.array_equal(parameters(policy), before)
        good = batch_for(config)
        group.update(good)  # the group goes on
    with pytest.raises(UsageError, match="the learners have ended: they were stopped"):
        group.update(good)


@pytest.mark.slow
def test_a_learner_that_dies_within_an_update_repeats_it(tmp_path: Path) -> None:
    config = settings_of("PPO").training(num_epochs=100)
    policy, one = policy_of(config), policy_of(config)
    batch = batch_for(config)
    with LearnerGroup({"default_policy": policy}, num_learners=2, timeout_s=60, run_dir=str(tmp_path / "r")) as group:
        group.update(batch)
        one.learn_on_batch(batch)
        victim = pids_of(group)[0]
        timer = threading.Timer(0.3, os.kill, (victim, signal.SIGKILL))
        timer.start()
        group.update(batch)
        timer.join()
        one.learn_on_batch(batch)
        assert victim not in pids_of(group)
        np.testing.assert_allclose(parameters(policy), parameters(one), rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_learners_that_die_too_often_end_with_an_error_and_the_last_weights(tmp_path: Path) -> None:
    config = settings_of("IMPALA")
    policy = policy_of(config)
    batch = batch_for(config)
    with LearnerGroup(
        {"default_policy": policy}, num_learners=2, timeout_s=60, max_restarts=0, run_dir=str(tmp_path / "run")
    ) as group:
        group.update(batch)
        weights = parameters(policy)
        os.kill(pids_of(group)[1], signal.SIGKILL)
        with pytest.raises(RLMeshError):
            group.update(batch)
        assert np.array_equal(parameters(policy), weights)
        with pytest.raises(UsageError, match="the learners have ended"):
            group.update(batch)


def test_settings_that_cannot_work_are_refused_before_anything_starts() -> None:
    from rlmesh.envs import DQNConfig

    with pytest.raises(UsageError, match="num_learners: DQN learns from whole batches, in this process; set 0"):
        DQNConfig().environment("CartPole-v1").learners(num_learners=2).build()
    config = PPOConfig().environment("CartPole-v1").learners(num_learners=2)
    with pytest.raises(UsageError, match="train_batch_size_per_learner: batch sizes are of all learners together"):
        config.training(train_batch_size_per_learner=512).build()
    with pytest.raises(UsageError, match=r"LearnerGroup\(num_learners=-1\)"):
        LearnerGroup({}, num_learners=-1)
    with pytest.raises(UsageError, match="max_requests_in_flight_per_env_runner: PPO waits for its runners"):
        PPOConfig().environment("CartPole-v1").env_runners(max_requests_in_flight_per_env_runner=2).build()

    class Own(Learner):
        def update(self, batch: Any) -> dict[str, float]:
            return {}

    space = gym.make("CartPole-v1")
    policy = ModulePolicy(space.observation_space, space.action_space, {"learner_class": Own})
    with pytest.raises(UsageError, match="policy 'default_policy' learns by Own, which takes whole batches"):
        LearnerGroup({"default_policy": policy}, num_learners=1)
