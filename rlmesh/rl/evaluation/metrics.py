"""Metrics of a validation by data source: mean@k, maj@k, pass@k."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rlmesh.rl.evaluation.estimates import ks_up_to, majority_at_k, unbiased_pass_at_k
from rlmesh.rl.types import EQUAL, Episode, Group, Outcome, Score

__all__ = ["NO_SOURCE", "validation_metrics"]

NO_SOURCE = "unknown"
"""The source of rows without the column ``data_source``, as in verl."""


def validation_metrics(
    groups: Sequence[Group], total: Callable[[Episode], Outcome], *, right: float = 1.0
) -> dict[str, float]:
    """The metrics of a validation, per data source.

    A response whose reward failed or abstained has no score, and is in none of the numbers; a prompt with fewer than k
    scores is left out of the numbers for k.

    Args:
        groups: the responses of each prompt.
        total: function that gives the reward of an episode.
        right: the least reward of a response that counts as right.

    Returns:
        for n responses per prompt ``val/SOURCE/mean@n`` (the mean reward), ``val/SOURCE/pass@k`` for k of 1, 2, 4, … n,
        ``val/SOURCE/maj@k`` for k of 2, 4, … n if the rewards give answers, and ``val/SOURCE/unscored``, the share of
        responses without a score. Each is a mean over prompts.
    """
    sources: dict[str, list[list[Outcome]]] = {}
    for group in groups:
        source = group.row.get("data_source")
        outcomes = [total(episode) for episode in group.episodes]
        sources.setdefault(NO_SOURCE if source is None else str(source), []).append(outcomes)
    found: dict[str, float] = {}
    for source, prompts in sources.items():
        found |= {f"val/{source}/{name}": value for name, value in _of_source(prompts, right).items()}
    return found


def _of_source(prompts: Sequence[Sequence[Outcome]], right: float) -> dict[str, float]:
    samples = max(map(len, prompts))
    scored = [[one for one in outcomes if isinstance(one, Score)] for outcomes in prompts]
    scored = [scores for scores in scored if scores]
    every = sum(map(len, prompts))
    found = {"unscored": 1 - sum(map(len, scored)) / every}
    if scored:
        found[f"mean@{samples}"] = float(np.mean([np.mean([one.value for one in scores]) for scores in scored]))
    voting = any(one.answer is not None for scores in scored for one in scores)
    for k in ks_up_to(samples):
        enough = [scores for scores in scored if len(scores) >= k]
        if not enough:
            continue
        passed = [unbiased_pass_at_k([one.value >= right - EQUAL for one in scores], k) for scores in enough]
        found[f"pass@{k}"] = float(np.mean(passed))
        if voting and k > 1:
            votes = [
                majority_at_k([one.answer for one in scores], [one.value for one in scores], k) for scores in enough
            ]
            found[f"maj@{k}"] = float(np.mean(votes))
    return found
