"""Updates of DQN, SAC and TD3 against the formulas of their papers, and how they explore."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlmesh.envs.learners.dqn import DQNLearner
from rlmesh.envs.learners.sac import SACLearner
from rlmesh.envs.learners.td3 import TD3Learner
from rlmesh.envs.modules.continuous import SACModule, TD3Module, TwinCritic
from rlmesh.envs.modules.numpy_forward import NumpyForward
from rlmesh.envs.modules.q_module import QModule
from rlmesh.errors import UsageError

OBS = spaces.Box(-1, 1, (3,), np.float32)
BOX = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 1.0], np.float32))
SMALL = {"fcnet_hiddens": (8, 8)}
COMMON = {"lr": 1e-3, "gamma": 0.9, "grad_clip": None, "adam_epsilon": 1e-8, "seed": 1, "tau": 0.1}


def batch(actions: np.ndarray, rows: int = 6) -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {
        "obs": random.normal(size=(rows, 3)).astype(np.float32),
        "new_obs": random.normal(size=(rows, 3)).astype(np.float32),
        "actions": actions, "rewards": random.normal(size=rows).astype(np.float32),
        "terminateds": np.array([False, True] * (rows // 2)), "n_steps": np.array([1, 1, 2, 2, 3, 3][:rows]),
        "weights": np.linspace(0.1, 1, rows, dtype=np.float32),
    }  # fmt: skip


def dqn(**config: Any) -> Any:
    torch.manual_seed(0)
    module = QModule(OBS, spaces.Discrete(4, start=2), {**SMALL, "dueling": config.get("dueling", True)})
    defaults = {"double_q": True, "epsilon": [[0, 1.0], [100, 0.0]], "target_network_update_freq": 2}
    learner: Any = DQNLearner(module, {**COMMON, **defaults, **config})
    with torch.no_grad():
        for parameter in learner.target.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
    return learner


@pytest.mark.parametrize("double_q", [True, False])
def test_the_targets_of_dqn(double_q: bool) -> None:
    learner = dqn(double_q=double_q)
    rows = batch(np.array([2, 3, 4, 5, 2, 3]))
    with torch.no_grad():
        online = learner.module.values(torch.from_numpy(rows["obs"])).numpy()
        after = learner.module.values(torch.from_numpy(rows["new_obs"])).numpy()
        late = learner.target.values(torch.from_numpy(rows["new_obs"])).numpy()
    expected, losses = [], []
    for i in range(6):
        following = late[i, after[i].argmax()] if double_q else late[i].max()
        target = rows["rewards"][i] + (0 if rows["terminateds"][i] else 0.9 ** rows["n_steps"][i] * following)
        expected.append(target - online[i, rows["actions"][i] - 2])
        error = abs(expected[-1])
        losses.append(rows["weights"][i] * (0.5 * error**2 if error < 1 else error - 0.5))
    stats = learner.update(rows)
    assert np.allclose(learner.td_errors, expected, atol=1e-5)
    assert stats["total_loss"] == pytest.approx(np.mean(losses), rel=1e-4)


def test_the_target_of_dqn_follows_every_second_update() -> None:
    learner = dqn()
    first = [parameter.clone() for parameter in learner.target.parameters()]
    rows = batch(np.array([2, 3, 4, 5, 2, 3]))
    learner.update(rows)
    assert all(map(torch.equal, first, learner.target.parameters()))
    learner.update(rows)
    for before, now, online in zip(first, learner.target.parameters(), learner.module.parameters(), strict=True):
        assert torch.allclose(now, before + 0.1 * (online - before), atol=1e-6)


@pytest.mark.parametrize("dueling", [True, False])
def test_the_values_of_a_runner_are_those_of_the_module(dueling: bool) -> None:
    module = dqn(dueling=dueling).module
    obs = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    fast = NumpyForward.of(module.exploration_layers())
    assert fast is not None
    with torch.no_grad():
        values = module.values(torch.from_numpy(obs)).numpy()
    assert np.allclose(fast(obs), values, atol=1e-6)


def test_epsilon_is_the_share_of_random_actions() -> None:
    learner = dqn()
    learner.prepare_exploration(25)
    distribution, random = learner.module.distribution, np.random.default_rng(0)
    assert distribution is not None
    values = np.tile(np.array([0.0, 1.0, 0.0, 0.0], np.float32), (20_000, 1))
    actions = distribution.sample(values, distribution.noise(random, (20_000,)))
    shares = np.bincount(actions, minlength=6) / 20_000
    assert np.allclose(shares, [0, 0, 0.1875, 0.4375, 0.1875, 0.1875], atol=0.015)
    learner.prepare_exploration(1000)
    assert set(distribution.sample(values, distribution.noise(random, (20_000,))).tolist()) == {3}


def test_the_squashed_density_is_that_of_torch() -> None:
    module = SACModule(OBS, BOX, SMALL)
    inputs = (torch.randn((50, 4)) * 2).clamp(max=2)  # standard deviations are clipped above e²
    normal = torch.randn((50, 2))
    actions, log_prob = module.distribution.rsample(inputs, normal)
    tanh: Any = torch.distributions.transforms.TanhTransform(cache_size=1)
    base = torch.distributions.Normal(inputs[:, :2].double(), inputs[:, 2:].exp().double())
    theirs = torch.distributions.TransformedDistribution(base, [tanh])
    before = inputs[:, :2].double() + inputs[:, 2:].exp().double() * normal.double()
    reference = theirs.log_prob(tanh(before)).sum(-1)
    assert torch.allclose(actions.double(), torch.tanh(before), atol=1e-5)
    near = before.abs().amax(-1) < 6  # beyond, torch's own formula loses digits
    assert torch.allclose(log_prob.double()[near], reference[near], atol=1e-3)


@pytest.mark.parametrize("kind", [SACModule, TD3Module])
def test_actions_are_scaled_to_the_space(kind: Any) -> None:
    module, random = kind(OBS, BOX, SMALL), np.random.default_rng(0)
    distribution = module.distribution
    inputs = np.zeros((4000, distribution.size), np.float32)
    drawn = distribution.sample(inputs, distribution.noise(random, (4000,)))
    assert np.allclose(np.histogram(drawn, 4, (-1, 1))[0] / 8000, 0.25, atol=0.03)  # uniform at first
    sent = distribution.to_env(drawn)
    assert sent.dtype == np.float32
    assert all(BOX.contains(action) for action in sent)
    actions = np.array(distribution.to_env(np.array([[-1, -1], [0, 0], [1, 1]])))
    assert np.allclose(actions, np.array([[-2, 0], [0, 0.5], [2, 1]]))
    module.uniform.fill_(0.0)
    if kind is TD3Module:
        module.noise.fill_(0.1)
        assert distribution.sample(inputs, distribution.noise(random, (4000,))).std() == pytest.approx(0.1, rel=0.05)
    assert np.array_equal(distribution.mode(inputs), np.zeros((4000, 2)))


def test_two_critics_at_once_are_two_critics() -> None:
    critic: Any = TwinCritic(OBS, 2, {**SMALL, "fcnet_activation": "relu"})
    obs, actions = torch.randn(5, 3), torch.randn(5, 2)
    values = critic(obs, actions)
    for number in range(2):
        x = torch.cat([obs, actions], -1)
        for layer in critic.layers:
            x = torch.relu(x) if isinstance(layer, torch.nn.ReLU) else x @ layer.weight[number] + layer.bias[number]
        assert torch.allclose(values[number], x.squeeze(-1), atol=1e-6)


def test_the_targets_of_sac() -> None:
    torch.manual_seed(0)
    module = SACModule(OBS, BOX, SMALL)
    config = {"initial_alpha": 0.5, "target_entropy": "auto", "num_steps_sampled_before_learning_starts": 0}
    learner = SACLearner(module, {**COMMON, **config})
    rows = batch(np.random.default_rng(1).uniform(-1, 1, (6, 2)).astype(np.float32))
    generator = torch.Generator()
    generator.set_state(learner.generator.get_state())
    new_obs, obs = torch.from_numpy(rows["new_obs"]), torch.from_numpy(rows["obs"])
    with torch.no_grad():
        normal = torch.randn((6, 2), generator=generator)
        following, log_prob = module.distribution.rsample(module.actor(new_obs), normal)
        late = learner.target(new_obs, following).amin(0) - 0.5 * log_prob
        discount = torch.tensor([0.9, 0.0, 0.81, 0.0, 0.729, 0.0])
        targets = torch.from_numpy(rows["rewards"]) + discount * late
        values = module.critic(obs, torch.from_numpy(rows["actions"]))
        loss = 0.5 * ((values - targets).square() * torch.from_numpy(rows["weights"])).mean(-1).sum()
    critic_before = [parameter.clone() for parameter in module.critic.parameters()]
    stats = learner.update(rows)
    assert np.allclose(learner.td_errors, (targets - values.mean(0)).numpy(), atol=1e-5)
    assert stats["critic_loss"] == pytest.approx(float(loss), rel=1e-5)
    assert learner.target_entropy == -2.0
    assert float(learner.log_alpha.detach()) < np.log(0.5)  # the entropy is above its target, so the temperature falls
    for before, late_one, now in zip(
        critic_before, learner.target.parameters(), module.critic.parameters(), strict=True
    ):
        assert torch.allclose(late_one, before + 0.1 * (now - before), atol=1e-6)
        assert not torch.equal(before, now)


def test_the_targets_of_td3_and_its_delay() -> None:
    torch.manual_seed(0)
    module: Any = TD3Module(OBS, BOX, SMALL)
    config = {
        "policy_delay": 2, "target_noise": 2.0, "target_noise_clip": 0.3, "exploration_noise": 0.1,
        "num_steps_sampled_before_learning_starts": 10,
    }  # fmt: skip
    learner = TD3Learner(module, {**COMMON, **config})
    rows = batch(np.random.default_rng(1).uniform(-1, 1, (6, 2)).astype(np.float32))
    generator = torch.Generator()
    generator.set_state(learner.generator.get_state())
    new_obs = torch.from_numpy(rows["new_obs"])
    with torch.no_grad():
        noise = (torch.randn((6, 2), generator=generator) * 2).clamp(-0.3, 0.3)
        following = (torch.tanh(module.actor(new_obs)) + noise).clamp(-1, 1)
        late = module.critic(new_obs, following).amin(0)
        targets = torch.from_numpy(rows["rewards"]) + torch.tensor([0.9, 0.0, 0.81, 0.0, 0.729, 0.0]) * late
        values = module.critic(torch.from_numpy(rows["obs"]), torch.from_numpy(rows["actions"])).mean(0)
    actor = [parameter.clone() for parameter in module.actor.parameters()]
    learner.update(rows)
    assert np.allclose(learner.td_errors, (targets - values).numpy(), atol=1e-5)
    assert all(map(torch.equal, actor, module.actor.parameters()))
    learner.update(rows)
    assert not all(map(torch.equal, actor, module.actor.parameters()))
    learner.prepare_exploration(9)
    assert float(module.uniform) == 1
    learner.prepare_exploration(10)
    assert float(module.uniform) == 0


@pytest.mark.parametrize("kind", [SACLearner, TD3Learner])
@pytest.mark.parametrize("late", [False, True])
def test_a_critic_that_is_frozen_in_part_stays_so(kind: Any, late: bool) -> None:
    module = (SACModule if kind is SACLearner else TD3Module)(OBS, BOX, SMALL)
    config = {
        "initial_alpha": 0.5, "target_entropy": "auto", "policy_delay": 1, "target_noise": 0.2,
        "target_noise_clip": 0.5,
    }  # fmt: skip
    rows = batch(np.random.default_rng(1).uniform(-1, 1, (6, 2)).astype(np.float32))
    first, *_, last = module.critic.parameters()
    first.requires_grad_(late)
    learner = kind(module, {**COMMON, **config})
    if late:
        learner.update(rows)
        first.requires_grad_(False)
    before, other = first.detach().clone(), last.detach().clone()
    for _ in range(3):
        learner.update(rows)
    assert torch.equal(first, before) and not first.requires_grad
    assert not torch.equal(last, other) and last.requires_grad


@pytest.mark.parametrize("kind", [SACLearner, TD3Learner])
def test_a_copy_of_a_learner_goes_on_as_the_learner_would(kind: Any) -> None:
    module = (SACModule if kind is SACLearner else TD3Module)(OBS, BOX, SMALL)
    config = {
        "initial_alpha": 0.5, "target_entropy": "auto", "policy_delay": 1, "target_noise": 0.2,
        "target_noise_clip": 0.5,
    }  # fmt: skip
    learner = kind(module, {**COMMON, **config})
    rows = batch(np.random.default_rng(1).uniform(-1, 1, (6, 2)).astype(np.float32))
    learner.update(rows)
    others = copy.deepcopy(learner), pickle.loads(pickle.dumps(learner))
    stats = [[each.update(rows) for _ in range(3)] for each in (learner, *others)]
    assert stats[0] == stats[1] == stats[2]
    for other in others:
        for one, same in zip(learner.target.parameters(), other.target.parameters(), strict=True):
            assert torch.equal(one, same)


@pytest.mark.parametrize("reward", [np.nan, np.inf])
def test_a_loss_that_is_no_number_changes_no_weight(reward: float) -> None:
    learner = dqn()
    rows = batch(np.array([2, 3, 4, 5, 2, 3]))
    rows["rewards"][2] = reward
    before = [parameter.clone() for parameter in learner.module.parameters()]
    with pytest.raises(FloatingPointError, match="update 0 gave a loss of"):
        learner.update(rows)
    assert all(map(torch.equal, before, learner.module.parameters()))
    with pytest.raises(UsageError, match="needs the column 'new_obs'"):
        learner.update({"obs": rows["obs"]})


@pytest.mark.parametrize(
    ("kind", "space"), [(QModule, BOX), (SACModule, spaces.Discrete(2)), (TD3Module, spaces.Box(-np.inf, np.inf, (1,)))]
)
def test_action_spaces_that_do_not_fit_are_refused(kind: Any, space: Any) -> None:
    with pytest.raises(UsageError, match="acts in a"):
        kind(OBS, space, SMALL)
