from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from rlmesh.rl import reference
from rlmesh.rl.algorithms import (
    GRPO,
    PPO,
    SFT,
    Algorithm,
    BehaviourCloning,
    Evaluated,
    OnPolicyDistillation,
    ReinforcePlusPlus,
    TokenWeights,
)
from rlmesh.rl.algorithms.grpo import overlong_penalty
from rlmesh.rl.algorithms.protocol import weighed
from rlmesh.rl.correction import Correction

MASK = torch.tensor(
    [
        [False, True, True, False, False],
        [False, True, True, True, True],
        [False, False, True, False, True],
        [False, False, True, True, False],
    ]
)


def batch(**changes: Any) -> Evaluated:
    """Two groups of two; the last reward failed."""
    generator = torch.Generator().manual_seed(0)

    def numbers() -> torch.Tensor:
        return torch.where(MASK, -torch.rand(4, 5, dtype=torch.float64, generator=generator), 0.0)

    made = Evaluated(
        mask=MASK,
        groups=torch.tensor([0, 0, 1, 1]),
        rewards=torch.tensor([1.0, 0.0, 1.0, float("nan")], dtype=torch.float64),
        valid=torch.tensor([True, True, True, False]),
        log_probs=numbers(),
        sampled_log_probs=numbers(),
        ref_log_probs=numbers(),
        values=numbers(),
        greedy_rewards=torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64),
        cut_off=torch.tensor([False, True, False, False]),
    )
    return replace(made, **changes)


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        ("grpo", reference.grpo),
        ("dr_grpo", reference.dr_grpo),
        ("rloo", reference.rloo),
    ],
)
def test_advantages_are_those_of_the_name_and_failed_responses_take_no_part(advantage: Any, expected: Any) -> None:
    given = batch()
    weights = GRPO(samples=2, advantage=advantage).weigh(given)
    valid = given.valid.numpy()
    wanted = expected(np.nan_to_num(given.rewards.numpy()), given.groups.numpy(), valid=valid)
    np.testing.assert_allclose(weights.advantages, np.where(MASK, wanted[:, None], 0), atol=1e-9)
    assert (weights.policy[3] == 0).all() and (weights.policy[:3] == MASK[:3]).all()
    assert weights.normalisers == (8.0, 1.0, 8.0)
    assert (weights.likelihood == 0).all() and (weights.divergence == 0).all()


def test_aggregations_are_weights_and_a_divisor() -> None:
    rows = MASK[:3].double()
    by_sequence = GRPO(samples=2, loss="grpo", kl=0.1).weigh(batch())
    np.testing.assert_allclose(by_sequence.policy[:3], rows / rows.sum(1, keepdim=True))
    np.testing.assert_allclose(by_sequence.divergence[:3], 0.1 * rows / rows.sum(1, keepdim=True))
    assert by_sequence.normalisers == (3.0, 1.0, 3.0)
    constant = GRPO(samples=2, loss="dr_grpo", advantage="dr_grpo", constant=10.0).weigh(batch())
    np.testing.assert_allclose(constant.policy[:3], rows)
    assert constant.normalisers == (30.0, 1.0, 30.0)


def test_a_correction_weighs_tokens_and_what_it_rejects_leaves_the_divisor() -> None:
    log_probs = batch().log_probs
    assert log_probs is not None
    given = batch(sampled_log_probs=log_probs.clone())
    given.sampled_log_probs[1, 1] += 3.0  # a ratio of 0.05
    truncated = GRPO(samples=2, correction="token").weigh(given)
    assert truncated.policy[1, 1].item() == pytest.approx(np.exp(-3.0)) and truncated.normalisers.policy == 8
    masked = GRPO(samples=2, correction=Correction(lower=0.5, beyond="mask")).weigh(given)
    assert masked.policy[1, 1] == 0 and masked.normalisers.policy == 7
    assert masked.metrics["correction/rejected"] == pytest.approx(1 / 8)
    rejected = GRPO(samples=2, correction=Correction(reject_below=0.1)).weigh(given)
    assert (rejected.policy[1] == 0).all() and rejected.normalisers.policy == 4


def test_cut_off_responses_can_be_left_out_or_pay_for_their_length() -> None:
    assert (GRPO(samples=2, skip_cut_off=True).weigh(batch()).policy[1] == 0).all()
    assert overlong_penalty(torch.tensor([5, 8, 9, 10, 12]), 10, 4).tolist() == pytest.approx([0, 0.5, 0.75, 1, 1])
    longer_is_worse = GRPO(samples=2, advantage="dr_grpo", overlong=(4, 2)).weigh(batch(rewards=torch.ones(4)))
    assert longer_is_worse.advantages[0, 1] > 0 > longer_is_worse.advantages[1, 1]


