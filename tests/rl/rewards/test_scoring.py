from __future__ import annotations

import asyncio
import math
import os
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from rlmesh.errors import UsageError
from rlmesh.rl.rewards import Reward, RewardModel, Rewards, coroutines, gsm8k
from rlmesh.rl.rewards.outcomes import combine, metrics_of, to_outcome, to_outcomes
from rlmesh.rl.types import Abstain, Episode, Failed, Group, Score, Turn


class Letters:
    """A tokenizer whose tokens are characters; 0 is special."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        return "".join("<end>" if i == 0 else chr(i) for i in token_ids if i or not skip_special_tokens)


def episode(text: str, prompt: str = "What is 2 + 2?") -> Episode:
    ids = np.array([*map(ord, text), 0], dtype=np.int32)
    sampled = Turn(ids, "policy", np.zeros(len(ids), np.float32), version_spans=((0, 0, len(ids)),))
    return Episode((Turn.said(list(map(ord, prompt))), sampled))


def group(*texts: str, key: int = 0, **row: Any) -> Group:
    return Group((0, key), tuple(map(episode, texts)), {"reward_model": {"ground_truth": "4"}, **row})


def brief(sample: Any, row: Any) -> Score:
    return Score(float(len(sample.token_ids) < 8), metrics={"tokens": len(sample.token_ids)})


async def later(response: str) -> float:
    await asyncio.sleep(10 if response == "hangs" else 0.01)
    return float(len(response))


def lengths(responses: list[str]) -> list[float | None]:
    return [len(text) or None for text in responses]


@pytest.fixture
def score() -> Iterator[Any]:
    made: list[Rewards] = []

    def run(rewards: list[Reward], groups: list[Group], **options: Any) -> tuple[list[dict[str, Any]], Rewards]:
        scorer = Rewards(rewards, Letters(), **options)
        made.append(scorer)
        scored = scorer.score(groups)
        assert [len(a) for a in scored] == [len(b) for b in groups]
        return [dict(e.outcomes) for e in Group.episodes_of(scored)], scorer

    yield run
    for scorer in made:
        scorer.close()


def test_rewards_are_applied_to_every_episode(score: Any) -> None:
    found, scorer = score(
        [Reward(gsm8k.compute_score), Reward(brief, weight=0.1)], [group("#### 4", "it is 5"), group("#### 4")]
    )
    assert [each["gsm8k"].value for each in found] == [1, 0, 1]
    assert found[1]["gsm8k"].reason == "no answer"
    assert [each["brief"].metrics["tokens"] for each in found] == [7, 8, 7]
    groups = scorer.score([group("#### 4", "it is 5")])
    assert [scorer.total(e).value for e in groups[0].episodes] == [1.1, 0.0]
    metrics = scorer.metrics(groups)
    assert metrics["reward/gsm8k"] == 0.5 and metrics["reward/brief/tokens"] == 7.5
    assert metrics["reward_mean"] == pytest.approx(0.55) and metrics["reward_failed"] == 0


def test_async_batched_and_inline_functions_give_scores(score: Any) -> None:
    rewards = [Reward(later, timeout_s=0.5), Reward(lengths), Reward(brief, inline=True)]
    found, _ = score(rewards, [group("ab", "hangs"), group("", "abc")])
    assert [each["later"] for each in (found[0], found[2])] == [Score(2.0), Score(0.0)]
    assert isinstance(found[1]["later"], Failed) and "timeout" in found[1]["later"].reason
    assert [each["lengths"] for each in found] == [Score(2.0), Score(5.0), Abstain(), Score(3.0)]
    assert all(isinstance(each["brief"], Score) for each in found)


def test_batched_functions_have_a_deadline_and_a_process_of_their_own(score: Any) -> None:
    def hangs(responses: list[str]) -> list[float]:
        while True:
            pass

    def process(responses: list[str]) -> list[float]:
        import os

        return [float(os.getpid())] * len(responses)

    rewards = [Reward(hangs, timeout_s=1), Reward(process), Reward(process, name="here", inline=True)]
    found, _ = score(rewards, [group("ab", "c")])
    assert [each["hangs"] for each in found] == [Failed("timeout: the scorer ran longer than 1 s")] * 2
    assert found[0]["process"] == found[1]["process"] != Score(float(os.getpid()))
    assert found[0]["here"] == Score(float(os.getpid()))


def test_a_reward_is_for_the_rows_of_its_data(score: Any) -> None:
    rewards = [Reward(gsm8k.compute_score, sources=("openai/gsm8k",)), Reward(brief, name="b", sources=("other",))]
    found, _ = score(rewards, [group("#### 4", data_source="openai/gsm8k"), group("#### 4", data_source="other")])
    assert [type(each["gsm8k"]) for each in found] == [Score, Abstain]
    assert [type(each["b"]) for each in found] == [Abstain, Score]


def test_wrong_lengths_and_exceptions_fail_and_never_become_0(score: Any) -> None:
    def short(responses: list[str]) -> list[float]:
        return [1.0]

    def text(responses: list[str]) -> str:
        return "ab"

    def raises(responses: list[str]) -> list[float]:
        raise RuntimeError("no luck")

    def nan(response: str) -> float:
        return math.nan

    rewards = [Reward(short), Reward(text), Reward(raises), Reward(nan, inline=True)]
    found, scorer = score(rewards, [group("a", "b")])
    for each in found:
        assert all(isinstance(outcome, Failed) for outcome in each.values())
        assert (
            each["short"].reason == "the scorer returned list of length 1 for 2 responses: expected a list of as many"
        )
        assert "str of length 2" in each["text"].reason and each["raises"].reason == "RuntimeError: no luck"
        assert each["nan"].reason == "the scorer returned nan"
    metrics = scorer.metrics(scorer.score([group("a")]))
    assert metrics["reward_failed"] == 1 and math.isnan(metrics["reward_mean"]) and metrics["reward/nan/failed"] == 1


def huge(response: str) -> int:
    return 10**400


def leaves(response: str) -> float:
    sys.exit(0)


async def huge_later(response: str) -> int:
    return 10**400


async def leaves_later(response: str) -> float:
    sys.exit(0)


@pytest.mark.parametrize("inline", [False, True])
def test_a_function_that_exits_or_returns_no_number_fails_alone(score: Any, inline: bool) -> None:
    rewards = [Reward(one, inline=inline) for one in (huge, leaves)]
    rewards += [Reward(huge_later), Reward(leaves_later), Reward(brief, inline=inline)]
    found, _ = score(rewards, [group("a", "b")])
    for each in found:
        assert "too large" in each["huge"].reason and "too large" in each["huge_later"].reason
        assert each["leaves"] == each["leaves_later"] == Failed("SystemExit: 0")
        assert each["brief"].value == 1


def test_an_async_function_that_blocks_fails_after_its_deadline(score: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coroutines, "SLACK_S", 0.5)
    released = threading.Event()

    async def blocks(response: str) -> float:
        if response == "b":
            await asyncio.sleep(0.1)
            released.wait(60)
        return 1.0

    began = time.monotonic()
    found, _ = score([Reward(blocks, timeout_s=0.5), Reward(brief, inline=True)], [group("a", "b", "c")])
    released.set()
    assert time.monotonic() - began < 30
    assert found[0]["blocks"] == Score(1.0) and "blocked the event loop" in found[1]["blocks"].reason
    assert all(isinstance(each["brief"], Score) for each in found)


def test_a_batch_without_an_order_or_that_fails_on_the_way_fails() -> None:
    def breaks() -> Iterator[float]:
        yield 1.0
        raise LookupError("row 1")

    assert to_outcomes((float(i) for i in range(2)), 2) == [Score(0.0), Score(1.0)]
    assert to_outcomes(breaks(), 2) == [Failed("LookupError: row 1")] * 2
    assert all("set of length 2" in one.reason for one in to_outcomes({0.0, 1.0}, 2))


def test_what_functions_return_becomes_an_outcome() -> None:
    assert (
        to_outcome(True) == Score(1.0) and to_outcome(np.float32(0.5)) == Score(0.5) and to_outcome(None) == Abstain()
    )
    assert to_outcome({"score": 1, "steps": 3, "text": "x"}) == Score(1.0, {"steps": 3.0})
    for wrong in (
        "1.0",
        [1.0],
        {"reward": 1},
        math.inf,
        {"score": "x"},
        {"score": 1, "steps": math.nan},
        10**400,
        1j,
        np.complex64(1),
        np.array("x"),
        {"score": 1, "steps": 10**400},
    ):
        assert isinstance(to_outcome(wrong), Failed)
    for metric in ("x", math.nan, None):
        with pytest.raises(ValueError, match="metric 'steps' of a score is a finite number"):
            Score(1.0, {"steps": metric})  # type: ignore[dict-item]


def test_one_failure_fails_the_sum_and_abstentions_are_left_out() -> None:
    weights = {"a": 1.0, "b": 2.0}
    assert combine({"a": Score(1.0, {"n": 2.0}), "b": Score(0.5)}, weights) == Score(2.0, {"a/n": 2.0})
    assert combine({"a": Score(1.0), "b": Abstain()}, weights) == Score(1.0)
    assert isinstance(combine({"a": Abstain(), "b": Abstain()}, weights), Abstain)
    assert combine({"a": Score(1.0), "b": Failed("timeout")}, weights) == Failed("b: timeout")
    assert metrics_of([{"a": Score(1.0, {"n": 2.0})}, {"a": Failed("x")}]) == {
        "reward/a": 1.0,
        "reward/a/n": 2.0,
        "reward/a/abstained": 0.0,
        "reward/a/failed": 0.5,
    }


def test_rewards_with_wrong_arguments_are_refused_by_name() -> None:
    def wrong(solution: str, ground_truth: str) -> float:
        return 0.0

    def nothing(scale: float = 1.0) -> float:
        return scale

    def mixed(sample: Any, rows: Any) -> float:
        return 0.0

    with pytest.raises(UsageError, match=r"parameter 'solution' without a default; .*did you mean 'solution_str'\?"):
        Reward(wrong)
    with pytest.raises(UsageError, match=r"in place of TRL's 'completions', write 'responses'"):
        Reward(lambda completions, **columns: [0.0])
    with pytest.raises(UsageError, match=r"parameter 'answer' without a default; .*'row' has all columns of the data"):
        Reward(lambda responses, answer: [0.0])
    with pytest.raises(UsageError, match="takes no input"):
        Reward(nothing)
    with pytest.raises(UsageError, match="mixes parameters of one response and of many"):
        Reward(mixed)
    with pytest.raises(UsageError, match=r"a reward is a function.*got 'gsm8k'; names are for files of settings"):
        Reward("gsm8k")  # type: ignore[arg-type]
    for number in ("1", math.nan, True, None):
        with pytest.raises(UsageError, match=r"'brief': weight=.* must be a finite number"):
            Reward(brief, weight=number)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"'brief': timeout_s=.* must be a number > 0"):
            Reward(brief, timeout_s=number)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"weight=.* must be a finite number"):
            RewardModel("judge", weight=number)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="two rewards are named brief"):
        Rewards([Reward(brief), Reward(brief)], Letters())
    with pytest.raises(UsageError, match="no reward given"):
        Rewards([], Letters())


def test_a_row_without_what_the_function_wants_is_told() -> None:
    reward = Reward(gsm8k.compute_score)
    response = Rewards([reward], Letters()).response(episode("#### 4"))
    with pytest.raises(
        UsageError, match=r"'gsm8k' wants 'ground_truth', but the row has no reward_model\.ground_truth"
    ):
        reward.arguments([response], [{"prompt": "x"}])
    assert reward.arguments([response], [{"ground_truth": "4"}]) == {"solution_str": "#### 4", "ground_truth": "4"}
    assert (response.prompt, response.finish_reason) == ("What is 2 + 2?", "stop")


def firsts(responses: list[str], ground_truths: list[str]) -> list[float]:
    return [float(text[:1] == truth) for text, truth in zip(responses, ground_truths, strict=True)]


@pytest.mark.parametrize("inline", [False, True])
def test_a_later_row_without_what_a_function_wants_fails_alone(score: Any, inline: bool) -> None:
    rewards = [Reward(gsm8k.compute_score, inline=inline), Reward(firsts, inline=inline)]
    found, _ = score(rewards, [group("#### 4"), group("4", reward_model=None), group("4", "5")])
    assert [type(each["gsm8k"]) for each in found] == [Score, Failed, Score, Score]
    assert [each["firsts"].value for each in (found[0], *found[2:])] == [0.0, 1.0, 0.0]
    assert "'firsts' wants 'ground_truth', but the row has no" in found[1]["firsts"].reason


def test_options_reach_the_function(score: Any) -> None:
    found, _ = score([Reward(gsm8k.compute_score, options={"method": "flexible"})], [group("it is 4")])
    assert found[0]["gsm8k"] == Score(1.0, answer="4")


def test_scored_groups_are_shown_later_as_they_would_be_at_once(score: Any, capsys: pytest.CaptureFixture[str]) -> None:
    groups = [group("4", "five", key=0), group("six", "4", key=1)]
    _, scorer = score([Reward(lengths, name="length", inline=True)], groups, examine=3)
    at_once = capsys.readouterr().out
    assert at_once.count("[response]") == 3
    scorer.examine = 0
    scored = scorer.score(groups)
    assert capsys.readouterr().out == ""
    scorer.show(scored, 3)
    assert capsys.readouterr().out == at_once


def test_several_threads_may_score(score: Any) -> None:
    """One pool is made for all, and inline functions run one at a time."""
    inside: list[int] = []
    most: list[int] = []

    def inline(response: str) -> float:
        inside.append(1)
        time.sleep(0.005)
        most.append(len(inside))
        inside.pop()
        return float(len(response))

    rewards = [Reward(inline, inline=True), Reward(gsm8k.compute_score, name="answer")]
    scorer = Rewards(rewards, Letters(), workers=1)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda number: scorer.score([group("a" * number, key=number)]), range(1, 9)))
        assert [one[0].episodes[0].outcomes["inline"] for one in found] == [Score(float(n)) for n in range(1, 9)]
        assert max(most) == 1 and len(scorer._pools) == 1
    finally:
        scorer.close()


def test_scorers_reach_another_process(score: Any) -> None:
    """As a `RewardManager` that is handed to a trainer does."""
    scorer = Rewards([Reward(gsm8k.compute_score)], Letters(), workers=1)
    try:
        expected = scorer.score([group("4")])
        copy = pickle.loads(pickle.dumps(scorer))
        try:
            assert [one.episodes[0].outcomes for one in copy.score([group("4")])] == [
                one.episodes[0].outcomes for one in expected
            ]
        finally:
            copy.close()
    finally:
        scorer.close()
