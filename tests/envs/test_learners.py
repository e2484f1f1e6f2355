"""`Learner`: seeds, and the mode of layers during an update."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlmesh.envs import ActorCriticModule
from rlmesh.envs.batches.sample_batch import SampleBatch
from rlmesh.envs.learners.learner import Learner
from rlmesh.envs.learners.policy_gradient import PPOLearner

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
    whole: Any = ActorCriticModule(BOX, TWO)
    calls: list[str] = []
    whole.eval = lambda: calls.append("eval")
    with Learner(whole, {}).training():
        assert whole.training
    assert calls == ["eval"]


def ppo_batch(rows: int, seed: int) -> SampleBatch:
    rng = np.random.default_rng(seed)
    return SampleBatch(
        obs=rng.standard_normal((rows, 4), np.float32), actions=rng.integers(0, 2, rows),
        action_logp=np.full(rows, -0.69, np.float32), action_dist_inputs=np.zeros((rows, 2), np.float32),
        advantages=rng.standard_normal(rows, np.float32), value_targets=rng.standard_normal(rows, np.float32),
    )  # fmt: skip


@pytest.mark.parametrize(("kl_coeff", "entropy_coeff"), [(0.0, 0.0), (0.2, 0.0), (0.0, 0.01), (0.2, 0.01)])
def test_passes_that_do_not_report_learn_the_same(kl_coeff: float, entropy_coeff: float) -> None:
    class Reading(PPOLearner):
        """A subclass reads the statistics of each pass."""

        def loss(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss, stats = super().loss(batch)
            assert stats["entropy"] > 0 and stats["kl"] >= 0
            return loss, stats

    settings = {
        "clip_param": 0.2, "entropy_coeff": entropy_coeff, "kl_coeff": kl_coeff, "kl_target": 0.01,
        "vf_clip_param": None, "vf_loss_coeff": 0.5, "standardize_advantages": True, "num_epochs": 3,
        "minibatch_size": 64, "seed": 1,
    }  # fmt: skip
    found = []
    for kind in (PPOLearner, Reading):
        torch.manual_seed(3)
        learner = kind(ActorCriticModule(BOX, TWO), settings)
        stats = [learner.update(ppo_batch(200, seed)) for seed in range(3)]
        found.append((stats, [p.detach().clone() for p in learner.module.parameters()]))
        assert learner.reports
    assert found[0][0] == found[1][0] and {"entropy", "kl"} <= found[0][0][0].keys()
    assert all(map(torch.equal, found[0][1], found[1][1]))


def test_an_update_that_fails_leaves_a_learner_that_reports() -> None:
    learner = PPOLearner(
        ActorCriticModule(BOX, TWO),
        {
            "clip_param": 0.2, "entropy_coeff": 0.0, "kl_coeff": 0.0, "vf_clip_param": None, "vf_loss_coeff": 0.5,
            "standardize_advantages": True, "num_epochs": 2,
        },
    )  # fmt: skip
    batch = ppo_batch(20, 0)
    batch["actions"] = np.full(20, 7)  # there are two actions
    with pytest.raises((RuntimeError, IndexError)):
        learner.update(batch)
    assert learner.reports and not learner.module.training


class TwoRates(PPOLearner):
    def make_optimizer(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": parameters[:2], "lr": 0.01}, {"params": parameters[2:], "lr": 0.03}])


PPO = {
    "kl_coeff": 0.0, "clip_param": 0.2, "entropy_coeff": 0.0, "vf_loss_coeff": 0.5, "vf_clip_param": None,
    "standardize_advantages": True,
}  # fmt: skip


def test_advantages_are_standardized_over_the_whole_batch() -> None:
    found = []
    for setting in ("batch", False, True):
        torch.manual_seed(3)
        settings = {**PPO, "standardize_advantages": setting, "num_epochs": 2, "minibatch_size": 50, "seed": 1}
        learner = PPOLearner(ActorCriticModule(BOX, TWO), settings)
        batch = ppo_batch(200, 0)
        batch["advantages"] = 5 + 3 * batch["advantages"]
        given = batch["advantages"].copy()
        if setting is False:
            batch["advantages"] = (given - given.mean()) / given.std(ddof=1)
        learner.update(batch)
        if setting == "batch":
            assert np.array_equal(batch["advantages"], given)
        found.append(torch.cat([p.detach().flatten() for p in learner.module.parameters()]))
    assert torch.allclose(found[0], found[1], rtol=0, atol=1e-6)
    assert not torch.allclose(found[0], found[2], rtol=0, atol=1e-5)


def test_parameter_groups_keep_the_ratio_of_their_rates() -> None:
    def made() -> TwoRates:
        return TwoRates(ActorCriticModule(BOX, TWO), {**PPO, "lr": [[0, 0.02], [40, 0.0]], "seed": 1})

    learner = made()
    rates = []
    for i in range(2):
        assert learner.update(ppo_batch(10, i))["curr_lr"] == pytest.approx(0.02 * (1 - i / 4))
        rates.append([group["lr"] for group in learner.optimizer.param_groups])
    restored = made()
    restored.set_state(learner.get_state())
    restored.update(ppo_batch(10, 2))
    rates.append([group["lr"] for group in restored.optimizer.param_groups])
    assert np.array(rates) == pytest.approx(np.outer([1, 0.75, 0.5], [0.02, 0.06]))
