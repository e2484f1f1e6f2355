from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlmesh.rl import reference
from rlmesh.rl.masking import deferred_checks, keep, masked_mean, masked_sum, masked_whiten
from tests.rl.batches import Batch, batches, poisoned

NAN, INF = float("nan"), float("inf")


@given(batches())
def test_mean_agrees_with_numpy(batch: Batch) -> None:
    x = batch.normal(1)
    got = masked_mean(torch.tensor(poisoned(x, batch.mask)), torch.tensor(batch.mask))
    assert got.item() == pytest.approx(reference.masked_mean(x, batch.mask), abs=1e-12)


@given(batches(), st.booleans())
def test_whitening_agrees_with_numpy(batch: Batch, shift: bool) -> None:
    x = batch.normal(1) * 3 + 5
    got = masked_whiten(torch.tensor(poisoned(x, batch.mask)), torch.tensor(batch.mask), shift_mean=shift)
    np.testing.assert_allclose(got, reference.masked_whiten(x, batch.mask, shift_mean=shift), atol=1e-6)


@given(batches(min_valid=2))
def test_whitened_values_have_mean_0_and_variance_1(batch: Batch) -> None:
    mask = torch.tensor(batch.mask)
    white = masked_whiten(torch.tensor(batch.normal(1) * 7 - 3), mask)
    assert white[mask].mean().item() == pytest.approx(0, abs=1e-6)
    assert white[mask].var(correction=0).item() == pytest.approx(1, abs=1e-3)


def test_mean_along_a_dimension_and_of_nothing() -> None:
    x = torch.tensor([[1.0, 3.0, NAN], [NAN, NAN, NAN]])
    mask = torch.tensor([[True, True, False], [False, False, False]])
    assert masked_mean(x, mask, dim=1).tolist() == [2.0, 0.0]
    assert masked_sum(x, mask, dim=1).tolist() == [4.0, 0.0]
    assert masked_mean(x[1:], mask[1:]).item() == 0.0
    assert masked_whiten(x[1:], mask[1:]).tolist() == [[0.0, 0.0, 0.0]]


def test_equal_values_whiten_to_zero() -> None:
    assert masked_whiten(torch.full((2, 2), 5.0), torch.ones(2, 2, dtype=torch.bool)).tolist() == [
        [0, 0],
        [0, 0],
    ]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_bad_value_in_a_masked_slot_changes_neither_value_nor_gradient(bad: float) -> None:
    x = torch.tensor([[2.0, bad]], requires_grad=True)
    total = masked_sum(x, torch.tensor([[True, False]]))
    total.backward()
    assert total.item() == 2.0
    assert x.grad is not None and x.grad.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_bad_value_in_a_valid_slot_raises_with_name_place_and_count(bad: float) -> None:
    x = torch.tensor([[1.0, bad], [bad, 0.0]])
    mask = torch.tensor([[True, True], [False, True]])
    with pytest.raises(FloatingPointError, match=r"rewards holds 1 values .* the first at \[0, 1\]: (nan|inf)"):
        keep(x, mask, name="rewards")


@pytest.mark.parametrize("shape", [(2,), (2, 1), (1, 3), (3, 2)])
def test_a_mask_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"mask has shape .* but advantages has \(2, 3\)"):
        keep(torch.zeros(2, 3), torch.ones(shape, dtype=torch.bool), name="advantages")


def test_a_mask_of_integers_counts_as_booleans() -> None:
    assert masked_mean(torch.tensor([[1.0, 9.0]]), torch.tensor([[1, 0]])).item() == 1.0


def test_deferred_checks_raise_what_immediate_ones_do() -> None:
    x = torch.tensor([[0.0, 1.0], [float("inf"), NAN]])
    mask = torch.ones(2, 2, dtype=torch.bool)
    with pytest.raises(FloatingPointError) as now:
        keep(x, mask, name="scores")
    ran_on = False
    with pytest.raises(FloatingPointError) as later, deferred_checks():
        keep(torch.zeros(3), torch.ones(3), name="fine")
        keep(x, mask, name="scores")
        keep(x, mask, name="told second")
        ran_on = True
    assert ran_on and str(later.value) == str(now.value)
    assert "scores holds 2 values" in str(now.value) and "[1, 0]: inf" in str(now.value)


def test_deferred_checks_look_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    as_bool = torch.Tensor.__bool__

    def counted(tensor: torch.Tensor) -> bool:
        looks.append(tensor)
        return as_bool(tensor)

    monkeypatch.setattr(torch.Tensor, "__bool__", counted)
    with deferred_checks():
        for _ in range(20):
            masked_mean(torch.ones(2, 2), torch.ones(2, 2))
    assert not looks


def test_the_errors_of_a_block_come_before_its_checks() -> None:
    with pytest.raises(KeyError), deferred_checks():
        keep(torch.tensor([NAN]), torch.ones(1))
        raise KeyError("mine")
    keep(torch.tensor([0.0]), torch.ones(1))


def test_blocks_of_deferred_checks_may_be_nested() -> None:
    with deferred_checks():
        with pytest.raises(FloatingPointError, match="inner"), deferred_checks():
            keep(torch.tensor([NAN]), torch.ones(1), name="inner")
        keep(torch.tensor([1.0]), torch.ones(1), name="outer")


def test_empty_tensors_and_scalars_are_checked_too() -> None:
    keep(torch.zeros(0, 3), torch.ones(0, 3))
    with pytest.raises(FloatingPointError, match=r"at \[\]: nan"):
        keep(torch.tensor(NAN), torch.tensor(True))
