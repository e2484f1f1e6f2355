"""Distributions, encoders, and forward passes in NumPy."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlmesh.envs import ActorCriticModule, EnvRunner, ModulePolicy, PPOConfig, RLModule
from rlmesh.envs.learners.flat_adam import FlatAdam
from rlmesh.envs.modules.continuous import SACModule, TD3Module
from rlmesh.envs.modules.distributions import distribution_of
from rlmesh.envs.modules.numpy_forward import NumpyForward
from rlmesh.envs.modules.q_module import QModule
from rlmesh.errors import UsageError

from .environments import Frames

BOX = gym.spaces.Box(-1, 1, (5,), np.float32)
ACTIONS = {
    "discrete": gym.spaces.Discrete(4, start=-1),
    "multi": gym.spaces.MultiDiscrete([2, 3], start=[0, 1]),
    "box": gym.spaces.Box(-0.5, 0.5, (2,), np.float32),
}


@pytest.mark.parametrize("name", ACTIONS)
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_the_pass_in_numpy_equals_that_in_torch(name: str, activation: str) -> None:
    torch.manual_seed(0)
    module = ActorCriticModule(BOX, ACTIONS[name], {"fcnet_activation": activation})
    fast = NumpyForward.of(module.exploration_layers())
    assert fast is not None
    rows = np.random.default_rng(0).standard_normal((7, 3, 5), np.float32)[:, 1]  # rows that are not contiguous
    with torch.inference_mode():
        expected = module.forward_exploration({"obs": torch.from_numpy(rows)})["action_dist_inputs"].numpy()
    assert np.abs(fast(rows) - expected).max() <= 1e-6


def test_other_layers_stay_in_torch() -> None:
    discrete = ActorCriticModule(gym.spaces.Discrete(3), ACTIONS["discrete"])
    assert NumpyForward.of(discrete.exploration_layers()) is None
    wide = ActorCriticModule(BOX, ACTIONS["discrete"], {"fcnet_hiddens": (1024,)})
    assert NumpyForward.of(wide.exploration_layers()) is None
    assert (
        NumpyForward.of(ActorCriticModule(BOX, ACTIONS["box"], {"fcnet_activation": "silu"}).exploration_layers())
        is None
    )


@pytest.mark.parametrize("name", ACTIONS)
def test_samples_have_the_probabilities_that_are_reported(name: str) -> None:
    space = ACTIONS[name]
    distribution = distribution_of(space)
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal(distribution.size, np.float32) * 0.7
    rows = np.tile(inputs, (40_000, 1))
    actions = distribution.sample(rows, distribution.noise(rng, (len(rows),)))
    log_probs = distribution.log_prob(torch.from_numpy(rows), torch.from_numpy(actions)).numpy()
    entropy = distribution.entropy(torch.from_numpy(inputs)).item()
    assert -log_probs.mean() == pytest.approx(entropy, abs=0.03)  # the definition of entropy, on samples
    if name == "box":
        assert actions.mean(0) == pytest.approx(inputs[:2], abs=0.03)
        assert actions.std(0) == pytest.approx(np.exp(inputs[2:]), rel=0.03)
        assert np.abs(distribution.to_env(actions)).max() <= 0.5
        return
    assert all(space.contains(each) for each in (actions[:50] if name == "multi" else list(actions[:50])))
    flat = [tuple(np.atleast_1d(each)) for each in actions]
    counts = {each: flat.count(each) / len(flat) for each in set(flat)}
    for each, share in counts.items():
        probability = math.exp(log_probs[flat.index(each)])
        assert share == pytest.approx(probability, abs=0.01)


@pytest.mark.parametrize("name", ACTIONS)
def test_divergences_are_those_of_samples(name: str) -> None:
    distribution = distribution_of(ACTIONS[name])
    rng = np.random.default_rng(1)
    one, other = (torch.from_numpy(rng.standard_normal(distribution.size, np.float32) * 0.4) for _ in range(2))
    rows = one.expand(60_000, -1)
    actions = torch.from_numpy(distribution.sample(rows.numpy(), distribution.noise(rng, (len(rows),))))
    sampled = distribution.log_prob(rows, actions) - distribution.log_prob(other.expand_as(rows), actions)
    assert distribution.kl(one, other).item() == pytest.approx(sampled.mean().item(), rel=0.03, abs=0.01)
    assert distribution.kl(one, one).item() == pytest.approx(0, abs=1e-6)


def test_log_probabilities_of_a_batch_are_those_of_the_policy_that_acted() -> None:
    runner = EnvRunner("CartPole-v1", ModulePolicy, num_envs=2, seed=0)
    batch = runner.sample(20)
    policy = runner.policy
    assert isinstance(policy, ModulePolicy)
    outputs = policy.module.forward_train({"obs": torch.from_numpy(batch["obs"])})
    chosen = torch.log_softmax(outputs["action_dist_inputs"], -1)[range(20), torch.from_numpy(batch["actions"])]
    np.testing.assert_allclose(batch["action_logp"], chosen.detach().numpy(), atol=1e-6)


def test_a_change_of_the_weights_reaches_the_next_fragment() -> None:
    runner = EnvRunner("CartPole-v1", ModulePolicy, num_envs=2, seed=0)
    runner.sample(4)
    policy = runner.policy
    assert isinstance(policy, ModulePolicy)
    with torch.no_grad():
        policy.module.get_parameter("policy_head.0.bias").copy_(torch.tensor([-50.0, 50.0]))
    assert (runner.sample(40)["actions"] == 1).all()


def test_images_of_both_layouts_and_their_values() -> None:
    config: dict[str, Any] = {"conv_filters": [(8, 4, 2), (8, 3, 2)], "conv_features": 16}
    last = ActorCriticModule(Frames.observation_space, Frames.action_space, config)
    first_space = gym.spaces.Box(0, 255, (2, 36, 36), np.uint8)
    first = ActorCriticModule(first_space, Frames.action_space, config)
    first.load_state_dict(last.state_dict())
    images = torch.randint(0, 255, (3, 36, 36, 2), dtype=torch.uint8)
    one = last.forward_train({"obs": images})
    two = first.forward_train({"obs": images.movedim(-1, -3)})
    assert torch.allclose(one["vf_preds"], two["vf_preds"])
    assert torch.equal(one["vf_preds"], last.compute_values({"obs": images}))
    assert one["action_dist_inputs"].shape == (3, 2)


def test_wrong_settings_of_networks() -> None:
    with pytest.raises(UsageError, match=r"no key 'fcnet_hidens'. Did you mean 'fcnet_hiddens'"):
        ActorCriticModule(BOX, ACTIONS["box"], {"fcnet_hidens": (8,)})
    with pytest.raises(UsageError, match=r"fcnet_activation: one of .*, not 'tanhh'. Did you mean 'tanh'"):
        ActorCriticModule(BOX, ACTIONS["box"], {"fcnet_activation": "tanhh"})
    with pytest.raises(UsageError, match="convolutions do not fit images"):
        ActorCriticModule(gym.spaces.Box(0, 255, (20, 20, 3), np.uint8), ACTIONS["box"])
    with pytest.raises(UsageError, match="no action can be chosen in"):
        distribution_of(gym.spaces.Sequence(gym.spaces.Discrete(3)))


@pytest.mark.parametrize("kind", [ActorCriticModule, QModule, SACModule, TD3Module])
def test_weights_begin_orthogonal_or_as_those_of_torch(kind: Any) -> None:
    actions = ACTIONS["box" if kind in (SACModule, TD3Module) else "discrete"]

    def layers(initializer: str) -> list[torch.nn.Linear]:
        torch.manual_seed(0)
        module = kind(BOX, actions, {"fcnet_hiddens": (8, 32), "initializer": initializer})
        return [layer for layer in module.modules() if isinstance(layer, torch.nn.Linear)]

    for layer in layers("orthogonal"):
        assert not layer.bias.any()
        wide = layer.weight if layer.out_features <= layer.in_features else layer.weight.T
        squares = wide @ wide.T
        torch.testing.assert_close(squares, squares[0, 0] * torch.eye(len(squares)))
    for layer in layers("torch"):  # uniform, up to the root of one over the inputs
        most = layer.in_features**-0.5
        assert 0.7 * most < layer.weight.abs().max() <= most
        assert 0 < layer.bias.abs().max() <= most


def test_the_initializer_keeps_the_deviations_of_actions() -> None:
    for space in (ACTIONS["box"], gym.spaces.Dict({"a": ACTIONS["box"], "b": ACTIONS["discrete"]})):
        module = ActorCriticModule(BOX, space, {"log_std_init": -1.5, "initializer": "torch"})
        last: Any = module.policy_head[-1]
        bias = last.log_std if space is ACTIONS["box"] else last.bias
        assert (bias == -1.5).sum() == 2
    with pytest.raises(UsageError, match=r"initializer: one of .*, not 'orthogonall'. Did you mean 'orthogonal'"):
        ActorCriticModule(BOX, ACTIONS["box"], {"initializer": "orthogonall"})
    with pytest.raises(UsageError, match=r"fcnet_kernel_initializer.*initializer='torch'"):
        ActorCriticModule(BOX, ACTIONS["box"], {"fcnet_kernel_initializer": None})


def test_a_module_of_ones_own() -> None:
    class Constant(RLModule):
        def setup(self) -> None:
            self.distribution = distribution_of(self.action_space)
            self.logits = torch.nn.Parameter(torch.tensor([-30.0, 30.0]))

        def forward_train(self, batch: Any) -> dict[str, torch.Tensor]:
            return {"action_dist_inputs": self.logits.expand(len(batch["obs"]), 2)}

    batch = EnvRunner("CartPole-v1", ModulePolicy, policy_config={"module_class": Constant}).sample(30)
    assert (batch["actions"] == 1).all()


def test_adam_on_one_tensor_is_adam() -> None:
    torch.manual_seed(0)
    one = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    two = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    two.load_state_dict(one.state_dict())
    flat, plain = FlatAdam(one.parameters(), 0.01, eps=1e-5), torch.optim.Adam(two.parameters(), 0.01, eps=1e-5)
    for step in range(30):
        x = torch.randn(5, 3)
        for net, optimizer in ((one, flat), (two, plain)):
            if step % 3 == 0:
                net.zero_grad()  # drops the views
            optimizer.zero_grad()
            net(x).square().sum().backward()
        norm = flat.clip(0.5)
        assert norm == pytest.approx(torch.nn.utils.clip_grad_norm_(two.parameters(), 0.5).item(), rel=1e-5)
        flat.step()
        plain.step()
        if step == 10:
            flat.load_state_dict(flat.state_dict())
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def without_action_0(out: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    mask = torch.tensor([-1e9, 0.0])
    return {**out, "action_dist_inputs": out["action_dist_inputs"] + mask}


class MaskedInTraining(ActorCriticModule):
    def forward_train(self, batch: Any) -> dict[str, torch.Tensor]:
        return without_action_0(super().forward_train(batch))


class MaskedInExploration(ActorCriticModule):
    def forward_exploration(self, batch: Any) -> dict[str, torch.Tensor]:
        return without_action_0(super().forward_exploration(batch))


class MaskedInInference(ActorCriticModule):
    def forward_inference(self, batch: Any) -> dict[str, torch.Tensor]:
        return without_action_0(super().forward_inference(batch))


class MaskedValues(QModule):
    def values(self, obs: torch.Tensor) -> torch.Tensor:
        return without_action_0({"action_dist_inputs": super().values(obs)})["action_dist_inputs"]


@pytest.mark.parametrize(
    ("module", "explore"),
    [
        (MaskedInTraining, True), (MaskedInTraining, False), (MaskedInExploration, True), (MaskedInExploration, False),
        (MaskedInInference, False), (MaskedValues, False),
    ],
)  # fmt: skip
def test_runners_act_by_the_passes_that_a_subclass_overrides(module: Any, explore: bool) -> None:
    config = {"module_class": module}
    runner = EnvRunner("CartPole-v1", ModulePolicy, num_envs=2, seed=0, policy_config=config, explore=explore)
    batch = runner.sample(80) if module is not MaskedValues else runner._collect(40).to_batch()
    assert (batch["actions"] == 1).all()
    assert (batch["action_dist_inputs"][:, 0] < -1e8).all()


def test_layers_of_a_module_of_ones_own_are_evaluated_in_numpy() -> None:
    class Own(MaskedInTraining):
        def exploration_layers(self) -> torch.nn.Module | None:
            return torch.nn.Sequential(self.encoder, self.policy_head)

    assert Own(BOX, ACTIONS["box"]).layers_to_act(explore=False) is not None
    assert ActorCriticModule(BOX, ACTIONS["box"]).layers_to_act(explore=True) is not None
    assert MaskedInInference(BOX, ACTIONS["box"]).layers_to_act(explore=True) is not None
    assert MaskedInTraining(BOX, ACTIONS["box"]).layers_to_act(explore=True) is None


@pytest.mark.parametrize("gives_inputs", [True, False])
def test_inputs_of_a_module_that_chooses_its_actions_are_kept(gives_inputs: bool) -> None:
    class Chooses(ActorCriticModule):
        def exploration_layers(self) -> None:
            return None

        def forward_exploration(self, batch: Any) -> dict[str, torch.Tensor]:
            out = {
                "action_dist_inputs": torch.tensor([0.0, 3.0]).expand(len(batch["obs"]), 2),
                "actions": torch.ones(len(batch["obs"]), dtype=torch.int64),
            }
            return out if gives_inputs else {"actions": out["actions"]}

    batch = EnvRunner("CartPole-v1", ModulePolicy, policy_config={"module_class": Chooses}).sample(10)
    if not gives_inputs:
        assert "action_dist_inputs" not in batch
        assert "action_logp" not in batch
        return
    assert (batch["action_dist_inputs"] == [0.0, 3.0]).all()
    np.testing.assert_allclose(batch["action_logp"], 3 - math.log(1 + math.exp(3)), rtol=1e-5)


class Drops(ActorCriticModule):
    def setup(self) -> None:
        super().setup()
        self.encoder = torch.nn.Sequential(self.encoder, torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(64))


def test_dropout_and_batch_statistics_act_in_training_alone() -> None:
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .training(train_batch_size=64, minibatch_size=64, num_epochs=1)
        .debugging(seed=1)
    )
    with config.rl_module(module_class=Drops).build() as algorithm:
        module = algorithm.get_module()
        obs = {"obs": torch.randn(8, 4)}
        modes = []
        module.encoder[1].register_forward_hook(lambda layer, given, out: modes.append(layer.training))
        for _ in range(2):
            first, second = (module.forward_train(obs)["action_dist_inputs"] for _ in range(2))
            assert torch.equal(first, second)
            before = module.encoder[2].running_mean.clone()
            algorithm.env_runner.sample(40)
            assert torch.equal(before, module.encoder[2].running_mean)
            assert not any(modes)
            algorithm.train()
            assert any(modes)  # the update has dropout
            assert not torch.equal(before, module.encoder[2].running_mean)
            modes.clear()
