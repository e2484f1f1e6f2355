"""mean@k, maj@k and pass@k: against every subset, against known values, and by data source."""

from __future__ import annotations

from math import comb
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh.rl import reference
from rlmesh.rl.evaluation.estimates import ks_up_to, majority_at_k, unbiased_pass_at_k
from rlmesh.rl.evaluation.metrics import validation_metrics
from rlmesh.rl.rewards import exact, gsm8k
from rlmesh.rl.rewards.outcomes import combine, to_outcome
from rlmesh.rl.types import Abstain, Episode, Failed, Group, Outcome, Score, Turn


@st.composite
def samples_and_k(draw: st.DrawFn) -> tuple[list[tuple[str | None, float]], int]:
    sample = st.tuples(st.sampled_from([None, "1", "2", "3"]), st.sampled_from([0.0, 0.5, 1.0]))
    found = draw(st.lists(sample, min_size=1, max_size=8))
    return found, draw(st.integers(1, len(found)))


@given(samples_and_k())
def test_estimates_are_means_over_all_subsets(case: tuple[list[tuple[str | None, float]], int]) -> None:
    samples, k = case
    answers, scores = [answer for answer, _ in samples], [score for _, score in samples]
    right = [score >= 1 for score in scores]
    assert unbiased_pass_at_k(right, k) == pytest.approx(reference.unbiased_pass_at_k(right, k), abs=1e-12)
    assert majority_at_k(answers, scores, k) == pytest.approx(reference.majority_at_k(answers, scores, k), abs=1e-12)


@pytest.mark.parametrize("k", [1, 10, 100, 200])
def test_pass_at_k_is_the_formula_of_its_paper_also_for_many_samples(k: int) -> None:
    right = [True] * 13 + [False] * 187
    assert unbiased_pass_at_k(right, k) == pytest.approx(1 - comb(187, k) / comb(200, k), rel=1e-12)


def test_a_majority_of_many_samples_is_drawn_by_its_seed() -> None:
    answers = [*["right"] * 12, *["wrong"] * 8]
    scores = [1.0] * 12 + [0.0] * 8
    # The majority of 5 of 20 is right if 3 or more of them are: the hypergeometric distribution.
    exact_value = sum(comb(12, c) * comb(8, 5 - c) for c in (3, 4, 5)) / comb(20, 5)
    found = majority_at_k(answers, scores, 5)
    assert found == pytest.approx(exact_value, abs=0.05) and found == majority_at_k(answers, scores, 5)
    assert found != majority_at_k(answers, scores, 5, seed=1)


@pytest.mark.parametrize(("samples", "ks"), [(1, (1,)), (4, (1, 2, 4)), (6, (1, 2, 4, 6))])
def test_reports_have_powers_of_two_and_all_samples(samples: int, ks: tuple[int, ...]) -> None:
    assert ks_up_to(samples) == ks


@pytest.mark.parametrize("k", [0, 4])
def test_more_samples_than_there_are_cannot_be_asked_for(k: int) -> None:
    with pytest.raises(ValueError, match=f"k={k} must be between 1 and the number of samples, 3"):
        unbiased_pass_at_k([True, False, False], k)
    with pytest.raises(ValueError, match=f"k={k} must be"):
        majority_at_k(["a", "b", None], [1.0, 0.0, 0.0], k)


def group(source: str | None, *outcomes: Outcome) -> Group:
    turns = (Turn.said([1]), Turn(np.asarray([2], np.int32), "policy", np.zeros(1, np.float32), None, ((3, 0, 1),)))
    row: dict[str, Any] = {} if source is None else {"data_source": source}
    return Group((0, 0), tuple(Episode(turns, outcomes={"r": outcome}) for outcome in outcomes), row)


def total(episode: Episode) -> Outcome:
    return episode.outcomes["r"]


def test_numbers_come_by_source_under_the_names_that_are_usual() -> None:
    right, wrong = Score(1.0, answer="7"), Score(0.0, answer="8")
    found = validation_metrics(
        [
            group("openai/gsm8k", right, right, wrong, wrong),
            group("openai/gsm8k", wrong, wrong, wrong, right),
            group(None, Score(0.5), Score(0.25), Score(1.0), Score(0.25)),
        ],
        total,
    )
    # Of two of four samples: two right ones among (7, 7, 8, 8) miss in 1 of 6 subsets, one among (8, 8, 8, 7) in 3.
    assert found == pytest.approx(
        {
            "val/openai/gsm8k/mean@4": (0.5 + 0.25) / 2, "val/openai/gsm8k/unscored": 0.0,
            "val/openai/gsm8k/pass@1": (0.5 + 0.25) / 2, "val/openai/gsm8k/pass@2": (5 / 6 + 1 / 2) / 2,
            "val/openai/gsm8k/pass@4": 1.0,
            "val/openai/gsm8k/maj@2": (0.5 + 0.25) / 2, "val/openai/gsm8k/maj@4": (0.5 + 0.0) / 2,
            "val/unknown/mean@4": 0.5, "val/unknown/unscored": 0.0, "val/unknown/pass@1": 0.25,
            "val/unknown/pass@2": 0.5, "val/unknown/pass@4": 1.0,
        }
    )  # fmt: skip


def test_a_response_without_a_score_is_in_no_number() -> None:
    found = validation_metrics(
        [group("s", Score(1.0), Failed("timeout"), Abstain()), group("s", Score(0.5), Score(0.5), Score(0.5))], total,
        right=0.5,
    )  # fmt: skip
    assert found == pytest.approx(
        {"val/s/unscored": 2 / 6, "val/s/mean@3": 0.75, "val/s/pass@1": 1.0, "val/s/pass@2": 1.0, "val/s/pass@3": 1.0}
    )
    none = validation_metrics([group("s", Failed("timeout"), Failed("timeout"))], total)
    assert none == {"val/s/unscored": 1.0}


def test_a_sum_of_rewards_that_is_rounded_counts_as_right() -> None:
    """0.7 + 0.2 + 0.1 is below 1 in floating point."""
    weights = {"a": 0.7, "b": 0.2, "c": 0.1}
    every = combine(dict.fromkeys(weights, Score(1.0)), weights)
    assert isinstance(every, Score) and every.value < 1
    found = validation_metrics([group("s", every, Score(0.9))], total)
    assert (found["val/s/pass@1"], found["val/s/pass@2"]) == (0.5, 1.0)


def test_rewards_tell_the_answer_that_votes_count() -> None:
    assert gsm8k.compute_score("so #### 1,000", "1000").answer == gsm8k.compute_score("#### 1000.0", 2).answer == "1000"
    assert gsm8k.compute_score("none", "1").answer is None
    assert exact.compute_score("The Answer.", "answer").answer == "answer"
    assert to_outcome({"score": 1, "pred": 12}) == Score(1.0, answer="12")
    both = combine({"a": Score(1.0), "b": Score(1.0, answer="5")}, {"a": 1.0, "b": 1.0})
    assert both == Score(2.0, answer="5")