def test_what_an_algorithm_needs_is_said_before_it_is_missed() -> None:
    assert GRPO().needs == frozenset()
    assert GRPO(kl=0.1, advantage="remax").needs == {"reference", "greedy"}
    assert PPO().needs == {"critic"} and PPO(kl=0.1).needs == {"critic", "reference"}
    assert ReinforcePlusPlus(kl_loss=0.1).needs == {"reference"} and SFT().needs == frozenset()
    with pytest.raises(ValueError, match=r"no greedy_rewards: .* must contain 'greedy'"):
        GRPO(advantage="remax").weigh(batch(greedy_rewards=None))
    with pytest.raises(ValueError, match=r"no values: .* must contain 'critic'"):
        PPO().weigh(batch(values=None))
    with pytest.raises(ValueError, match=r"no ref_log_probs: .* must contain 'reference'"):
        OnPolicyDistillation().weigh(batch(ref_log_probs=None))


def test_ppo_is_gae_of_the_rewards_with_their_penalty() -> None:
    given = batch()
    weights = PPO(gamma=0.9, lam=0.8, kl=0.1, whiten=False).weigh(given)
    mask = given.usable.numpy()
    kl = reference.kl_estimate(given.log_probs.numpy(), given.ref_log_probs.numpy(), mask, "k1")  # type: ignore[union-attr]
    rewards = reference.token_rewards(given.rewards.numpy(), kl, mask, coefficient=0.1)
    wanted, returns = reference.gae(rewards, given.values.numpy(), mask, gamma=0.9, lam=0.8)  # type: ignore[union-attr]
    np.testing.assert_allclose(weights.advantages, wanted, atol=1e-9)
    assert weights.returns is not None
    np.testing.assert_allclose(weights.returns, returns, atol=1e-9)
    white = PPO(gamma=0.9, lam=0.8, kl=0.1).weigh(given)
    np.testing.assert_allclose(white.advantages, reference.masked_whiten(wanted, mask), atol=1e-9)


def test_reinforce_plus_plus_is_its_twin() -> None:
    given = batch(ref_log_probs=None)
    weights = ReinforcePlusPlus(gamma=0.5).weigh(given)
    mask = given.usable.numpy()
    rewards = reference.token_rewards(given.rewards.numpy(), np.zeros(MASK.shape), mask, coefficient=0.0)
    np.testing.assert_allclose(weights.advantages, reference.reinforce_plus_plus(rewards, mask, gamma=0.5), atol=1e-6)
    assert weights.returns is None


def test_supervised_algorithms_weigh_the_likelihood() -> None:
    sft = SFT().weigh(batch())
    assert (sft.likelihood == MASK).all() and sft.normalisers.likelihood == MASK.sum()
    cloned = BehaviourCloning(at_least=1.0).weigh(batch())
    assert cloned.likelihood.any(1).tolist() == [True, False, True, False]
    assert cloned.metrics["imitated"] == 0.5
    taught = OnPolicyDistillation().weigh(batch())
    given = batch()
    gap = given.ref_log_probs - given.log_probs  # type: ignore[operator]
    np.testing.assert_allclose(taught.advantages, torch.where(MASK, gap, 0.0))


def test_rewards_that_differ_by_rounding_are_equal() -> None:
    whole, nothing = 0.7 + 0.2 + 0.1, 0.1 + 0.2 - 0.3
    assert whole < 1 and nothing > 0
    given = batch(
        rewards=torch.tensor([whole, 0.9, 1.0, nothing], dtype=torch.float64), valid=torch.ones(4, dtype=torch.bool)
    )
    assert BehaviourCloning(at_least=1.0).weigh(given).likelihood.any(1).tolist() == [True, False, True, False]
    exact = replace(given, rewards=torch.tensor([1.0, 0.9, 1.0, 0.0], dtype=torch.float64))
    algorithm = GRPO(samples=2, advantage="pass_at_k")
    np.testing.assert_array_equal(algorithm.weigh(given).advantages, algorithm.weigh(exact).advantages)
    assert algorithm.weigh(given).advantages[2:].any()


@dataclass(frozen=True)
class BestOnly(Algorithm):
    """An algorithm of one's own: imitate the best response of each group."""

    samples: int = 2

    def weigh(self, batch: Evaluated) -> TokenWeights:
        rewards = torch.where(batch.valid, batch.rewards, -torch.inf)
        names, place = batch.groups.unique(return_inverse=True)
        best = torch.full((len(names),), -torch.inf, dtype=rewards.dtype).scatter_reduce(0, place, rewards, "amax")
        return TokenWeights.of(batch.mask, likelihood=batch.valid & (rewards == best[place]))


