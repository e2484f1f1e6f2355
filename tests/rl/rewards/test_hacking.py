"""The alarm about rewards that are exploited: real trainings with a planted fault of the reward each, an honest one
that stays silent, and batches that are made up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

from rlmesh.rl.evaluation.settings import RewardAlarmSettings
from rlmesh.rl.rewards import Reward, Score
from rlmesh.rl.rewards.hacking import RewardAlarm, repetition
from rlmesh.rl.rewards.scoring import Rewards
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import ActorSettings, RolloutSettings
from rlmesh.rl.types import Episode, Group, Turn
from tests.rl.checkpoints.runs import make

QUICK = RewardAlarmSettings(baseline=3, window=3)


# Trainings.


def longer(response: str) -> float:
    return len(response.replace(" ", "")) / 48


def letters_of_one_kind(response: str) -> float:
    text = response.replace(" ", "")
    return text.count("a") / 24


def begins_with_b(response: str) -> float:
    return float(response.startswith("b"))


def letters_only(response: str) -> float:
    text = response.replace(" ", "")
    return 1 - text.count(">") / max(len(text), 1)


def has_b(response: str) -> float:
    text = response.replace(" ", "")
    return text.count("b") / max(len(text), 1)


def has_c(response: str) -> float:
    text = response.replace(" ", "")
    return text.count("c") / max(len(text), 1)


def trained(tiny: Path, run_dir: Path, *rewards: Reward, seed: int = 0, **changes: Any) -> list[dict[str, float]]:
    run: Run = replace(
        make(tiny),
        **{
            "rewards": rewards, "steps": 20, "save_every": 20, "actor": ActorSettings(lr=1e-2), "seed": seed,
            "rollout": RolloutSettings(max_tokens=24), "reward_alarm": QUICK, **changes,
        },
    )  # fmt: skip
    run.here(run_dir=run_dir)
    lines = [json.loads(line)["metrics"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [one for one in lines if "hacking/alarm" in one]


def alarms(run_dir: Path) -> dict[str, Any]:
    found = [json.loads(path.read_text()) for path in run_dir.glob("reward-alarm-*.json")]
    return {one["kind"]: one for one in found}


def test_a_reward_that_grows_with_the_length_is_told_once(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    metrics = trained(tiny, tmp_path, Reward(longer, inline=True), rollout=RolloutSettings(max_tokens=48), steps=12)
    assert "length" in alarms(tmp_path)
    told = capsys.readouterr().out
    assert told.count("reward alarm (length)") == 1 and "rlmesh samples" in told
    assert caplog.text.count("reward alarm (length)") == 1  # the event of the job
    found = alarms(tmp_path)["length"]
    assert len(found["samples"]) == 3 and all(one["response"] and one["tokens"] > 8 for one in found["samples"])
    assert metrics[-1]["hacking/length_ratio"] > 2 and metrics[-1]["hacking/length_correlation"] > 0.5


@pytest.mark.slow
def test_a_reward_for_repetition_is_told(tiny: Path, tmp_path: Path) -> None:
    metrics = trained(tiny, tmp_path, Reward(letters_of_one_kind, inline=True))
    assert "repetition" in alarms(tmp_path)
    assert any(one["hacking/repetition"] > 0.4 for one in metrics)
    assert all(
        sample["response"].replace(" ", "").count("a") > 12 for sample in alarms(tmp_path)["repetition"]["samples"]
    )


@pytest.mark.slow
def test_one_reward_at_the_cost_of_another_is_told(tiny: Path, tmp_path: Path) -> None:
    checks = RewardAlarmSettings(baseline=3, window=3, length=0, repetition=0)
    loud, quiet = Reward(has_b, weight=10.0, inline=True), Reward(has_c, inline=True)
    metrics = trained(tiny, tmp_path, loud, quiet, reward_alarm=checks, rollout=RolloutSettings(max_tokens=8))
    found = alarms(tmp_path)
    assert list(found) == ["components"] and "'has_b' rises at the cost of 'has_c'" in found["components"]["why"]
    assert metrics[-1]["hacking/components_gap"] >= 0.5


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow) for seed in range(3)])
def test_an_honest_training_stays_silent(tiny: Path, tmp_path: Path, seed: int) -> None:
    rewards = [Reward(begins_with_b, inline=True), Reward(letters_only, inline=True)]
    metrics = trained(tiny, tmp_path, *rewards, seed=seed)
    assert alarms(tmp_path) == {} and all(one["hacking/alarm"] == 0 for one in metrics) and metrics
    assert metrics[-1]["reward/begins_with_b"] > 0.8  # it learned


# Batches that are made up.


class Letters:
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join("abcdefgh"[number % 8] for number in token_ids)


def episode(ids: Sequence[int], **rewards: float) -> Episode:
    count = len(ids)
    turn = Turn(np.asarray(ids, np.int32), "policy", np.zeros(count, np.float32), version_spans=((0, 0, count),))
    return Episode((Turn.said([1]), turn), outcomes={name: Score(value) for name, value in rewards.items()})


def scored(response: str) -> float:
    return 0.0


def watch(folder: Path, names: Sequence[str] = ("r",), **settings: Any) -> tuple[RewardAlarm, list[str]]:
    told: list[str] = []
    rewards = Rewards([Reward(scored, name=name) for name in names], Letters())
    return RewardAlarm(
        RewardAlarmSettings(**{"baseline": 2, "window": 2, **settings}), rewards, folder, told.append
    ), told


def batch(rng: Any, lengths: Sequence[int], reward: Any, *, groups: int = 8) -> list[Group]:
    """Groups of one response per length, in random letters."""
    return [
        Group((0, number), tuple(episode(rng.integers(0, 8, length).tolist(), **reward(length)) for length in lengths))
        for number in range(groups)
    ]


def test_length_alone_is_no_alarm_and_neither_is_a_correlation(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    alarm, told = watch(tmp_path)
    for step in range(1, 9):  # longer and longer, and the longer ones are worse
        alarm.check(step, batch(rng, [8 * step, 10 * step], lambda length, s=step: {"r": s - length / 10}))
    alarm, more = watch(tmp_path)
    for step in range(1, 9):  # the longer ones are better, and lengths stay
        alarm.check(step, batch(rng, [20, 30], lambda length: {"r": float(length)}))
    assert told == more == []


def test_brevity_that_pays_is_an_alarm(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    alarm, told = watch(tmp_path)
    for step in range(1, 9):
        alarm.check(step, batch(rng, [40 // step, 60 // step], lambda length: {"r": -float(length)}))
    assert len(told) == 1 and "shorter ones" in told[0]


def test_one_response_per_prompt(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    alarm, told = watch(tmp_path)
    for step in range(1, 9):
        groups = [
            Group((0, n), (episode(rng.integers(0, 8, 4 * step + n).tolist(), r=float(4 * step + n)),))
            for n in range(8)
        ]
        alarm.check(step, groups)
    assert len(told) == 1 and "(length)" in told[0]


@pytest.mark.parametrize("paid", [True, False])
def test_repetition_counts_only_if_it_is_paid_for(tmp_path: Path, paid: bool) -> None:
    rng = np.random.default_rng(0)
    alarm, told = watch(tmp_path)
    for step in range(1, 9):
        varied, repeated = rng.integers(0, 8, 32).tolist(), [1, 2] * 16
        rows = [varied, varied if step < 4 else repeated, varied if step < 6 else repeated]
        rewards = [1.0, 2.0, 2.0] if paid else [2.0, 1.0, 2.0]
        group = tuple(episode(ids, r=reward) for ids, reward in zip(rows, rewards, strict=True))
        alarm.check(step, [Group((0, 0), group)])
    assert bool(told) is paid


def test_repetition() -> None:
    assert repetition([1, 2, 3, 4] * 2) == 0.0  # too short to say
    assert repetition(list(range(40))) == 0.0
    assert repetition([7] * 40) == pytest.approx(36 / 37)
    assert repetition([1, 2] * 10) == pytest.approx(15 / 17)


def test_rewards_that_rise_together_or_alone_are_no_alarm(tmp_path: Path) -> None:
    def run(second: Mapping[int, float]) -> list[str]:
        rng = np.random.default_rng(0)
        alarm, told = watch(tmp_path, ("a", "b"), length=0, repetition=0)
        for step in range(1, 9):
            alarm.check(
                step,
                batch(rng, [8] * 4, lambda length, s=step: {"a": s + rng.random(), "b": second[s] + rng.random()}),
            )
        return told

    assert run(dict.fromkeys(range(1, 9), 0.0)) == []  # such as a format that is learned first
    assert run({step: float(step) for step in range(1, 9)}) == []
    (told,) = run({step: -float(step) for step in range(1, 9)})
    assert "'a' rises at the cost of 'b'" in told


def test_an_alarm_is_told_once_also_after_a_restart(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    alarm, told = watch(tmp_path)

    def step(number: int) -> dict[str, float]:
        return alarm.check(number, batch(rng, [8 * number, 12 * number], lambda length: {"r": float(length)}))

    last = [step(number) for number in range(1, 7)][-1]
    assert len(told) == 1 and last["hacking/alarm"] == 1
    state = json.loads(json.dumps(alarm.state()))
    assert len(json.dumps(state)) < 4096
    alarm, later = watch(tmp_path)
    alarm.restore(state)
    assert step(7)["hacking/alarm"] == 1 and later == []


def test_checks_can_be_turned_off(tmp_path: Path) -> None:
    assert [
        *RewardAlarmSettings(window=0, length=0.5, correlation=0, repetition=2, components=-1, baseline=-1).faults()
    ]
    alarm, told = watch(tmp_path, baseline=0)
    rng = np.random.default_rng(0)
    for step in range(1, 9):
        assert alarm.check(step, batch(rng, [8 * step, 12 * step], lambda length: {"r": float(length)})) == {}
    assert told == []
