from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlmesh.rl import reference
from rlmesh.rl.kl import KLController, KLEstimator, kl_estimate, token_rewards
from tests.rl.batches import Batch, batches, poisoned

ESTIMATORS: list[KLEstimator] = ["k1", "k2", "k3"]


@given(batches(), st.sampled_from(ESTIMATORS))
def test_estimates_agree_with_numpy(batch: Batch, estimator: KLEstimator) -> None:
    lp, ref = batch.normal(1), batch.normal(2)
    got = kl_estimate(
        torch.tensor(poisoned(lp, batch.mask)),
        torch.tensor(poisoned(ref, batch.mask)),
        torch.tensor(batch.mask),
        estimator,
    )
    np.testing.assert_allclose(got, reference.kl_estimate(lp, ref, batch.mask, estimator), atol=1e-12)


def test_estimates_of_the_kl_are_the_numbers_worked_by_hand() -> None:
    lp, ref, mask = torch.tensor([[0.0]]), torch.tensor([[math.log(2)]]), torch.tensor([[True]])
    got = [kl_estimate(lp, ref, mask, e).item() for e in ESTIMATORS]
    assert got == pytest.approx([-math.log(2), math.log(2) ** 2 / 2, 1 - math.log(2)])


def test_k1_and_k3_are_unbiased_where_the_policy_samples() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    true_kl = (p * (p / q).log()).sum().item()
    lp, ref = p.log().unsqueeze(0), q.log().unsqueeze(0)
    for estimator in ("k1", "k3"):
        estimate = kl_estimate(lp, ref, torch.ones(1, 3, dtype=torch.bool), estimator)
        assert (p * estimate[0]).sum().item() == pytest.approx(true_kl, abs=1e-6)


def test_the_gradient_of_k2_is_that_of_the_kl() -> None:
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log()
    lp = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((lp.exp() * (lp - ref)).sum(), logits, retain_graph=True)
    k2 = kl_estimate(lp.unsqueeze(0), ref.unsqueeze(0), torch.ones(1, 3, dtype=torch.bool), "k2")[0]
    (sampled,) = torch.autograd.grad((lp.exp().detach() * k2).sum(), logits)
    torch.testing.assert_close(sampled, exact)


def test_k1_is_refused_inside_a_loss_and_allowed_in_a_reward() -> None:
    lp = torch.zeros(1, 1, requires_grad=True)
    ref, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match="use 'k2' or unbiased_gradient=True for a KL loss"):
        kl_estimate(lp, ref, mask, "k1")
    with torch.no_grad():
        assert kl_estimate(lp, ref, mask, "k1").item() == 0
    assert kl_estimate(lp.detach(), ref, mask, "k1").item() == 0


def test_no_gradient_flows_to_the_reference() -> None:
    ref = torch.zeros(1, 1, requires_grad=True)
    kl = kl_estimate(torch.ones(1, 1, requires_grad=True), ref, torch.ones(1, 1, dtype=torch.bool), "k3")
    kl.sum().backward()
    assert ref.grad is None


def test_an_unknown_estimator_is_named() -> None:
    with pytest.raises(ValueError, match="unknown KL estimator 'k4': use one of k1, k2, k3"):
        kl_estimate(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), "k4")  # type: ignore[arg-type]


@pytest.mark.case("O22")
def test_nan_in_a_masked_slot_is_ignored_and_elsewhere_raises() -> None:
    lp, ref = torch.tensor([[-1.0, float("nan")]]), torch.tensor([[-2.0, -1.0]])
    assert kl_estimate(lp, ref, torch.tensor([[True, False]]), "k3").tolist()[0][1] == 0
    with pytest.raises(FloatingPointError, match="log_probs"):
        kl_estimate(lp, ref, torch.tensor([[True, True]]), "k3")


@given(batches(), st.floats(0, 2))
def test_token_rewards_agree_with_numpy(batch: Batch, coefficient: float) -> None:
    scores, kl = batch.normal(1)[:, 0], batch.normal(2)
    got = token_rewards(
        torch.tensor(scores),
        torch.tensor(poisoned(kl, batch.mask)),
        torch.tensor(batch.mask),
        coefficient=coefficient,
    )
    expected = reference.token_rewards(scores, kl, batch.mask, coefficient=coefficient)
    np.testing.assert_allclose(got, expected, atol=1e-12)


def test_the_score_stands_at_the_last_valid_token() -> None:
    mask = torch.tensor([[1, 1, 0, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
    got = token_rewards(torch.tensor([5.0, 7.0, 9.0]), torch.zeros(3, 5), mask, coefficient=0.1)
    assert got.tolist() == [[0, 0, 0, 5, 0], [7, 0, 0, 0, 0], [0, 0, 0, 0, 0]]


def test_a_score_per_row_is_required_and_must_be_finite() -> None:
    kl, mask = torch.zeros(2, 3), torch.tensor([[True] * 3, [False] * 3])
    with pytest.raises(ValueError, match="one per row"):
        token_rewards(torch.zeros(2, 1), kl, mask, coefficient=0.1)
    with pytest.raises(FloatingPointError, match="scores"):
        token_rewards(torch.tensor([float("nan"), 0.0]), kl, mask, coefficient=0.1)
    token_rewards(torch.tensor([0.0, float("nan")]), kl, mask, coefficient=0.1)  # its row has no valid token


def test_a_fixed_controller_stays() -> None:
    controller = KLController(0.05)
    assert controller.updated(99.0, samples=10_000) is controller


@pytest.mark.parametrize(("kl", "factor"), [(6.0, 1.0), (6.6, 1.01), (60.0, 1.02), (0.0, 0.98)])
def test_an_adaptive_controller_follows_the_clipped_error(kl: float, factor: float) -> None:
    after = KLController(0.2, target=6.0, horizon=10_000).updated(kl, samples=1_000)
    assert after.coefficient == pytest.approx(0.2 * factor)


@given(st.floats(0, 1e6), st.integers(1, 10**9))
def test_an_adaptive_coefficient_never_becomes_negative(kl: float, samples: int) -> None:
    assert KLController(0.2, target=1.0, horizon=10).updated(kl, samples=samples).coefficient >= 0


def test_a_controller_refuses_impossible_settings() -> None:
    for bad in (
        {"coefficient": -1.0},
        {"coefficient": 0.1, "target": 0.0},
        {"coefficient": 0.1, "horizon": 0},
    ):
        with pytest.raises(ValueError, match="coefficient must be"):
            KLController(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_an_unbiased_gradient_is_that_of_the_divergence(estimator: KLEstimator) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(6, dtype=torch.float64, generator=generator, requires_grad=True)
    ref = torch.randn(6, dtype=torch.float64, generator=generator).log_softmax(-1)
    policy = logits.log_softmax(-1)
    exact = torch.autograd.grad((policy.exp() * (policy - ref)).sum(), logits, retain_graph=True)[0]
    mask = torch.ones(1, 6, dtype=torch.bool)
    each = kl_estimate(policy.unsqueeze(0), ref.unsqueeze(0), mask, estimator, unbiased_gradient=True)[0]
    # The mean over the policy's own samples, computed exactly: weighted by the probability of each token.
    mean = torch.autograd.grad((policy.exp().detach() * each).sum(), logits)[0]
    torch.testing.assert_close(mean, exact)
    plain = kl_estimate(policy.detach().unsqueeze(0), ref.unsqueeze(0), mask, estimator)[0]
    torch.testing.assert_close(each.detach(), plain)
