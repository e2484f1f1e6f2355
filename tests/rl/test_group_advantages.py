from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlmesh.rl import group_advantages, reference
from rlmesh.rl.group_advantages import dr_grpo, grpo, pass_at_k, reinforce_plus_plus_baseline, rloo, spread

NAN = float("nan")


@st.composite
def responses(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Groups, which responses are valid, and a seed for rewards; a group may have one response or no valid one."""
    count = draw(st.integers(1, 9))
    groups = np.array(draw(st.lists(st.integers(-2, 2), min_size=count, max_size=count)))
    valid = np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=np.bool_)
    seed = draw(st.integers(0, 2**31))
    return groups, valid, np.random.default_rng(seed).normal(size=count).round(1), seed


def poisoned(x: np.ndarray, valid: np.ndarray) -> torch.Tensor:
    return torch.tensor(np.where(valid, x, NAN))


BY_GROUP: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {}),
    ("grpo", {"scale": False}),
    ("dr_grpo", {}),
    ("rloo", {}),
]


@pytest.mark.parametrize(("name", "options"), BY_GROUP)
@given(responses())
def test_advantages_by_group_agree_with_numpy(name: str, options: dict[str, Any], drawn: Any) -> None:
    groups, valid, rewards, _ = drawn
    ours: Callable[..., torch.Tensor] = getattr(group_advantages, name)
    got = ours(poisoned(rewards, valid), torch.tensor(groups), valid=torch.tensor(valid), **options)
    assert got.dtype == torch.float64
    expected = getattr(reference, name)(rewards, groups, valid=valid, **options)
    np.testing.assert_allclose(got, expected, atol=1e-9)


@given(responses())
def test_opo_and_remax_agree_with_numpy(drawn: Any) -> None:
    groups, valid, rewards, seed = drawn
    lengths = np.random.default_rng([seed, 1]).integers(0, 50, len(groups)).astype(float)
    got = group_advantages.opo(
        poisoned(rewards, valid), torch.tensor(groups), torch.tensor(lengths), valid=torch.tensor(valid)
    )
    np.testing.assert_allclose(got, reference.opo(rewards, groups, lengths, valid=valid), atol=1e-9)
    greedy = np.random.default_rng([seed, 2]).normal(size=len(groups))
    got = group_advantages.remax(poisoned(rewards, valid), poisoned(greedy, valid), valid=torch.tensor(valid))
    np.testing.assert_allclose(got, reference.remax(rewards, greedy, valid=valid), atol=1e-9)


@given(responses(), st.integers(1, 4))
def test_pass_at_k_agrees_with_numpy(drawn: Any, k: int) -> None:
    groups, valid, rewards, _ = drawn
    correct = rewards > 0
    got = pass_at_k(torch.tensor(correct), torch.tensor(groups), k=k, valid=torch.tensor(valid))
    np.testing.assert_allclose(got, reference.pass_at_k(correct, groups, k=k, valid=valid), atol=1e-9)


@pytest.mark.parametrize(("right", "wrong", "k"), [(1, 4, 2), (3, 3, 3), (2, 5, 4), (1, 1, 1)])
def test_pass_at_k_is_the_mean_over_all_choices_of_k(right: int, wrong: int, k: int) -> None:
    correct = [True] * right + [False] * wrong
    choices = [(c, float(any(correct[i] for i in c))) for c in combinations(range(len(correct)), k)]
    scores = np.array([score for _, score in choices])
    normalised = (scores - scores.mean()) / scores.std()
    expected = [
        np.mean([a for (c, _), a in zip(choices, normalised, strict=True) if i in c]) for i in range(len(correct))
    ]
    got = pass_at_k(torch.tensor(correct), torch.zeros(len(correct), dtype=torch.long), k=k)
    np.testing.assert_allclose(got, expected, atol=1e-12)


@given(responses(), st.integers(1, 5))
def test_the_whitened_baseline_agrees_with_numpy(drawn: Any, times: int) -> None:
    groups, valid, rewards, seed = drawn
    mask = np.random.default_rng([seed, 3]).random((len(groups), times)) < 0.7
    got = reinforce_plus_plus_baseline(
        poisoned(rewards, valid), torch.tensor(groups), torch.tensor(mask), valid=torch.tensor(valid)
    )
    expected = reference.reinforce_plus_plus_baseline(rewards, groups, mask, valid=valid)
    np.testing.assert_allclose(got, expected, atol=1e-6)


@given(responses())
def test_a_failed_response_changes_nothing_for_the_others(drawn: Any) -> None:
    groups, valid, rewards, _ = drawn
    alone = grpo(torch.tensor(rewards[valid]), torch.tensor(groups[valid]))
    among = grpo(poisoned(rewards, valid), torch.tensor(groups), valid=torch.tensor(valid))
    torch.testing.assert_close(among[torch.tensor(valid)], alone)
    assert (among[torch.tensor(~valid)] == 0).all()


def test_float64_stays_float64_to_its_last_digit() -> None:
    rewards = torch.tensor([1.0, 1.0 + 1e-12, 0.0, 0.5], dtype=torch.float64)
    got = dr_grpo(rewards, torch.tensor([0, 0, 1, 1]))
    np.testing.assert_allclose(got, [-5e-13, 5e-13, -0.25, 0.25], atol=1e-15)


def test_integer_rewards_are_computed_as_floats() -> None:
    assert rloo(torch.tensor([1, 0, 0]), torch.zeros(3, dtype=torch.long)).tolist() == pytest.approx([1, -0.5, -0.5])


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="one each per response"):
        grpo(torch.zeros(3), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match="k must be"):
        pass_at_k(torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.long), k=0)
    with pytest.raises(ValueError, match="correct must be boolean"):
        pass_at_k(torch.ones(2), torch.zeros(2, dtype=torch.long), k=1)
    with pytest.raises(ValueError, match="one per row"):
        spread(torch.zeros(3), torch.ones(2, 4))
    with pytest.raises(FloatingPointError, match="rewards"):
        grpo(torch.tensor([1.0, NAN]), torch.zeros(2, dtype=torch.long))
