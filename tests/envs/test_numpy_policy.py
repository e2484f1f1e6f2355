"""Remote runners act in NumPy where that is possible: with the same numbers, and without torch."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from rlmesh.envs import ActorCriticModule, EnvRunner, EnvRunnerGroup, ModulePolicy, PPOConfig
from rlmesh.envs.batches import columns
from rlmesh.envs.modules.numpy_policy import NumpyPolicy, numpy_arguments
from rlmesh.envs.runners.base import DEFAULT_POLICY


def runners(env: str, **config: Any) -> tuple[EnvRunner, EnvRunner]:
    """A runner with the module, and one that acts in NumPy with the same weights."""
    given = {
        "env_creator": env, "policy_class": ModulePolicy, "num_envs": 3, "seed": 4, "new_obs": False, "infos": False,
        "policy_config": {"estimate_advantages": True, "gamma": 0.97, "lambda_": 0.9, "model_config": config},
    }  # fmt: skip
    whole = EnvRunner(**given)  # type: ignore[arg-type]
    other = {**given, **numpy_arguments(whole, given)}
    assert other["policy_class"] is NumpyPolicy
    fast = EnvRunner(**other)
    weights = whole.get_weights()
    for name, value in weights[DEFAULT_POLICY].items():  # biases too
        value += np.random.default_rng(len(name)).normal(0, 0.1, value.shape).astype(value.dtype)
    whole.set_weights(weights)
    fast.set_weights(weights)
    return whole, fast


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_the_numbers_are_those_of_the_module(env: str, activation: str) -> None:
    whole, fast = runners(env, fcnet_activation=activation, fcnet_hiddens=(16, 8))
    for explore in (True, False):
        whole.explore = fast.explore = explore
        one, two = whole.sample(300), fast.sample(300)
        assert one.keys() == two.keys()
        for name in one:
            exact = name not in (columns.VF_PREDS, columns.ACTION_LOGP, columns.ADVANTAGES, columns.VALUE_TARGETS)
            assert one[name].dtype == two[name].dtype
            assert np.array_equal(one[name], two[name]) if exact else np.allclose(one[name], two[name], 1e-4, 1e-4), (
                name
            )


def test_the_whole_policy_is_there_on_demand() -> None:
    whole, fast = runners("CartPole-v1")
    assert isinstance(fast.policy, NumpyPolicy)
    batch = fast.sample(300)
    assert type(fast.policy.module) is ActorCriticModule
    assert fast.policy.explorer(1, 3, explore=True).policy is fast.policy.whole()
    weights = {name: value * 0 for name, value in whole.policy.get_weights().items()}
    fast.set_weights({DEFAULT_POLICY: weights})
    assert not any(value.any() for value in fast.policy.get_weights().values())
    assert not fast.sample(30)[columns.VF_PREDS].any()
    assert len(batch) == 300
    with pytest.raises(AttributeError, match="has no attribute 'modul'"):
        fast.policy.modul  # noqa: B018


def test_a_group_without_settings_of_the_policy() -> None:
    runner = EnvRunner("CartPole-v1", ModulePolicy, seed=0)
    fast = EnvRunner("CartPole-v1", seed=0, **numpy_arguments(runner, {"policy_class": ModulePolicy}))
    fast.set_weights(runner.get_weights())
    assert np.array_equal(fast.sample(50)[columns.ACTIONS], runner.sample(50)[columns.ACTIONS])


class Other(ActorCriticModule):
    """A module of one's own."""


@pytest.mark.parametrize(
    "config",
    [
        {"module_class": Other},
        {"model_config": {"fcnet_activation": "silu"}},
        {"model_config": {"vf_share_layers": True}},
    ],
)
def test_other_modules_act_as_themselves(config: dict[str, Any]) -> None:
    given = {"env_creator": "CartPole-v1", "policy_class": ModulePolicy, "policy_config": config}
    assert numpy_arguments(EnvRunner(**given), given) == {}  # type: ignore[arg-type]


def test_remote_runners_start_without_torch_and_learn() -> None:
    config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=1, num_envs_per_env_runner=2)
    with config.training(train_batch_size=128, minibatch_size=64).debugging(seed=1).build() as algorithm:
        group: EnvRunnerGroup = algorithm.env_runner_group
        before = algorithm.get_weights()[DEFAULT_POLICY]
        algorithm.train()
        stats = algorithm.train()["learners"][DEFAULT_POLICY]["learner_stats"]
        assert np.isfinite(list(stats.values())).all()
        assert group.foreach_worker(lambda runner: "torch" in sys.modules, local_env_runner=False) == [False]
        (remote,) = group.foreach_worker(lambda runner: runner.policy.get_weights(), local_env_runner=False)
        now = algorithm.get_weights()[DEFAULT_POLICY]
        assert all(np.array_equal(remote[name], now[name]) for name in now)
        assert any(not np.array_equal(before[name], now[name]) for name in now)
