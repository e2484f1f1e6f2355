"""`Learner`: seeds, and the mode of layers during an update."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlmesh.envs import ActorCriticModule
from rlmesh.envs.learners.learner import Learner

BOX, TWO = gym.spaces.Box(-1, 1, (4,), np.float32), gym.spaces.Discrete(2)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_learner_with_a_seed_draws_the_same_minibatches_again(seed: int) -> None:
    module = ActorCriticModule(BOX, TWO)
    one, other = (torch.randperm(50, generator=Learner(module, {"seed": seed}).generator) for _ in range(2))
    assert torch.equal(one, other)


def test_a_learner_without_a_seed_leaves_the_generator_of_torch_alone() -> None:
    module, before = ActorCriticModule(BOX, TWO), torch.get_rng_state()
    one, other = (torch.randperm(50, generator=Learner(module, {}).generator) for _ in range(2))
    assert not torch.equal(one, other) and torch.equal(torch.get_rng_state(), before)


def test_all_layers_are_in_training_mode_within_an_update_alone() -> None:
    class Frozen(torch.nn.Dropout):
        def train(self, mode: bool = True) -> Any:
            return super().train(False)

    module = ActorCriticModule(BOX, TWO)
    module.eval()
    learner = Learner(module, {})
    for extra in (None, Frozen()):
        if extra is not None:
            module.add_module("extra", extra)
        with learner.training():
            assert all(layer.training for layer in module.modules() if not isinstance(layer, Frozen))
            assert not isinstance(extra, Frozen) or not extra.training
        assert not any(layer.training for layer in module.modules())
        module.extra = torch.nn.Identity()
    whole = ActorCriticModule(BOX, TWO)
    calls: list[str] = []
    whole.eval = lambda: calls.append("eval")  # type: ignore[method-assign,assign,return-value]
    with Learner(whole, {}).training():
        assert whole.training
    assert calls == ["eval"]
