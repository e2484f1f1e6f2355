"""Modules of one's own: frozen layers, values of a network of their own, layers that compute something else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rlmesh.envs import (
    ActorCriticModule,
    APPOConfig,
    DQNConfig,
    EnvRunner,
    IMPALAConfig,
    MARWILConfig,
    ModulePolicy,
    PGConfig,
    PPOConfig,
    RLModule,
)
from rlmesh.envs.learners.impala import IMPALALearner
from rlmesh.envs.modules.distributions import distribution_of
from rlmesh.envs.modules.numpy_forward import NumpyForward
from rlmesh.envs.modules.q_module import QModule
from rlmesh.errors import UsageError


class FrozenEncoder(ActorCriticModule):
    def setup(self) -> None:
        super().setup()
        self.encoder.requires_grad_(False)


@pytest.mark.parametrize("config", [PPOConfig, IMPALAConfig])
def test_layers_that_setup_freezes_stay_as_they_are(config: type[PPOConfig]) -> None:
    settings = config().environment("CartPole-v1").env_runners(num_env_runners=0, num_envs_per_env_runner=1)
    settings = settings.training(train_batch_size=40, lr=0.01).rl_module(module_class=FrozenEncoder)
    settings.update_from_dict({"rollout_fragment_length": 20, "min_env_steps_per_iteration": 0, "minibatch_size": None})
    algorithm = settings.build()
    before = {name: value.copy() for name, value in algorithm.get_weights()["default_policy"].items()}
    algorithm.train()
    after = algorithm.get_weights()["default_policy"]
    for name in before:
        assert np.array_equal(before[name], after[name]) == name.startswith("encoder."), name
    algorithm.stop()


class FrozenQ(QModule):
    def setup(self) -> None:
        super().setup()
        self.requires_grad_(False)


class FrozenPolicy(ActorCriticModule):
    def setup(self) -> None:
        super().setup()
        self.requires_grad_(False)


@pytest.mark.parametrize("config", [PPOConfig, DQNConfig])
def test_a_module_that_is_frozen_as_a_whole_can_play_and_not_learn(config: Any) -> None:
    kind = FrozenQ if config is DQNConfig else FrozenPolicy
    settings = config().environment("CartPole-v1").training(train_batch_size=40).rl_module(module_class=kind)
    settings.update_from_dict({"minibatch_size": None, "min_env_steps_per_iteration": 0})
    if config is DQNConfig:
        settings.update_from_dict({"num_steps_sampled_before_learning_starts": 0})
    with settings.build() as algorithm:
        assert len(algorithm.env_runner.sample(20)) >= 20
        with pytest.raises(UsageError, match=f"all parameters of {kind.__name__} were frozen"):
            algorithm.train()


class OwnValues(ActorCriticModule):
    def setup(self) -> None:
        super().setup()
        self.own = nn.Linear(4, 1)

    def forward_train(self, batch: Any) -> dict[str, Any]:
        return {**super().forward_train(batch), "vf_preds": 10 + self.own(batch["obs"]).squeeze(-1)}


def test_advantages_are_by_the_values_that_forward_train_gives() -> None:
    config = {"module_class": OwnValues, "estimate_advantages": True, "gamma": 0.9, "lambda_": 0.0}
    runner = EnvRunner("CartPole-v1", ModulePolicy, policy_config=config, seed=3)
    batch = runner.sample(60)
    module: Any = runner.policy.module  # type: ignore[attr-defined]
    values, after = (module.forward_train({"obs": torch.from_numpy(batch[name])})["vf_preds"] for name in
                     ("obs", "new_obs"))  # fmt: skip
    assert batch["vf_preds"] == pytest.approx(values.detach().numpy(), abs=1e-5)
    later = np.where(batch["terminateds"], 0.0, after.detach().numpy())
    assert batch["advantages"] == pytest.approx(batch["rewards"] + 0.9 * later - values.detach().numpy(), abs=1e-4)


def test_v_trace_bootstraps_from_the_values_that_forward_train_gives() -> None:
    runner = EnvRunner("CartPole-v1", ModulePolicy, policy_config={"module_class": OwnValues}, seed=3)
    batch = runner.sample(7)
    assert not batch["terminateds"].any()
    settings: dict[str, Any] = {"entropy_coeff": 0.0, "vf_loss_coeff": 0.5, "gamma": 0.9}
    settings |= dict.fromkeys(("vtrace_clip_rho_threshold", "vtrace_clip_pg_rho_threshold"))
    learner = IMPALALearner(runner.policy.module, settings)  # type: ignore[attr-defined]
    tensors = learner.tensors_of(batch)
    with torch.no_grad():
        values = learner.module.forward_train(tensors)["vf_preds"]
        last = learner.module.forward_train({"obs": tensors["end_obs"]})["vf_preds"].item()
        targets, _ = learner.traced(tensors, tensors["action_logp"], values)
    returns: list[float] = []
    for reward in batch["rewards"][::-1]:
        last = reward + 0.9 * last
        returns.insert(0, last)
    assert targets.numpy() == pytest.approx(returns, rel=1e-5)


class Shifted(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1.0


class Residual(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + super().forward(x)  # type: ignore[no-untyped-call]
        return found


class OfSubclass(ActorCriticModule):
    def setup(self) -> None:
        super().setup()
        self.encoder = nn.Sequential(Shifted(4, 64), nn.Tanh())


class OfResidual(ActorCriticModule):
    def setup(self) -> None:
        super().setup()
        self.encoder = nn.Sequential(nn.Linear(4, 64), Residual(nn.Linear(64, 64), nn.Tanh()))


class OfHook(ActorCriticModule):
    def setup(self) -> None:
        super().setup()
        assert isinstance(self.encoder, nn.Sequential)
        self.encoder[1].register_forward_hook(lambda layer, given, y: 3 * y)


class OfInstance(ActorCriticModule):
    def setup(self) -> None:
        super().setup()
        layer: Any = self.policy_head[-1]
        forward: Any = nn.Linear.forward
        layer.forward = lambda x: 3 * forward(layer, x) + 1


class OfPruned(ActorCriticModule):
    def setup(self) -> None:
        from torch.nn.utils import prune

        super().setup()
        assert isinstance(self.encoder, nn.Sequential)
        prune.random_unstructured(self.encoder[1], "weight", 0.9)


class OfNorm(ActorCriticModule):
    def setup(self) -> None:
        super().setup()
        assert isinstance(self.encoder, nn.Sequential)
        nn.utils.parametrizations.weight_norm(self.encoder[1])


@pytest.mark.parametrize("kind", [OfSubclass, OfResidual, OfHook, OfInstance, OfPruned, OfNorm])
def test_runners_act_by_the_network_that_is_trained(kind: type[ActorCriticModule]) -> None:
    runner = EnvRunner("CartPole-v1", ModulePolicy, policy_config={"module_class": kind}, seed=3)
    module: Any = runner.policy.module  # type: ignore[attr-defined]
    assert NumpyForward.of(module.exploration_layers()) is None
    batch = runner.sample(40)
    with torch.no_grad():
        trained = module.forward_train({"obs": torch.from_numpy(batch["obs"])})["action_dist_inputs"].numpy()
    assert batch["action_dist_inputs"] == pytest.approx(trained, abs=1e-5)


class NotSqueezed(RLModule):
    """Returns a column of values, ``[rows, 1]``, or of log-probabilities."""

    known_settings: Mapping[str, Any] = {"column": "vf_preds", "acts": False}

    def setup(self) -> None:
        self.distribution = distribution_of(self.action_space)
        self.body = torch.nn.Linear(4, 2 + 1)

    def forward_train(self, batch: Any) -> dict[str, torch.Tensor]:
        out = self.body(batch["obs"])
        column = self.model_config["column"]
        values = out[..., 2:] if column == "vf_preds" else out[..., 2]
        return {"action_dist_inputs": out[..., :2], "vf_preds": values}

    def forward_exploration(self, batch: Any) -> dict[str, torch.Tensor]:
        outputs = self.forward_train(batch)
        if self.model_config["column"] == "vf_preds":
            return outputs if self.model_config["acts"] else {"action_dist_inputs": outputs["action_dist_inputs"]}
        actions = outputs["action_dist_inputs"].argmax(-1)
        return {**outputs, "actions": actions, "action_logp": torch.zeros(len(actions), 1)}


@pytest.mark.parametrize("kind", [PPOConfig, PGConfig, IMPALAConfig, APPOConfig])
@pytest.mark.parametrize("envs", [1, 2])
@pytest.mark.parametrize(
    "model",
    [{"column": "vf_preds"}, {"column": "vf_preds", "acts": True}, {"column": "action_logp"}],
    ids=["values", "values while acting", "log-probabilities"],
)
def test_results_of_a_module_that_are_not_one_per_row_are_refused(kind: Any, envs: int, model: dict[str, Any]) -> None:
    """Values of shape [rows, 1], less targets of shape [rows], are [rows, rows], and the loss means nothing."""
    config = kind().environment("CartPole-v1").rl_module(module_class=NotSqueezed, model_config=model)
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=envs, rollout_fragment_length=20)
    config.training(train_batch_size=40, minibatch_size=None).reporting(min_env_steps_per_iteration=0)
    if kind is APPOConfig:
        config.training(circular_buffer_num_batches=1)
    with config.build() as algorithm:
        column = model["column"]
        with pytest.raises(
            UsageError, match=f"NotSqueezed returned '{column}' with 2 axes: it has one number for each"
        ):
            algorithm.train()


def test_values_of_recorded_steps_that_are_not_one_per_row_are_refused() -> None:
    recorded = EnvRunner("CartPole-v1", ModulePolicy, seed=0, infos=False).sample(40)
    config = MARWILConfig().environment("CartPole-v1").rl_module(module_class=NotSqueezed)
    config.offline_data(input_=recorded).training(train_batch_size=40)
    with config.build() as algorithm, pytest.raises(UsageError, match="NotSqueezed returned 'vf_preds' with 2 axes"):
        algorithm.train()


@pytest.mark.parametrize("name", ["advantages", "value_targets", "action_logp"])
def test_columns_that_are_not_one_per_row_are_refused(name: str) -> None:
    with PPOConfig().environment("CartPole-v1").training(train_batch_size=40, minibatch_size=20).build() as algorithm:
        batch = algorithm.env_runner.sample(40)
        batch[name] = batch[name][:, None]
        with pytest.raises(UsageError, match=rf"the column '{name}' has shape \(40, 1\); it has one number for each"):
            algorithm.learner_group.update(batch)
