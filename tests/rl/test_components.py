"""The loss of a step does not depend on how its batch is cut into packs, shared over ranks, or laid out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmesh.rl import reference
from rlmesh.rl.algorithms import GRPO, PPO, SFT, Algorithm, Evaluated, Normalisers, OnPolicyDistillation
from rlmesh.rl.components import Columns, policy_share, value_share
from rlmesh.rl.head import TokenTerms
from rlmesh.rl.packing import pack
from tests.rl.episodes import Episodes, episodes_of, groups_of_episodes, padded

ALGORITHMS: list[Algorithm] = [
    GRPO(samples=2, loss="dapo", entropy=0.01, kl=0.05),
    GRPO(samples=2, loss="grpo", correction="token"),
    GRPO(samples=2, loss="gspo"),
    GRPO(samples=2, loss="cispo", correction="geometric"),
    GRPO(samples=2, loss="sapo"),
    GRPO(samples=2, loss="dr_grpo", constant=6.0),
    PPO(kl=0.1, dual_clip=3.0),
    SFT(),
    OnPolicyDistillation(),
]


def evaluated(drawn: Episodes) -> tuple[Evaluated, torch.Tensor, torch.Tensor]:
    """A batch, the policy's log-probabilities now, and its entropies; NaN where the policy chose nothing."""
    random = np.random.default_rng(drawn.seed)
    mask = padded([episode.mask for episode in drawn.episodes], fill=False)

    def numbers(scale: float) -> torch.Tensor:
        return torch.where(mask, torch.from_numpy(random.normal(size=mask.shape) * scale), float("nan"))

    old = numbers(1.0)
    batch = Evaluated(
        mask=mask,
        groups=torch.tensor(drawn.groups),
        rewards=torch.from_numpy(random.normal(size=len(drawn.groups)).round()),
        valid=torch.from_numpy(random.random(len(drawn.groups)) < 0.8),
        log_probs=old,
        sampled_log_probs=old + numbers(0.1),
        ref_log_probs=old + numbers(0.1),
        values=numbers(1.0),
    )
    return batch, old + numbers(0.3), numbers(1.0).abs()


def by_numpy(algorithm: Algorithm, batch: Evaluated, now: torch.Tensor, entropy: torch.Tensor) -> float:
    """The loss of the whole batch, from the twins, in one piece."""
    weights = algorithm.weigh(batch)
    mask = batch.mask.numpy()
    name = {"ppo": "ppo_clip_loss"}.get(algorithm.policy_loss, f"{algorithm.policy_loss}_loss")
    loss = getattr(reference, name)(
        now.numpy(), batch.given_log_probs.numpy(), weights.advantages.numpy(), mask, **algorithm.policy_options
    )[0]
    assert batch.ref_log_probs is not None
    kl = reference.kl_estimate(now.numpy(), batch.ref_log_probs.numpy(), mask, algorithm.divergence_estimator)
    total = 0.0
    for b, t in zip(*np.nonzero(mask), strict=True):
        policy = weights.policy[b, t] / weights.normalisers.policy
        total += float(policy * (loss[b, t] - algorithm.entropy_coefficient * entropy[b, t]))
        total -= float(weights.likelihood[b, t] / weights.normalisers.likelihood * now[b, t])
        total += float(weights.divergence[b, t] / weights.normalisers.divergence * kl[b, t])
    return total


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: f"{type(a).__name__}-{getattr(a, 'loss', '')}")
@settings(max_examples=25)
@given(drawn=groups_of_episodes(), budget=st.integers(1, 60), ranks=st.integers(1, 3), share=st.booleans())
def test_any_cut_gives_the_loss_and_gradient_of_the_whole(
    algorithm: Algorithm, drawn: Episodes, budget: int, ranks: int, share: bool
) -> None:
    batch, now, entropy = evaluated(drawn)
    weights = algorithm.weigh(batch)

    def total(**cut: Any) -> tuple[float, torch.Tensor, dict[str, float]]:
        leaf = now.clone().requires_grad_()
        shares: list[float] = []
        sums: dict[str, float] = {}
        for packs in pack(drawn.episodes, groups=drawn.groups, **cut).by_rank:
            for one in packs:
                rows, places = torch.from_numpy(one.rows), torch.from_numpy(one.places)
                columns = Columns.of(one, batch, weights, "cpu", torch.float64)
                terms = TokenTerms(leaf[rows, places], entropy[rows, places])
                part, statistics = policy_share(terms, columns, weights.normalisers, algorithm)
                part.backward()
                shares.append(part.item())
                for name, value in statistics.items():
                    sums[name] = sums.get(name, 0.0) + value.item()
        assert leaf.grad is not None
        return sum(shares), leaf.grad, sums

    whole, gradient, sums = total(token_budget=10_000)
    cut, cut_gradient, cut_sums = total(token_budget=budget, ranks=ranks, share_prompts=share)
    assert cut == pytest.approx(whole, abs=1e-9) and cut_sums == pytest.approx(sums, abs=1e-9)
    torch.testing.assert_close(cut_gradient, gradient, atol=1e-9, rtol=0, equal_nan=False)
    assert gradient[~batch.mask].eq(0).all()
    assert whole == pytest.approx(by_numpy(algorithm, batch, now, entropy), abs=1e-6)


