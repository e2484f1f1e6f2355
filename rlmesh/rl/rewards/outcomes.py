"""Conversion of reward functions' return values to outcomes, and combinations of outcomes. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np

from rlmesh.rl.types import Abstain, Failed, Outcome, Score

__all__ = ["combine", "metrics_of", "to_outcome", "to_outcomes"]


def to_outcome(value: Any) -> Outcome:
    """The outcome for a return value of a reward function.

    ============================  ==========================================================================
    a number, also of NumPy       its score; NaN and infinity are failures
    ``True``, ``False``           1 and 0
    ``None``                      abstains
    a mapping with ``score``      that score, the other numbers as metrics, ``answer`` (or ``pred``) as the answer
    an outcome                    itself
    anything else                 a failure that names the type
    ============================  ==========================================================================
    """
    try:
        return _converted(value)
    except (TypeError, ValueError, OverflowError) as error:  # a number that is too large, an array of texts
        return Failed(f"the scorer returned {type(value).__name__}, which is no score: {error}")


def _converted(value: Any) -> Outcome:
    if isinstance(value, (Score, Abstain, Failed)):
        return value
    if value is None:
        return Abstain()
    if isinstance(value, Mapping):
        if "score" not in value:
            return Failed(f"the scorer returned a mapping without 'score': {sorted(map(str, value))}")
        inner = to_outcome(value["score"])
        if not isinstance(inner, Score):
            return inner
        numbers = {str(name): number for name, number in value.items() if name != "score" and _is_number(number)}
        answer = value.get("answer", value.get("pred", inner.answer))
        metrics = {name: float(number) for name, number in numbers.items() if name not in ("answer", "pred")}
        if wrong := [name for name, number in metrics.items() if not np.isfinite(number)]:
            return Failed(f"the scorer returned a mapping whose {wrong[0]!r} is {metrics[wrong[0]]}")
        return Score(inner.value, metrics, inner.reason, None if answer is None else str(answer))
    if isinstance(value, (bool, np.bool_)):
        return Score(float(value))
    if _is_number(value):
        number = float(value)
        return Score(number) if np.isfinite(number) else Failed(f"the scorer returned {number}")
    return Failed(f"the scorer returned {type(value).__name__}, which is no score: {str(value)[:80]!r}")


def to_outcomes(value: Any, size: int) -> list[Outcome]:
    """The outcomes for a return value of a batched reward function.

    Args:
        value: a sequence, array or iterator of ``size`` values; with anything else, such as a set, which has no order,
            all responses are `Failed`.
        size: number of responses.
    """
    try:
        values = [] if isinstance(value, (str, bytes, Mapping, Set)) else list(value)
    except TypeError:
        values = []
    except Exception as error:  # a generator runs the scorer's code
        return [Failed(f"{type(error).__name__}: {error}")] * size
    if len(values) != size:
        length = f" of length {len(value)}" if hasattr(value, "__len__") else ""
        reason = f"the scorer returned {type(value).__name__}{length} for {size} responses: expected a list of as many"
        values = [Failed(reason)] * size
    return [to_outcome(one) for one in values]


def combine(outcomes: Mapping[str, Outcome], weights: Mapping[str, float]) -> Outcome:
    """Combine the outcomes of an episode's rewards into one.

    If one reward fails, the episode fails: a sum without that reward would be another reward. Rewards that abstain are
    left out of the sum; if all abstain, the episode abstains.

    Args:
        outcomes: the outcome of each reward, by the reward's name.
        weights: the weight of each reward, by the same names.

    Returns:
        A score of ``Σ weight · score``, with all metrics as ``name/metric`` and the first answer that a reward found.
    """
    if len(outcomes) == 1:
        ((name, only),) = outcomes.items()
        if isinstance(only, Score) and not only.metrics and weights[name] == 1:
            return only
    failed = [f"{name}: {outcome.reason}" for name, outcome in outcomes.items() if isinstance(outcome, Failed)]
    if failed:
        return Failed("; ".join(failed))
    scores = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Score)}
    if not scores:
        return Abstain("; ".join(outcome.reason for outcome in outcomes.values() if isinstance(outcome, Abstain)))
    total = sum(weights[name] * score.value for name, score in scores.items())
    metrics = {f"{name}/{key}": number for name, score in scores.items() for key, number in score.metrics.items()}
    reasons = [score.reason for score in scores.values() if score.reason]
    answer = next((score.answer for score in scores.values() if score.answer is not None), None)
    return Score(total, metrics, "; ".join(reasons), answer)


def metrics_of(outcomes: Sequence[Mapping[str, Outcome]]) -> dict[str, float]:
    """The metrics of rewards, over the episodes of a batch.

    Args:
        outcomes: for each episode, the outcomes by the reward's name.

    Returns:
        per reward ``reward/NAME`` (mean of the scores), ``reward/NAME/abstained`` and ``/failed`` (shares), and the
        mean of each metric over the episodes that have it.
    """
    values: dict[str, list[float]] = {}
    for each in outcomes:
        for name, outcome in each.items():
            key = f"reward/{name}"
            values.setdefault(f"{key}/abstained", []).append(float(isinstance(outcome, Abstain)))
            values.setdefault(f"{key}/failed", []).append(float(isinstance(outcome, Failed)))
            if isinstance(outcome, Score):
                values.setdefault(key, []).append(outcome.value)
                for metric, number in outcome.metrics.items():
                    values.setdefault(f"{key}/{metric}", []).append(number)
    return {key: sum(numbers) / len(numbers) for key, numbers in values.items()}


def _is_number(value: Any) -> bool:
    if isinstance(value, (int, float, np.number)):
        return not isinstance(value, np.complexfloating)  # float() would leave the imaginary part out
    # True for tensors and arrays of one number too, without importing torch.
    return hasattr(value, "item") and getattr(value, "shape", None) in ((), (1,))
