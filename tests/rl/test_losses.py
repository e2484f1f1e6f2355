from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlmesh.rl import losses, reference
from rlmesh.rl.losses import (
    Aggregation,
    PolicyTerms,
    aggregate,
    cispo_loss,
    entropy,
    gspo_loss,
    ppo_clip_loss,
    sapo_loss,
    token_log_probs,
    valid_count,
    value_clip_loss,
)
from rlmesh.rl.masking import masked_mean
from tests.rl.batches import Batch, batches, poisoned

NAN = float("nan")
MODES: list[Aggregation] = ["token-mean", "sequence-mean", "constant"]


def constant_of(mode: Aggregation) -> float | None:
    return 5.0 if mode == "constant" else None


@given(batches(), st.floats(0.25, 4))
def test_log_probs_and_entropy_agree_with_numpy(batch: Batch, temperature: float) -> None:
    logits = batch.normal(1, 5) * 3
    tokens = np.random.default_rng(batch.seed).integers(0, 5, batch.shape)
    mask, given_logits = torch.tensor(batch.mask), torch.tensor(poisoned(logits, batch.mask))
    got = token_log_probs(given_logits, torch.tensor(tokens), mask, temperature=temperature)
    expected = reference.token_log_probs(logits, tokens, batch.mask, temperature=temperature)
    np.testing.assert_allclose(got, expected, atol=1e-9)
    got = entropy(given_logits, mask, temperature=temperature)
    expected = reference.entropy(logits, batch.mask, temperature=temperature)
    np.testing.assert_allclose(got, expected, atol=1e-9)


def test_masked_logits_get_no_gradient_even_if_they_are_nan() -> None:
    logits = torch.zeros(1, 2, 3)
    logits[0, 1] = NAN
    logits.requires_grad_()
    mask = torch.tensor([[True, False]])
    tokens = torch.tensor([[1, -100]])  # a filler that is no token at all
    (token_log_probs(logits, tokens, mask).sum() + entropy(logits, mask).sum()).backward()
    assert logits.grad is not None and logits.grad.isfinite().all()
    assert logits.grad[0, 1].tolist() == [0, 0, 0]


def test_a_token_that_was_ruled_out_adds_no_entropy() -> None:
    logits = torch.tensor([[[0.0, 0.0, -float("inf")]]], requires_grad=True)
    value = entropy(logits, torch.ones(1, 1))
    value.sum().backward()
    assert value.item() == pytest.approx(np.log(2))
    assert logits.grad is not None and logits.grad.isfinite().all()


def test_half_precision_logits_are_computed_in_single() -> None:
    logits = torch.randn(1, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    got = token_log_probs(logits, torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, logits.float().log_softmax(-1)[..., 0])


def test_a_greedy_temperature_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature must be > 0"):
        token_log_probs(torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1), temperature=0)


@given(batches(), st.floats(0, 0.9), st.none() | st.floats(0, 2))
def test_the_policy_loss_agrees_with_numpy(batch: Batch, low: float, high: float | None) -> None:
    new, old, advantages = (batch.normal(i) for i in (1, 2, 3))
    tensors = [torch.tensor(poisoned(x, batch.mask)) for x in (new, old, advantages)]
    terms = ppo_clip_loss(tensors[0], tensors[1], tensors[2], torch.tensor(batch.mask), clip_low=low, clip_high=high)
    loss, ratio, clipped = reference.ppo_clip_loss(new, old, advantages, batch.mask, clip_low=low, clip_high=high)
    np.testing.assert_allclose(terms.loss, loss, atol=1e-9)
    np.testing.assert_allclose(terms.ratio, ratio, atol=1e-9)
    np.testing.assert_array_equal(terms.clipped, clipped)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "slope"),
    [
        (np.log(1.1), 2.0, -2.2, -2.2),  # inside
        (np.log(1.5), 2.0, -2.4, 0.0),  # has grown enough: clipped, no gradient
        (np.log(1.5), -2.0, 3.0, 3.0),  # has grown although bad: not clipped
        (np.log(0.5), -2.0, 1.6, 0.0),  # has shrunk enough
        (np.log(0.5), 2.0, -1.0, -1.0),  # has shrunk although good
    ],
)
def test_the_policy_loss_is_the_numbers_worked_by_hand(
    log_ratio: float, advantage: float, loss: float, slope: float
) -> None:
    lp = torch.tensor([[log_ratio]], dtype=torch.float64, requires_grad=True)
    terms = ppo_clip_loss(
        lp, torch.zeros(1, 1, dtype=torch.float64), torch.full((1, 1), advantage).double(), torch.ones(1, 1)
    )
    terms.loss.sum().backward()
    assert terms.loss.item() == pytest.approx(loss)
    assert lp.grad is not None and lp.grad.item() == pytest.approx(slope)
    assert terms.clipped.item() == (slope == 0)


