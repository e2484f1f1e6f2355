"""The optimizer of small modules: parameters that are copied, moved or frozen after it was made."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from rlmesh.envs import ModulePolicy, SampleBatch
from rlmesh.envs.learners.flat_adam import FlatAdam
from rlmesh.envs.learners.policy_gradient import ActorCriticLearner
from rlmesh.errors import UsageError

CONFIG = {
    "learner_class": ActorCriticLearner, "entropy_coeff": 0.0, "vf_loss_coeff": 0.5, "standardize_advantages": True,
    "seed": 1,
}  # fmt: skip


def policy() -> ModulePolicy:
    return ModulePolicy(gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Discrete(2), CONFIG)


def batch(seed: int) -> SampleBatch:
    rng = np.random.default_rng(seed)
    return SampleBatch({
        "obs": rng.standard_normal((20, 3), np.float32), "actions": rng.integers(2, size=20),
        "advantages": rng.standard_normal(20, np.float32), "value_targets": rng.standard_normal(20, np.float32),
    })  # fmt: skip


def weights(given: ModulePolicy) -> torch.Tensor:
    return parameters_to_vector(given.module.parameters()).detach().clone()


def pickled(given: Any) -> Any:
    return pickle.loads(pickle.dumps(given))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_of_a_policy_goes_on_as_the_policy_would(copied: Callable[[Any], Any]) -> None:
    one, other = policy(), policy()
    for each in (one, other):
        each.learn_on_batch(batch(0))
    before = weights(one)
    again = copied(one)
    for i in range(1, 4):
        again.learn_on_batch(batch(i))
        other.learn_on_batch(batch(i))
    assert torch.equal(weights(again), weights(other))
    assert torch.equal(weights(one), before)


def moved_to_a_vector(module: torch.nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(module.parameters()).detach().clone(), module.parameters())


def there_and_back(module: torch.nn.Module) -> None:
    module.double().float()


@pytest.mark.parametrize("move", [moved_to_a_vector, there_and_back])
def test_parameters_that_were_moved_go_on(move: Callable[[torch.nn.Module], None]) -> None:
    one, other = policy(), policy()
    for i in range(3):
        for each in (one, other):
            each.learn_on_batch(batch(i))
        move(one.module)
    assert torch.equal(weights(one), weights(other))
    with pytest.raises(FloatingPointError):
        one.learn_on_batch(SampleBatch({**batch(3), "advantages": np.full(20, np.nan, np.float32)}))
    assert torch.equal(weights(one), weights(other))


def test_a_module_that_was_moved_to_another_type_goes_on_in_it() -> None:
    torch.manual_seed(0)
    one, two = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    two.load_state_dict(one.state_dict())
    flat, plain = FlatAdam(one.parameters(), 0.01), torch.optim.Adam(two.double().parameters(), 0.01)
    one.double()
    for _ in range(5):
        x = torch.randn(5, 3, dtype=torch.float64)
        for net, optimizer in ((one, flat), (two, plain)):
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()
    assert one.weight.dtype == torch.float64
    assert torch.allclose(parameters_to_vector(one.parameters()), parameters_to_vector(two.parameters()), atol=1e-12)


def test_a_module_that_was_moved_in_part_is_refused() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = FlatAdam(net.parameters(), 0.01)
    net[1].double()
    with pytest.raises(UsageError, match="move the whole module alike"):
        optimizer.zero_grad()


def test_a_parameter_that_was_frozen_stays_and_the_others_go_on() -> None:
    torch.manual_seed(0)
    one, two = (torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)) for _ in range(2))
    two.load_state_dict(one.state_dict())
    flat, plain = FlatAdam(one.parameters(), 0.01), torch.optim.Adam(two.parameters(), 0.01)
    first = next(one.parameters())
    for step in range(9):
        if step in (3, 6):
            for net in (one, two):
                net[0].requires_grad_(step == 6)
        before = first.detach().clone()
        x = torch.randn(5, 3)
        for net, optimizer in ((one, flat), (two, plain)):
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()
        assert torch.equal(before, first) == (3 <= step < 6)
        if step < 6:  # from then on torch counts the steps of each parameter
            assert torch.allclose(parameters_to_vector(one.parameters()), parameters_to_vector(two.parameters()))


def test_another_default_type_of_torch_changes_no_step() -> None:
    one, other = policy(), policy()
    one.learn_on_batch(batch(0))
    torch.set_default_dtype(torch.float64)
    try:
        net = torch.nn.Linear(3, 4)
        optimizer = FlatAdam(net.parameters(), 0.01)
        before = parameters_to_vector(net.parameters()).detach().clone()
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.allclose(parameters_to_vector(net.parameters()), before - 0.01)
    other.learn_on_batch(batch(0))
    assert torch.equal(weights(one), weights(other))