@settings(max_examples=25)
@given(drawn=groups_of_episodes(), budget=st.integers(1, 60))
def test_the_critics_loss_is_that_of_its_twin(drawn: Episodes, budget: int) -> None:
    batch, values, _ = evaluated(drawn)
    weights = PPO().weigh(batch)
    tokens = float((weights.policy > 0).sum())
    total = 0.0
    for one in pack(drawn.episodes, groups=drawn.groups, token_budget=budget).by_rank[0]:
        rows, places = torch.from_numpy(one.rows), torch.from_numpy(one.places)
        columns = Columns.of(one, batch, weights, "cpu", torch.float64)
        total += value_share(values[rows, places], columns, tokens=tokens, clip=0.2)[0].item()
    mask = batch.usable.numpy()
    assert batch.values is not None and weights.returns is not None
    loss, _ = reference.value_clip_loss(values.numpy(), batch.values.numpy(), weights.returns.numpy(), mask, clip=0.2)
    assert total == pytest.approx(reference.aggregate(loss, mask, "token-mean", denominator=tokens), abs=1e-9)


def test_a_critic_without_returns_is_refused() -> None:
    drawn = episodes_of([(2, [1])], 0)
    batch, values, _ = evaluated(drawn)
    one = pack(drawn.episodes, token_budget=10).by_rank[0][0]
    columns = Columns.of(one, batch, SFT().weigh(batch), "cpu", torch.float64)
    with pytest.raises(ValueError, match="no returns"):
        value_share(values[one.rows, one.places], columns, tokens=1.0, clip=None)


@pytest.mark.parametrize("algorithm", [GRPO(), GRPO(loss="gspo"), GRPO(loss="cispo"), SFT()])
def test_without_old_log_probs_the_ratio_is_measured_from_the_pass_itself(algorithm: Algorithm) -> None:
    log_probs = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    rows = torch.tensor([0, 0, 1, 1, 1, 2])
    numbers = torch.linspace(-1, 1, 6, dtype=torch.float64)
    given = Columns(rows, log_probs.detach(), numbers, numbers.abs(), numbers.abs(), torch.zeros_like(numbers))
    found = []
    for columns in (given, replace(given, old_log_probs=None)):
        terms = TokenTerms(log_probs, torch.zeros_like(log_probs))
        share, statistics = policy_share(terms, columns, Normalisers(2.0, 3.0, 1.0), algorithm)
        found.append((share, *torch.autograd.grad(share, log_probs), *statistics.values()))
    torch.testing.assert_close(found[0], found[1], atol=0, rtol=0)
