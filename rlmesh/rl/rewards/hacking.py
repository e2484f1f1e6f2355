"""`RewardAlarm`: an alarm that the policy seems to exploit a reward.

A policy exploits rewards by length, by repetition, or by one component of the reward at the cost of another. Each check
compares the last steps with the first steps of the run (`RewardAlarmSettings`), without a forward pass of the model.
Each kind of alarm is raised once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rlmesh import current_worker, private_files
from rlmesh.errors import UsageError
from rlmesh.rl.evaluation.settings import RewardAlarmSettings
from rlmesh.rl.types import Episode, Group, Outcome, Score

if TYPE_CHECKING:
    from rlmesh.rl.rewards.scoring import Rewards

__all__ = ["AlarmKind", "RewardAlarm", "alarm_file", "repetition"]

AlarmKind = Literal["length", "repetition", "components"]
GRAM = 4
"""Length of the token sequences whose repetition is counted."""
SHORTEST = 16
"""Repetition is counted in responses of at least this many tokens: in shorter ones it means nothing."""
FADE = 0.9
"""Decay per step of the sums of a correlation: they cover about the last ten steps with different responses."""
TRAITS = ("length", "repetition")
"""Traits of a response that a reward may favour by mistake."""
SHOWN, SHOWN_CHARACTERS = 3, 300
"""The number of samples that an alarm shows, and of characters of each."""
LEAST_SCORES = 30
"""Scores below which the mean of a component is too uncertain."""


def alarm_file(run_dir: Path, kind: AlarmKind) -> Path:
    """The file with the figures and the samples of an alarm."""
    return run_dir / f"reward-alarm-{kind}.json"


def repetition(ids: Sequence[int] | np.ndarray[Any, Any]) -> float:
    """The share of a response's sequences of four tokens that occurred in it before, in [0, 1); 0 for responses of
    fewer than 16 tokens."""
    if len(ids) < SHORTEST:
        return 0.0
    tokens = np.asarray(ids).tolist()
    grams = len(tokens) - GRAM + 1
    return 1 - len(set(zip(*(tokens[place : place + grams] for place in range(GRAM)), strict=True))) / grams


@dataclass(frozen=True, slots=True)
class _Scored:
    """An episode with a reward, and the traits that the checks read."""

    key: tuple[int, ...]
    number: int
    episode: Episode
    reward: float
    length: int
    repetition: float
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Suspicion:
    """A check beyond its threshold: the reason, and a function that orders samples by how clearly they show it."""

    kind: AlarmKind
    why: str
    shows: Callable[[_Scored], float]


class RewardAlarm:
    """Compares each step with the first steps; see the module.

    Its state is part of checkpoints, so a resumed run does not repeat an alarm.

    Args:
        settings: thresholds.
        rewards: the rewards of the run.
        run_dir: the run directory, for files with the samples of an alarm (`alarm_file`).
        tell: prints a text for people.
    """

    dispensable = True

    def __init__(
        self, settings: RewardAlarmSettings, rewards: Rewards, run_dir: Path, tell: Callable[[str], None]
    ) -> None:
        self._settings, self._rewards, self._run_dir, self._tell = settings, rewards, run_dir, tell
        self.restore({"first": [], "last": [], "sums": {name: [0.0] * 3 for name in TRAITS}, "told": []})

    def state(self) -> dict[str, Any]:
        """Summaries of the first and of the last steps, and the alarms that were raised."""
        return {
            "first": list(self._first),
            "last": list(self._last),
            "sums": dict(self._sums),
            "told": list(self._told),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a state."""
        self._first: list[dict[str, Any]] = list(state["first"])
        self._last: list[dict[str, Any]] = list(state["last"])
        self._sums: dict[str, list[float]] = {name: list(sums) for name, sums in state["sums"].items()}
        self._told: list[str] = list(state["told"])

    def check(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Compare a step with the first steps, and raise alarms that are new; returns metrics.

        Args:
            step: number of the step.
            groups: the scored groups that the step was trained on.
        """
        if not self._rewards.rewards or not self._settings.on:
            return {}
        scored = list(self._scored(groups))
        if not scored:
            return {}
        for name in TRAITS:
            sums = zip(self._sums[name], _deviations(scored, name), strict=True)
            self._sums[name] = [FADE * old + new for old, new in sums]
        summary = _summary(step, scored)
        if len(self._first) < self._settings.baseline:
            self._first.append(summary)
            return {}
        self._last = [*self._last, summary][-self._settings.window :]
        if len(self._last) < self._settings.window:
            return {}
        metrics, suspicions = self._judge()
        for one in suspicions:
            if one.kind not in self._told:
                self._told.append(one.kind)
                self._alarm(step, one, scored)
        return metrics | {"hacking/alarm": float(bool(suspicions))}

    def _scored(self, groups: Sequence[Group]) -> Iterator[_Scored]:
        weights = {name: reward.weight for name, reward in self._rewards.rewards.items()}
        for group in groups:
            for number, episode in enumerate(group.episodes):
                total: Outcome = self._rewards.total(episode)
                if not isinstance(total, Score):
                    continue
                found = {name: one for name, one in episode.outcomes.items() if isinstance(one, Score)}
                parts = {name: weights[name] * float(one.value) for name, one in found.items() if weights[name]}
                ids = episode.sampled_ids
                yield _Scored(group.key, number, episode, float(total.value), len(ids), repetition(ids), parts)

    def _judge(self) -> tuple[dict[str, float], list[_Suspicion]]:
        limits, first, last = self._settings, self._first, self._last
        before, now = _mean(first, "length"), _mean(last, "length")
        ratio, correlation = now / max(before, 1.0), _correlation(self._sums["length"])
        paid = _correlation(self._sums["repetition"])
        repeats, repeated = _mean(last, "repetition"), _mean(first, "repetition")
        shifts = _shifts(first, last)
        up = max(shifts, key=lambda name: shifts[name], default="")
        down = min(shifts, key=lambda name: shifts[name], default="")
        gap = max(0.0, min(shifts[up], -shifts[down])) if shifts else 0.0
        since = f"steps {last[0]['step']} to {last[-1]['step']} against {first[0]['step']} to {first[-1]['step']}"
        found: list[_Suspicion] = []
        longer = ratio >= limits.length and correlation >= limits.correlation
        shorter = ratio <= 1 / limits.length and correlation <= -limits.correlation if limits.length else False
        if limits.length and (longer or shorter):
            way = 1 if longer else -1
            found.append(
                _Suspicion(
                    "length",
                    f"responses have {now:.4g} tokens, before {before:.4g} ({since}), and among the responses to a "
                    f"prompt the {'longer' if longer else 'shorter'} ones get the higher reward (correlation with "
                    f"length {correlation:.2f})",
                    lambda one: way * one.length,
                )
            )
        if limits.repetition and repeats >= max(limits.repetition, 2 * repeated) and paid >= limits.correlation:
            found.append(
                _Suspicion(
                    "repetition",
                    f"{repeats:.0%} of the sequences of {GRAM} tokens in a response repeat earlier ones, before "
                    f"{repeated:.0%} ({since}), and among the responses to a prompt those that repeat more get the "
                    f"higher reward (correlation {paid:.2f})",
                    lambda one: one.repetition,
                )
            )
        if limits.components and gap >= limits.components:
            found.append(
                _Suspicion(
                    "components",
                    f"the reward {up!r} rises at the cost of {down!r}: by {shifts[up]:+.2f} and {shifts[down]:+.2f} "
                    f"standard deviations ({since})",
                    lambda one: one.parts.get(up, -math.inf) - one.parts.get(down, 0.0),
                )
            )
        metrics = {"length_ratio": ratio, "length_correlation": correlation}
        metrics |= {"repetition": repeats, "repetition_correlation": paid}
        metrics |= {"components_gap": gap} if len(shifts) > 1 else {}
        return {f"hacking/{name}": value for name, value in metrics.items()}, found

    def _alarm(self, step: int, suspicion: _Suspicion, scored: Sequence[_Scored]) -> None:
        most = sorted(scored, key=suspicion.shows, reverse=True)[:SHOWN]
        samples: list[dict[str, Any]] = [
            {
                "epoch": one.key[0], "index": one.key[-1], "sample": one.number, "reward": one.reward,
                "tokens": one.length, "rewards": dict(one.parts), "response": self._rewards.response(one.episode).text,
            }
            for one in most
        ]  # fmt: skip
        head = f"reward alarm ({suspicion.kind}) at step {step}: {suspicion.why}. The policy may exploit the reward"
        lines = [
            f"  prompt {one['index']} sample {one['sample']}, reward {one['reward']:.4g}, {one['tokens']} tokens: "
            f"{one['response'][:SHOWN_CHARACTERS]!r}"
            for one in samples
        ]
        self._tell("\n".join([head, *lines, f"  more: rlmesh samples {self._run_dir} --step {step} --best"]))
        with suppress(UsageError):  # outside of a job there are no alarms
            current_worker().alarm(head)
        content = {"step": step, "kind": suspicion.kind, "why": suspicion.why, "samples": samples}
        try:
            text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
            private_files.write_whole(alarm_file(self._run_dir, suspicion.kind), text, durable=False)
        except OSError as error:
            self._tell(f"  the samples of the alarm are not kept: {error}")


def _summary(step: int, scored: Sequence[_Scored]) -> dict[str, Any]:
    """Means of a step, and for each component the number, the sum and the sum of squares of its scores."""
    parts: dict[str, list[float]] = {}
    for one in scored:
        for name, value in one.parts.items():
            sums = parts.setdefault(name, [0.0, 0.0, 0.0])
            sums[:] = sums[0] + 1, sums[1] + value, sums[2] + value * value
    return {
        "step": step,
        "length": float(np.mean([one.length for one in scored])),
        "repetition": float(np.mean([one.repetition for one in scored])),
        "reward": float(np.mean([one.reward for one in scored])),
        "parts": parts,
    }


def _deviations(scored: Sequence[_Scored], trait: str) -> tuple[float, float, float]:
    """Sums over the episodes of dx · dy, dx² and dy², with the deviations dx of a trait and dy of the reward from the
    mean of the group. If each prompt has one response, the batch is the group."""
    numbers: dict[tuple[int, ...], int] = {}
    groups = np.array([numbers.setdefault(one.key, len(numbers)) for one in scored])
    if len(numbers) == len(scored):
        groups = np.zeros_like(groups)
    sizes = np.bincount(groups)

    def deviations(of: str) -> np.ndarray[Any, Any]:
        values = np.array([getattr(one, of) for one in scored], np.float64)
        means: np.ndarray[Any, Any] = np.bincount(groups, values) / sizes
        deviating: np.ndarray[Any, Any] = values - means[groups]
        return deviating

    x, y = deviations(trait), deviations("reward")
    return float(x @ y), float(x @ x), float(y @ y)


def _correlation(sums: Sequence[float]) -> float:
    mixed, traits, rewards = sums
    return mixed / math.sqrt(traits * rewards) if traits * rewards > 0 else 0.0


def _mean(steps: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(np.mean([one[name] for one in steps]))


def _shifts(first: Sequence[Mapping[str, Any]], last: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The change of each weighted component's mean, in standard deviations of its scores, at most 10; empty for fewer
    than two components."""
    found = {}
    for name in dict.fromkeys(name for one in [*first, *last] for name in one["parts"]):
        (count, mean, spread), (later, moved, wide) = _moments(first, name), _moments(last, name)
        if min(count, later) < LEAST_SCORES:
            continue
        unit = max(spread, wide)
        shift = (moved - mean) / unit if unit > 0 else math.copysign(10.0, moved - mean) if moved != mean else 0.0
        found[name] = max(-10.0, min(10.0, shift))
    return found if len(found) > 1 else {}


def _moments(steps: Sequence[Mapping[str, Any]], name: str) -> tuple[float, float, float]:
    """Number, mean and standard deviation of a component's scores."""
    count, total, squares = (sum(one["parts"].get(name, (0.0, 0.0, 0.0))[place] for one in steps) for place in range(3))
    if not count:
        return 0.0, 0.0, 0.0
    mean = total / count
    return count, mean, math.sqrt(max(squares / count - mean * mean, 0.0))