@pytest.mark.case("O22")
def test_nan_in_a_masked_slot_poisons_nothing() -> None:
    lp = torch.zeros(1, 2, requires_grad=True)
    old, advantages = torch.tensor([[0.0, NAN]]), torch.ones(1, 2)
    mask = torch.tensor([[True, False]])
    terms = ppo_clip_loss(lp, old, advantages, mask)
    loss = aggregate(terms.loss, mask, "token-mean", denominator=valid_count(mask, "token-mean"))
    loss.backward()
    assert loss.item() == -1.0
    assert lp.grad is not None and lp.grad.tolist() == [[-1.0, 0.0]]
    assert terms.ratio.isfinite().all()
    assert masked_mean(terms.ratio, mask).item() == 1.0
    with pytest.raises(FloatingPointError, match=r"old_log_probs .* at \[0, 1\]"):
        ppo_clip_loss(lp, old, advantages, torch.tensor([[True, True]]))


def test_a_ratio_that_overflows_raises_instead_of_training() -> None:
    with pytest.raises(FloatingPointError, match="ratio"):
        ppo_clip_loss(torch.tensor([[100.0]]), torch.zeros(1, 1), -torch.ones(1, 1), torch.ones(1, 1))


def test_clip_bounds_are_checked() -> None:
    x = torch.zeros(1, 1)
    for low, high in ((1.0, None), (-0.1, None), (0.2, -1.0)):
        with pytest.raises(ValueError, match="clip_low must be"):
            ppo_clip_loss(x, x, x, x, clip_low=low, clip_high=high)
    with pytest.raises(ValueError, match="clip must be > 0"):
        value_clip_loss(x, x, x, x, clip=0)


@given(batches(), st.sampled_from(["ppo_clip_loss", "gspo_loss", "cispo_loss", "sapo_loss"]), st.data())
def test_policy_losses_agree_with_numpy(batch: Batch, name: str, data: st.DataObject) -> None:
    choices: dict[str, dict[str, st.SearchStrategy[float | None]]] = {
        "ppo_clip_loss": {"dual_clip": st.none() | st.floats(1.1, 4)},
        "gspo_loss": {"clip_low": st.floats(0, 0.9), "clip_high": st.none() | st.floats(0, 1)},
        "cispo_loss": {"clip_low": st.none() | st.floats(0, 1), "clip_high": st.floats(0, 5)},
        "sapo_loss": {"temperature_up": st.floats(0.5, 2), "temperature_down": st.floats(0.5, 2)},
    }
    options = st.fixed_dictionaries(choices[name])
    chosen = data.draw(options)
    values = [batch.normal(i) for i in (1, 2, 3)]
    tensors = [torch.tensor(poisoned(x, batch.mask)) for x in values]
    terms = getattr(losses, name)(*tensors, torch.tensor(batch.mask), **chosen)
    loss, ratio, clipped = getattr(reference, name)(*values, batch.mask, **chosen)
    np.testing.assert_allclose(terms.loss, loss, atol=1e-9)
    np.testing.assert_allclose(terms.ratio, ratio, atol=1e-9)
    np.testing.assert_array_equal(terms.clipped, clipped)


