from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlmesh.rl import reference
from rlmesh.rl.correction import Correction, correct, whole_vocabulary
from tests.rl.batches import Batch, batches, poisoned

corrections = st.builds(
    Correction,
    level=st.sampled_from(["token", "sequence", "geometric"]),
    upper=st.floats(1, 4),
    lower=st.none() | st.floats(0, 1),
    beyond=st.sampled_from(["truncate", "mask"]),
    reject_below=st.none() | st.floats(0.01, 0.5),
    weigh=st.booleans(),
)


@given(batches(), corrections)
def test_weights_and_what_stays_agree_with_numpy(batch: Batch, how: Correction) -> None:
    mine, theirs = batch.normal(1), batch.normal(2)
    got = correct(
        torch.tensor(poisoned(mine, batch.mask)),
        torch.tensor(poisoned(theirs, batch.mask)),
        torch.tensor(batch.mask),
        how,
    )
    weights, stays, bounded = reference.correct(
        mine,
        theirs,
        batch.mask,
        level=how.level,
        upper=how.upper,
        lower=how.lower,
        beyond=how.beyond,
        reject_below=how.reject_below,
        weigh=how.weigh,
    )
    np.testing.assert_allclose(got.weights, weights, atol=1e-9)
    np.testing.assert_array_equal(got.mask, stays)
    np.testing.assert_array_equal(got.bounded, bounded)


def test_the_product_over_a_long_sequence_does_not_overflow() -> None:
    ours, engine, mask = torch.zeros(1, 5000), torch.full((1, 5000), -1.0), torch.ones(1, 5000, dtype=torch.bool)
    got = correct(ours, engine, mask, Correction("sequence", upper=2.0))
    assert got.weights.unique().tolist() == [2.0]
    assert got.bounded.all()


def test_what_leaves_the_batch_leaves_the_divisor() -> None:
    ours, engine = torch.tensor([[0.0, -5.0, 0.0]]), torch.zeros(1, 3)
    got = correct(ours, engine, torch.ones(1, 3, dtype=torch.bool), Correction(lower=0.5, beyond="mask"))
    assert got.mask.tolist() == [[True, False, True]]
    assert got.weights.tolist() == [[1.0, 0.0, 1.0]]


def test_truncated_sampling_with_its_mass_has_ratio_1_on_policy() -> None:
    logits = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole = logits.log_softmax(-1)
    top = whole.topk(3, -1)
    log_mass = top.values.logsumexp(-1)
    truncated = top.values[..., 0] - log_mass  # the most likely token, sampled with top_k=3
    mask = torch.ones(2, 3, dtype=torch.bool)
    biased = correct(whole.max(-1).values, truncated, mask, Correction())
    assert (biased.weights < 0.99).all()
    right = correct(whole.max(-1).values, whole_vocabulary(truncated, log_mass, mask), mask, Correction())
    np.testing.assert_allclose(right.weights, 1.0, atol=1e-12)


@given(batches())
def test_the_whole_vocabulary_agrees_with_numpy(batch: Batch) -> None:
    log_probs, mass = batch.normal(1), -abs(batch.normal(2))
    got = whole_vocabulary(
        torch.tensor(poisoned(log_probs, batch.mask)),
        torch.tensor(poisoned(mass, batch.mask)),
        torch.tensor(batch.mask),
    )
    np.testing.assert_allclose(got, reference.whole_vocabulary(log_probs, mass, batch.mask), atol=1e-12)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"level": "tokens"}, "token, sequence, geometric"),
        ({"beyond": "drop"}, "'truncate' or 'mask'"),
        ({"upper": 0.5}, "upper must be"),
        ({"lower": 1.5}, "lower"),
        ({"lower": math.nan}, "lower"),
        ({"reject_below": 0.0}, "reject_below"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Correction(**options)  # type: ignore[arg-type]
