"""Twins of :mod:`rlmesh.rl.evaluation.estimates`: every subset of k samples is looked at, in exact fractions."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations


def unbiased_pass_at_k(right: Sequence[bool], k: int) -> float:
    """The share of the subsets of k samples with at least one that is right."""
    chosen = list(combinations(right, k))
    return float(Fraction(sum(any(each) for each in chosen), len(chosen)))


def majority_at_k(answers: Sequence[str | None], scores: Sequence[float], k: int) -> float:
    """The mean score of the most frequent answer, over all subsets of k samples; equally frequent ones share a vote."""
    found = []
    for chosen in combinations(range(len(answers)), k):
        voted = [answers[place] for place in chosen if answers[place] is not None]
        most = max((voted.count(answer) for answer in voted), default=0)
        winners = sorted({answer for answer in voted if answer is not None and voted.count(answer) == most})
        each = []
        for winner in winners:
            own = [Fraction(scores[place]) for place in chosen if answers[place] == winner]
            each.append(sum(own, Fraction(0)) / len(own))
        found.append(sum(each, Fraction(0)) / len(each) if each else Fraction(0))
    return float(sum(found, Fraction(0)) / len(found))