def test_an_algorithm_of_ones_own_is_a_small_class() -> None:
    weights = BestOnly().weigh(batch())
    assert weights.likelihood.any(1).tolist() == [True, False, True, False]
    assert weights.normalisers.likelihood == MASK[[0, 2]].sum()
    with pytest.raises(TypeError, match="defines no weigh"):
        Algorithm().weigh(batch())


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        ({"advantages": [0.0] * 4}, "advantages of TokenWeights is a list: give a number or a tensor"),
        (
            {"policy": torch.ones(3)},
            r"policy of TokenWeights has shape \(3,\): expected one number per episode, \(4,\), or one per token",
        ),
        ({"likelihood": torch.ones(1, 5)}, r"likelihood of TokenWeights has shape \(1, 5\)"),
        ({"divergence": torch.ones(4, 1)}, r"divergence of TokenWeights has shape \(4, 1\)"),
        ({"advantages": torch.ones(2, 4, 5)}, r"advantages of TokenWeights has shape \(2, 4, 5\)"),
    ],
)
def test_weights_of_another_shape_are_refused_and_never_broadcast(weights: Any, told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        TokenWeights.of(MASK, **weights)


def test_an_algorithm_that_returns_no_weights_is_named() -> None:
    class Forgetful(Algorithm):
        def weigh(self, batch: Evaluated) -> Any:
            return None

    with pytest.raises(TypeError, match=r"Forgetful\.weigh\(batch\) returned NoneType: return TokenWeights\.of"):
        weighed(Forgetful(), batch())


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: GRPO(samples=1), "at least 2 responses"),
        (lambda: GRPO(samples=0), "at least 1 response"),
        (lambda: GRPO(loss="grop"), "loss='grop': use one of grpo, dapo"),  # type: ignore[arg-type]
        (lambda: GRPO(advantage="x", loss="y"), "advantage='x'.*; loss='y'"),  # type: ignore[arg-type]
        (lambda: GRPO(constant=5.0), "'constant', and no other"),
        (lambda: GRPO(loss="dr_grpo"), "'constant', and no other"),
        (lambda: GRPO(advantage="pass_at_k", k=9), "from 1 to samples=8"),
        (lambda: GRPO(samples=1, advantage="reinforce++"), "samples=1: at least 2 responses per prompt"),
        (lambda: GRPO(k=4), "k=4: the advantage 'pass_at_k', and no other, takes it; this is 'grpo'"),
        (lambda: GRPO(loss="sapo", clip_high=0.3), "clip_high=0.3: the loss 'sapo' has a gate and no clip"),
        (lambda: GRPO(loss="gspo", dual_clip=3.0), "the loss 'gspo' has no dual clip"),
        (lambda: SFT(samples=4), r"SFT\(samples=4\): the data has the responses"),
        (lambda: GRPO(overlong=(4, 5)), "overlong"),
        (lambda: GRPO(kl=-1.0), "must be ≥ 0"),
        (lambda: GRPO(kl=float("nan")), "kl=nan must be a number"),
        (lambda: GRPO(samples=2.5), "samples=2.5.: a whole number"),  # type: ignore[arg-type]
        (lambda: GRPO(aggregation="sum", kl_estimator="k4"), "kl_estimator='k4'.*; aggregation='sum'"),  # type: ignore[arg-type]
        (lambda: GRPO(clip_low=-0.2, clip_high=-1.0), r"clip_low=-0.2 must be in \[0, 1\); clip_high=-1.0 must be ≥ 0"),
        (lambda: GRPO(dual_clip=0.5), "dual_clip=0.5 must be a number > 1"),
        (lambda: GRPO(loss="dr_grpo", constant=0.0), "constant=0.0 must be a number > 0"),
        (lambda: GRPO(overlong=5), "overlong=5"),  # type: ignore[arg-type]
        (lambda: PPO(clip_low=2.0), "clip_low=2.0 must be in"),
        (lambda: PPO(kl_estimator="k0"), "kl_estimator='k0'"),  # type: ignore[arg-type]
        (lambda: PPO(lam="high"), "lam=high"),  # type: ignore[arg-type]
        (lambda: PPO(gamma=2.0), "gamma=2.0"),
        (lambda: PPO(lam=2.0), "lam=2.0"),
        (lambda: PPO(aggregation="constant"), "aggregation"),
    ],
)
def test_wrong_settings_are_refused(make: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()
