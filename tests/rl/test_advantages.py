from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlmesh.rl import reference
from rlmesh.rl.advantages import discounted_returns, gae, reinforce_plus_plus, suffix_scan
from rlmesh.rl.kl import token_rewards
from tests.rl.batches import Batch, batches, poisoned

unit = st.floats(0, 1)


@given(batches(), unit, unit, st.booleans())
def test_gae_agrees_with_numpy(batch: Batch, gamma: float, lam: float, cut_off: bool) -> None:
    rewards, values = batch.normal(1), batch.normal(2)
    last = batch.normal(3)[:, 0] if cut_off else None
    got = gae(
        torch.tensor(poisoned(rewards, batch.mask)),
        torch.tensor(poisoned(values, batch.mask)),
        torch.tensor(batch.mask),
        gamma=gamma,
        lam=lam,
        last_values=None if last is None else torch.tensor(last),
    )
    expected = reference.gae(rewards, values, batch.mask, gamma=gamma, lam=lam, last_values=last)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == torch.float64
        np.testing.assert_allclose(mine, theirs, atol=1e-9)


@given(batches(), unit)
def test_returns_agree_with_numpy(batch: Batch, gamma: float) -> None:
    rewards = batch.normal(1)
    got = discounted_returns(torch.tensor(poisoned(rewards, batch.mask)), torch.tensor(batch.mask), gamma=gamma)
    np.testing.assert_allclose(got, reference.discounted_returns(rewards, batch.mask, gamma=gamma), atol=1e-10)


@given(batches(), unit)
def test_with_lambda_1_gae_is_the_discounted_return(batch: Batch, gamma: float) -> None:
    rewards, values, mask = (
        torch.tensor(batch.normal(1)),
        torch.tensor(batch.normal(2)),
        torch.tensor(batch.mask),
    )
    _, returns = gae(rewards, values, mask, gamma=gamma, lam=1.0)
    torch.testing.assert_close(returns, discounted_returns(rewards, mask, gamma=gamma), atol=1e-6, rtol=0)


@given(batches(), st.integers(1, 3))
def test_padding_changes_nothing(batch: Batch, extra: int) -> None:
    rewards, values, last = batch.normal(1), batch.normal(2), torch.tensor(batch.normal(3)[:, 0])

    def padded(x: np.ndarray, fill: float | bool) -> torch.Tensor:
        return torch.tensor(np.pad(x, [(0, 0), (0, extra)], constant_values=fill))

    def advantages(*columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gae(columns[0], columns[1], columns[2], gamma=0.9, lam=0.95, last_values=last)

    plain = advantages(torch.tensor(rewards), torch.tensor(values), torch.tensor(batch.mask))
    longer = advantages(padded(rewards, np.nan), padded(values, np.nan), padded(batch.mask, False))
    for a, b in zip(plain, longer, strict=True):
        torch.testing.assert_close(b[:, : a.shape[1]], a)


@pytest.mark.case("O22")
def test_kl_of_masked_tokens_is_no_part_of_the_return() -> None:
    kl = torch.ones(1, 4)
    mask = torch.tensor([[1, 0, 0, 1]]).bool()
    rewards = token_rewards(torch.zeros(1), kl, mask, coefficient=1.0)
    assert discounted_returns(rewards, mask, gamma=0.9)[0, 0].item() == pytest.approx(-1.729)
    _, returns = gae(rewards, torch.tensor([[0.3, float("nan"), 9.0, -0.4]]), mask, gamma=0.9, lam=1.0)
    assert returns[0, 0].item() == pytest.approx(-1.729)
    unmasked = token_rewards(torch.zeros(1), kl, torch.ones_like(mask), coefficient=1.0)
    assert discounted_returns(unmasked, torch.ones_like(mask), gamma=0.9)[0, 0].item() == pytest.approx(-3.439)


def test_ended_and_cut_off_rows_differ_by_what_comes_after() -> None:
    rewards, values = torch.ones(1, 3).double(), torch.full((1, 3), 2.0).double()
    mask = torch.ones(1, 3, dtype=torch.bool)
    ended, _ = gae(rewards, values, mask, gamma=0.9, lam=0.95)
    cut, _ = gae(rewards, values, mask, gamma=0.9, lam=0.95, last_values=torch.tensor([2.0]))
    assert ended[0].tolist() == pytest.approx([0.752975, -0.055, -1.0])
    assert cut[0].tolist() == pytest.approx([2.06882, 1.484, 0.8])


def test_no_gradient_flows_and_shapes_must_agree() -> None:
    values = torch.zeros(1, 2, requires_grad=True)
    advantages, returns = gae(torch.ones(1, 2), values, torch.ones(1, 2), gamma=1, lam=1)
    assert not advantages.requires_grad and not returns.requires_grad
    with pytest.raises(ValueError, match="values"):
        gae(torch.ones(1, 2), torch.zeros(1, 3), torch.ones(1, 2), gamma=1, lam=1)


def test_an_empty_response_is_no_error() -> None:
    empty, mask = torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool)
    assert gae(empty, empty, mask, gamma=1, lam=1)[0].shape == (2, 0)
    assert discounted_returns(empty, mask, gamma=1).shape == (2, 0)


def test_nan_in_a_valid_slot_raises() -> None:
    with pytest.raises(FloatingPointError, match="values"):
        gae(torch.zeros(1, 1), torch.tensor([[float("nan")]]), torch.ones(1, 1), gamma=1, lam=1)


@given(batches(), unit)
def test_reinforce_plus_plus_agrees_with_numpy(batch: Batch, gamma: float) -> None:
    rewards = batch.normal(1)
    got = reinforce_plus_plus(torch.tensor(poisoned(rewards, batch.mask)), torch.tensor(batch.mask), gamma=gamma)
    np.testing.assert_allclose(got, reference.reinforce_plus_plus(rewards, batch.mask, gamma=gamma), atol=1e-6)


@given(st.integers(0, 40), st.integers(0, 2**31))
def test_a_scan_is_the_recurrence(time: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    inputs, decays = random.normal(size=(2, time)), random.choice([0.0, 0.5, 1.0], size=(2, time))
    expected, later = np.zeros((2, time)), np.zeros(2)
    for t in reversed(range(time)):
        later = inputs[:, t] + decays[:, t] * later
        expected[:, t] = later
    np.testing.assert_allclose(suffix_scan(torch.tensor(inputs), torch.tensor(decays)), expected, atol=1e-12)


def test_long_rows_keep_their_precision() -> None:
    rewards = torch.randn(2, 20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 20_000, dtype=torch.bool)
    expected, later = torch.zeros_like(rewards), torch.zeros(2, dtype=torch.float64)
    for t in reversed(range(20_000)):
        later = rewards[:, t] + 0.999 * later
        expected[:, t] = later
    torch.testing.assert_close(discounted_returns(rewards, mask, gamma=0.999), expected, atol=1e-10, rtol=0)
