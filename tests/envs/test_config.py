"""Settings: sections, older names, and errors before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from rlmesh.envs import (
    A2CConfig,
    Algorithm,
    AlgorithmConfig,
    PGConfig,
    PolicySpec,
    PPOConfig,
    get_algorithm_class,
    register_env,
)
from rlmesh.envs.algorithms.settings import ALIASES, SECTIONS
from rlmesh.envs.environments.registry import unregister_env
from rlmesh.errors import UsageError

from .environments import Count


def test_sections_set_their_own_settings() -> None:
    config = (
        PPOConfig()
        .environment("CartPole-v1", env_config={"max_episode_steps": 10})
        .env_runners(num_env_runners=2, num_envs_per_env_runner=4)
        .training(lr=[[0, 1e-3], [1000, 0.0]], train_batch_size=512, lambda_=0.9)
        .evaluation(evaluation_interval=3)
        .fault_tolerance(max_env_runner_restarts=5)
        .rl_module(model_config={"fcnet_hiddens": (8,)})
        .learners(num_learners=0)
        .multi_agent(policies={"default_policy"})
        .debugging(seed=3)
        .reporting(metrics_num_episodes_for_smoothing=7)
        .framework("torch")
        .resources(num_gpus=0)
    )
    assert (config["train_batch_size"], config.lambda_, config.get("num_env_runners")) == (512, 0.9, 2)
    config.validate()
    assert "num_env_runners=2" in repr(config)
    assert "clip_param" not in repr(config)


def test_older_names_are_accepted() -> None:
    config = (
        PPOConfig().rollouts(num_rollout_workers=3).training(sgd_minibatch_size=64, num_sgd_iter=4, **{"lambda": 0.5})
    )
    assert (config.num_env_runners, config.minibatch_size, config.num_epochs, config.lambda_) == (3, 64, 4, 0.5)
    assert config["num_workers"] == 3
    assert config.from_dict({"num_workers": 2, "gamma": 0.5}).gamma == 0.5
    names = {name for settings in SECTIONS.values() for name in settings} | {"lambda_"}
    assert set(ALIASES.values()) <= names
    assert not set(ALIASES) & names


def test_unknown_settings_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(
        UsageError, match=r"PPOConfig.training has no setting 'train_batchsize'. Did you mean 'train_batch_size'"
    ):
        PPOConfig().training(train_batchsize=1)
    with pytest.raises(UsageError, match=r"no setting 'num_env_runners'. It belongs to env_runners\(…\)"):
        PPOConfig().training(num_env_runners=1)
    with pytest.raises(UsageError, match="Did you mean 'gamma'"):
        PPOConfig().gama = 0.9
    with pytest.raises(AttributeError, match="Did you mean 'environment'"):
        PPOConfig().enviroment("CartPole-v1")
    with pytest.raises(AttributeError, match="Did you mean 'gamma'"):
        PPOConfig().gama  # noqa: B018
    with pytest.raises(UsageError, match=r"batch_mode=…\): fragments of episodes are bootstrapped"):
        PPOConfig().env_runners(batch_mode="complete_episodes")
    with pytest.raises(UsageError, match="no setting 'clip_param'"):
        PGConfig().training(clip_param=0.1)


def test_all_faults_come_in_one_error() -> None:
    config = (
        PPOConfig().training(lr="fast", gamma=1.5, train_batch_size=0, minibatch_size=2).env_runners(num_env_runners=-1)
    )
    with pytest.raises(UsageError) as caught:
        config.build()
    text = str(caught.value)
    assert "PPOConfig has 6 faults" in text
    for fault in ("lr: a number between 0 and 1, or points", "gamma: a number between 0 and 1, not 1.5",
                  "train_batch_size: a whole",
                  "num_env_runners: a whole number between 0 and 10000, not -1", "environment(…): name an environment",
                  "minibatch_size=2 is larger"):  # fmt: skip
        assert fault in text
    with pytest.raises(UsageError, match="Did you mean 'CartPole-v"):
        PPOConfig().environment("CartPoll-v1").build()
    with pytest.raises(UsageError, match="num_learners: a whole number between 0 and 10000, not -2"):
        PPOConfig().environment("CartPole-v1").learners(num_learners=-2).build()
    with pytest.raises(UsageError, match=r"the environment .*CartPole-v1.* has one agent"):
        PPOConfig().environment("CartPole-v1").multi_agent(policies={"a", "b"}).build()


def test_a_built_algorithm_keeps_its_settings() -> None:
    config = PPOConfig().environment("CartPole-v1").training(train_batch_size=64, minibatch_size=32)
    with config.build() as algorithm:
        config.training(train_batch_size=128)  # the algorithm has a copy
        assert algorithm.config["train_batch_size"] == 64
        with pytest.raises(UsageError, match=r"the algorithm is built; change a copy\(\)"):
            algorithm.config.training(lr=1.0)
        assert algorithm.config.copy().training(lr=1.0).lr == 1.0


def test_environments_by_name_class_and_creator() -> None:
    register_env("count", lambda context: Count(tuple(context["lengths"])))
    try:
        for env, settings in (
            ("count", {"lengths": [4]}), (Plain, {}), (Configured, {"size": 4}), (lambda context: Count((4,)), {}),
        ):  # fmt: skip
            config = PGConfig().environment(env, env_config=settings).training(train_batch_size=16)
            with config.env_runners(num_envs_per_env_runner=2).build() as algorithm:
                assert algorithm.train()["env_runners"]["episode_len_mean"] == 4
    finally:
        unregister_env("count")
    with pytest.raises(UsageError, match="there is no environment 'count'"):
        PGConfig().environment("count").build()


class Plain(Count):
    def __init__(self) -> None:
        super().__init__((4,))


class Configured(Count):
    def __init__(self, config: Any) -> None:
        super().__init__((config["size"],))


def test_algorithms_by_name() -> None:
    for name in ("PPO", "PG", "VPG", "A2C"):
        assert issubclass(get_algorithm_class(name), Algorithm)
        assert isinstance(get_algorithm_class(name).get_default_config(), AlgorithmConfig)
    assert A2CConfig().lambda_ == 1.0
    with pytest.raises(UsageError, match=r"no algorithm 'PPPO'. Did you mean 'PPO'"):
        get_algorithm_class("PPPO")


def test_two_names_of_one_setting_are_refused() -> None:
    """The one that came last had an effect: a schedule was lost beside ``lr``."""
    with pytest.raises(UsageError, match="'lr_schedule' and 'lr' are names of one setting"):
        PPOConfig().training(lr_schedule=[[0, 1e-3], [100, 0.0]], lr=5e-5)
    with pytest.raises(UsageError, match="'num_workers' and 'num_env_runners' are names"):
        PPOConfig.from_dict({"num_workers": 2, "lr": 1e-3, "num_env_runners": 0})
    with pytest.raises(UsageError, match="'gae_lambda' and 'lambda' are names"):
        config = PPOConfig().environment("CartPole-v1")
        config.multi_agent(policies={"a": PolicySpec(config={"gae_lambda": 0.9, "lambda": 0.8})}).build()
    assert PPOConfig().training(lr=1e-3).training(lr_schedule=[[0, 1e-3], [9, 0.0]])["lr"] == [[0, 1e-3], [9, 0.0]]