@pytest.mark.parametrize("loss", [ppo_clip_loss, gspo_loss, cispo_loss, sapo_loss])
def test_on_policy_every_loss_has_the_plain_policy_gradient(loss: Callable[..., PolicyTerms]) -> None:
    old = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    advantages = torch.tensor([[1.0, 1.0, 1.0], [-2.0, -2.0, -2.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    new = old.clone().requires_grad_()
    loss(new, old, advantages, mask).loss.sum().backward()
    torch.testing.assert_close(new.grad, torch.where(mask, -advantages, 0.0))


def test_the_dual_clip_bounds_the_loss_of_bad_tokens() -> None:
    new = torch.tensor([[2.0, 2.0, 0.5]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[-1.0, 1.0, -1.0]], dtype=torch.float64)
    terms = ppo_clip_loss(new, torch.zeros(1, 3).double(), advantages, torch.ones(1, 3), dual_clip=3.0)
    terms.loss.sum().backward()
    assert terms.loss[0].tolist() == pytest.approx([3.0, -1.2, np.exp(0.5)])
    assert terms.clipped.tolist() == [[True, True, False]]
    assert new.grad is not None and new.grad[0].tolist() == pytest.approx([0, 0, np.exp(0.5)])


def test_a_sequence_has_one_ratio_in_gspo() -> None:
    old = torch.zeros(1, 2).double()
    new = torch.tensor([[0.4, -0.2]], dtype=torch.float64, requires_grad=True)
    terms = gspo_loss(new, old, torch.ones(1, 2).double(), torch.ones(1, 2), clip_low=0.5, clip_high=0.5)
    assert terms.ratio[0].tolist() == pytest.approx([np.exp(0.1)] * 2)
    terms.loss.sum().backward()
    assert new.grad is not None and new.grad[0].tolist() == pytest.approx([-np.exp(0.1)] * 2)


def test_wrong_settings_of_losses_are_refused() -> None:
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="dual_clip must be > 1"):
        ppo_clip_loss(x, x, x, x, dual_clip=1.0)
    with pytest.raises(ValueError, match="clip_low must be in"):
        gspo_loss(x, x, x, x, clip_low=1.0)
    with pytest.raises(ValueError, match="clip_high"):
        cispo_loss(x, x, x, x, clip_high=-1.0)
    with pytest.raises(ValueError, match="temperatures must be > 0"):
        sapo_loss(x, x, x, x, temperature_up=0)
    with pytest.raises(ValueError, match="takes a constant"):
        aggregate(x, x, "constant", denominator=1)
    with pytest.raises(ValueError, match="takes a constant"):
        aggregate(x, x, "token-mean", denominator=1, constant=2.0)


@given(batches(), st.none() | st.floats(0.01, 2))
def test_the_value_loss_agrees_with_numpy(batch: Batch, clip: float | None) -> None:
    new, old, returns = (batch.normal(i) for i in (1, 2, 3))
    tensors = [torch.tensor(poisoned(x, batch.mask)) for x in (new, old, returns)]
    terms = value_clip_loss(tensors[0], tensors[1], tensors[2], torch.tensor(batch.mask), clip=clip)
    loss, clipped = reference.value_clip_loss(new, old, returns, batch.mask, clip=clip)
    np.testing.assert_allclose(terms.loss, loss, atol=1e-9)
    np.testing.assert_array_equal(terms.clipped, clipped)


def test_the_value_loss_is_the_numbers_worked_by_hand() -> None:
    values = torch.tensor([[1.0, 0.1]], requires_grad=True)
    terms = value_clip_loss(values, torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2), clip=0.2)
    terms.loss.sum().backward()
    assert terms.loss[0].tolist() == pytest.approx([0.32, 0.405])
    assert values.grad is not None and values.grad[0].tolist() == pytest.approx([0.0, -0.9])
    assert terms.clipped.tolist() == [[True, False]]


@given(batches(), st.sampled_from(MODES))
def test_aggregation_agrees_with_numpy(batch: Batch, mode: Aggregation) -> None:
    x, mask = batch.normal(1), torch.tensor(batch.mask)
    n = valid_count(mask, mode)
    assert n.item() == reference.valid_count(batch.mask, mode)
    constant = constant_of(mode)
    got = aggregate(torch.tensor(poisoned(x, batch.mask)), mask, mode, denominator=n, constant=constant)
    expected = reference.aggregate(x, batch.mask, mode, denominator=n.item(), constant=constant)
    assert got.item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.case("O23")
@given(batches(), st.sampled_from(MODES), st.data())
def test_the_loss_does_not_depend_on_the_split(batch: Batch, mode: Aggregation, data: st.DataObject) -> None:
    mask = torch.tensor(batch.mask)
    n = valid_count(mask, mode)
    rows = batch.shape[0]
    cuts = sorted(data.draw(st.sets(st.integers(1, rows - 1)))) if rows > 1 else []
    whole = torch.tensor(batch.normal(1), requires_grad=True)
    constant = constant_of(mode)
    total = aggregate(whole, mask, mode, denominator=n, constant=constant)
    total.backward()
    parts = torch.tensor(batch.normal(1), requires_grad=True)
    shares = [
        aggregate(parts[a:b], mask[a:b], mode, denominator=n, constant=constant)
        for a, b in zip([0, *cuts], [*cuts, rows], strict=True)
    ]
    for share in shares:
        share.backward()
    assert sum(s.item() for s in shares) == pytest.approx(total.item(), abs=1e-9)
    assert whole.grad is not None and parts.grad is not None
    torch.testing.assert_close(parts.grad, whole.grad, atol=1e-9, rtol=0)


@pytest.mark.case("O23")
def test_split_losses_are_the_numbers_worked_by_hand() -> None:
    per_token = torch.tensor([[4.0, NAN, NAN], [1.0, 1.0, 1.0]])
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]]).bool()
    n = valid_count(mask, "token-mean")
    assert aggregate(per_token, mask, "token-mean", denominator=n).item() == 1.75
    one_by_one = [aggregate(per_token[i : i + 1], mask[i : i + 1], "token-mean", denominator=n) for i in (0, 1)]
    assert sum(x.item() for x in one_by_one) == 1.75
    sequences = valid_count(mask, "sequence-mean")
    assert aggregate(per_token, mask, "sequence-mean", denominator=sequences).item() == 2.5


@pytest.mark.case("O23")
@pytest.mark.parametrize("mode", MODES)
def test_a_rank_without_valid_tokens_contributes_0(mode: Aggregation) -> None:
    per_token = torch.full((2, 3), NAN, requires_grad=True)
    share = aggregate(per_token, torch.zeros(2, 3), mode, denominator=7, constant=constant_of(mode))
    share.backward()
    assert share.item() == 0
    assert per_token.grad is not None and per_token.grad.tolist() == [[0] * 3] * 2


def test_the_count_of_a_part_is_refused_as_that_of_the_whole() -> None:
    with pytest.raises(ValueError, match="denominator is 1, but this part alone has 2"):
        aggregate(torch.zeros(1, 2), torch.ones(1, 2), "token-mean", denominator=1)


def test_an_unknown_aggregation_is_named() -> None:
    with pytest.raises(ValueError, match="unknown aggregation 'mean': use one of token-mean, sequence-mean, constant"):
        valid_count(torch.ones(1, 1), "mean")  # type: ignore[arg-type]
