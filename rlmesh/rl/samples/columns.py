"""Samples as columns of a table: one row per episode."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any

import numpy as np

from rlmesh.rl.types import Abstain, Episode, Failed, Group, Outcome, Score

__all__ = ["TOKENS", "SampledStep", "columns_of"]

TOKENS = ("prompt_ids", "response_ids", "response_mask", "log_probs")
"""Columns with a list of tokens per row; `read_file` leaves them out."""

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True, eq=False)
class SampledStep:
    """The samples of one step.

    Attributes:
        step: the step that trains on the samples; of a validation, the finished steps of the weights.
        split: ``train`` or ``validation``.
        groups: with outcomes.
        totals: the reward of each episode, group by group.
        advantages: the advantage of each episode, group by group; NaN if the episode was not trained on.
    """

    step: int
    split: str
    groups: tuple[Group, ...]
    totals: tuple[Outcome, ...]
    advantages: tuple[float, ...]


def columns_of(batch: SampledStep, decode: Decode) -> dict[str, list[Any]]:
    """The columns of a step's samples.

    ``step``, ``split``, ``epoch``, ``index`` (of the prompt in the data), ``sample`` (its number within the prompt),
    ``data_source``, ``prompt``, ``response``, ``ground_truth``, ``finish_reason``, ``tokens`` (sampled ones),
    ``first_version`` and ``last_version`` of the weights that sampled, ``versions`` as JSON (spans over the tokens that
    the policy sampled, turn by turn), ``reward`` (the weighted sum; null if it failed or abstained), ``said`` (the
    reason), ``answer``, ``advantage`` (mean over the sampled tokens), those of `TOKENS`, and for each reward
    ``reward/NAME``, ``reward/NAME/said`` and ``reward/NAME/METRIC``.
    """
    rows = []
    outcomes, advantages = iter(batch.totals), iter(batch.advantages)
    for group in batch.groups:
        place, ids = _place(batch, group), group.episodes[0].prompt_ids
        prompt = decode(ids.tolist())
        for number, episode in enumerate(group.episodes):
            if not np.array_equal(episode.prompt_ids, ids):  # an environment or an agent began it in another way
                ids = episode.prompt_ids
                prompt = decode(ids.tolist())
            row = {
                **place,
                "sample": number,
                "prompt": prompt,
                **_sampled(episode, decode),
                **_scored(episode, next(outcomes)),
            }
            advantage = next(advantages)
            row["advantage"] = None if isnan(advantage) else advantage
            rows.append(row)
    names: dict[str, None] = {}
    for row in rows:
        if not row.keys() <= names.keys():
            names |= dict.fromkeys(row)
    return {name: [row.get(name) for row in rows] for name in names}


def _place(batch: SampledStep, group: Group) -> dict[str, Any]:
    """The columns that all samples of a group share; ``sample`` and ``prompt`` stand for those of each."""
    source = group.row.get("data_source")
    return {
        "step": batch.step,
        "split": batch.split,
        "epoch": group.key[0],
        "index": group.key[-1],
        "sample": 0,
        "data_source": None if source is None else str(source),
        "prompt": "",
        "ground_truth": _truth(group.row),
    }


def _sampled(episode: Episode, decode: Decode) -> dict[str, Any]:
    turns = episode.turns[1:]
    ids = [token for turn in turns for token in turn.ids.tolist()]
    spans = [list(span) for turn in episode.turns for span in turn.version_spans]
    versions = [version for version, *_ in spans]
    log_probs = [turn.whole_log_probs.tolist() if turn.source == "policy" else [0.0] * len(turn) for turn in turns]
    return {
        "response": decode(ids),
        "finish_reason": episode.finish_reason,
        "tokens": episode.response_tokens,
        "first_version": min(versions, default=None),
        "last_version": max(versions, default=None),
        "versions": json.dumps(spans),
        "prompt_ids": episode.prompt_ids.tolist(),
        "response_ids": ids,
        "response_mask": [turn.source == "policy" for turn in turns for _ in range(len(turn))],
        "log_probs": [one for row in log_probs for one in row],
    }


def _scored(episode: Episode, total: Outcome) -> dict[str, Any]:
    row: dict[str, Any] = {"reward": _value(total), "said": _said(total)}
    row["answer"] = total.answer if isinstance(total, Score) else None
    for name, outcome in episode.outcomes.items():
        row[f"reward/{name}"] = _value(outcome)
        row[f"reward/{name}/said"] = _said(outcome)
        if isinstance(outcome, Score):
            row |= {f"reward/{name}/{metric}": float(number) for metric, number in outcome.metrics.items()}
    return row


def _value(outcome: Outcome) -> float | None:
    return float(outcome.value) if isinstance(outcome, Score) else None


def _said(outcome: Outcome) -> str:
    if isinstance(outcome, Failed):
        return f"failed: {outcome.reason}"
    if isinstance(outcome, Abstain):
        return f"abstained: {outcome.reason}" if outcome.reason else "abstained"
    return outcome.reason


def _truth(row: Mapping[str, Any]) -> str | None:
    from rlmesh.rl.rewards.reward import ground_truth_of

    truth = ground_truth_of(row)
    return truth if truth is None or isinstance(truth, str) else json.dumps(truth, default=str, ensure_ascii=False)
