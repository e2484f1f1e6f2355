from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlmesh.rl.rewards import RewardManager, Rewards, exact, gsm8k, manager
from rlmesh.rl.rewards import math as latex
from rlmesh.rl.types import Failed, Group, Score
from tests.rl.rewards.test_scoring import Letters, group


@pytest.fixture
def managed() -> Iterator[Any]:
    made: list[RewardManager] = []

    def make(**options: Any) -> RewardManager:
        made.append(RewardManager(tokenizer=Letters(), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def with_rm_score(given: Group, value: float) -> Group:
    episodes = tuple(replace(each, outcomes={"rm_score": Score(value)}) for each in given.episodes)
    return replace(given, episodes=episodes)


def outcomes(groups: list[Group]) -> list[dict[str, Any]]:
    return [dict(each.outcomes) for each in Group.episodes_of(groups)]


def test_the_function_is_selected_by_the_data_source(managed: Any) -> None:
    assert manager._select_rm_score_fn("openai/gsm8k") is gsm8k.compute_score
    assert manager._select_rm_score_fn("lighteval/MATH") is latex.compute_score
    assert manager._select_rm_score_fn("Rowan/hellaswag") is exact.compute_score
    scored = managed(num_examine=0)(
        [group("#### 4", "#### 5", data_source="openai/gsm8k"), group("4.", data_source="Rowan/hellaswag")]
    )
    assert [each["score"].value for each in outcomes(scored)] == [1, 0, 1]
    metrics = managed().metrics(scored)
    assert metrics["reward/openai/gsm8k"] == 0.5 and metrics["reward/Rowan/hellaswag"] == 1


@pytest.mark.parametrize("source", ["Anthropic/hh-rlhf", "somebody/else", None])
def test_an_unknown_source_is_named(managed: Any, source: str | None) -> None:
    with pytest.raises(NotImplementedError, match=f"no reward function for data_source={source!r}"):
        managed()([group("#### 4", data_source="openai/gsm8k"), group("hi", data_source=source)])


def test_the_score_of_a_reward_model_is_returned_as_it_is(managed: Any) -> None:
    one = managed()
    scored = one(
        [
            with_rm_score(group("hi", "ho", data_source="Anthropic/hh-rlhf"), -0.25),
            group("#### 4", data_source="openai/gsm8k"),
        ]
    )
    assert outcomes(scored)[:2] == [{"rm_score": Score(-0.25)}] * 2
    totals = [one.total(each) for each in Group.episodes_of(scored)]
    assert [outcome.value for outcome in totals] == [-0.25, -0.25, 1]
    assert one.metrics(scored)["reward_mean"] == pytest.approx(0.5 / 3)


def test_functions_of_ones_own_and_failures(managed: Any) -> None:
    def select(source: str) -> Any:
        if source != "mine":
            raise NotImplementedError(source)
        return lambda solution_str, ground_truth: 1 / len(solution_str)

    scored = managed(select=select)([group("ab", "", data_source="mine")])
    right, wrong = outcomes(scored)
    assert right["score"] == Score(0.5)
    assert wrong["score"] == Failed("ZeroDivisionError: division by zero")


def test_samples_are_printed(managed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    groups = [group(*["#### 4"] * 5, "#### 7", data_source="openai/gsm8k")]
    managed(num_examine=0)(groups)
    assert capsys.readouterr().out == ""
    managed(num_examine=2)(groups)
    text = capsys.readouterr().out
    assert text.count("[prompt] What is 2 + 2?") == 2 and text.count("[ground truth] 4") == 2
    assert "[response] #### 4\n" in text and "[response] #### 7\n" in text and "wrong answer" in text
    assert not groups[0].episodes[0].outcomes


def test_the_rewards_of_the_page_are_right() -> None:
    page = Path(__file__).parents[3] / "docs" / "rewards.md"
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
        exec(block, names)
    rewards = Rewards(names["rewards"], Letters())
    assert list(rewards.rewards) == ["gsm8k", "reward_model", "short"]
    (response,) = [rewards.response(each) for each in group("#### 4").episodes]
    assert names["short"](response, {}) == Score(1.0, {"tokens": 7.0})
