"""Estimates of mean@k, pass@k and maj@k from n ≥ k samples per prompt. NumPy only; `rlmesh.rl.reference` has twins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from math import comb

import numpy as np

__all__ = ["ks_up_to", "majority_at_k", "unbiased_pass_at_k"]

MOST_SUBSETS = 1000
"""`majority_at_k` looks at all subsets of k samples, or, if there are more than this, at this many random ones."""


def ks_up_to(samples: int) -> tuple[int, ...]:
    """The numbers k that a report has for ``samples`` samples per prompt: the powers of two, and ``samples`` itself."""
    powers = (2**power for power in range(samples.bit_length()))
    return tuple(sorted({*(k for k in powers if k <= samples), samples}))


def unbiased_pass_at_k(right: Sequence[bool], k: int) -> float:
    """The probability that at least one of k samples is right.

    ``1 − C(n − c, k) / C(n, k)`` for c right ones of n samples, the unbiased estimator of Chen et al. 2021
    (arXiv:2107.03374), as a product: its binomials overflow for large n.

    Args:
        right: for each of the n samples, True if it is right.
        k: from 1 to n.

    Raises:
        ValueError: k is below 1 or above n.
    """
    n, c = len(right), int(np.count_nonzero(right))
    if not 1 <= k <= n:
        raise ValueError(f"k={k} must be between 1 and the number of samples, {n}")
    if n - c < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1, dtype=np.float64)))


def majority_at_k(answers: Sequence[str | None], scores: Sequence[float], k: int, *, seed: int = 0) -> float:
    """The expected score of the most frequent answer among k of n samples (self-consistency, Wang et al. 2022,
    arXiv:2203.11171).

    A sample without an answer has no vote. Answers that are equally frequent share the vote, so the result does not
    depend on the order of the samples; without any vote the score is 0.

    Args:
        answers: the answer of each sample; ``None``: it has none.
        scores: the score of each sample.
        k: from 1 to n.
        seed: seed of the subsets that are drawn if there are more than 1,000.

    Raises:
        ValueError: k is below 1 or above n, or there are not as many scores as answers.
    """
    n = len(answers)
    if len(scores) != n:
        raise ValueError(f"{n} answers and {len(scores)} scores: expected as many")
    if not 1 <= k <= n:
        raise ValueError(f"k={k} must be between 1 and the number of samples, {n}")
    found = [_majority([(answers[place], scores[place]) for place in chosen]) for chosen in _subsets(n, k, seed)]
    return float(np.mean(found))


def _subsets(n: int, k: int, seed: int) -> Iterator[Sequence[int]]:
    if comb(n, k) <= MOST_SUBSETS:
        yield from combinations(range(n), k)
        return
    generator = np.random.default_rng([seed, n, k])
    for _ in range(MOST_SUBSETS):
        yield generator.choice(n, k, replace=False).tolist()


def _majority(chosen: Sequence[tuple[str | None, float]]) -> float:
    votes = Counter(answer for answer, _ in chosen if answer is not None)
    most = max(votes.values(), default=0)
    winners = [answer for answer, count in votes.items() if count == most]
    means = [float(np.mean([score for answer, score in chosen if answer == winner])) for winner in winners]
    return float(np.mean(means)) if means else 0.0
