"""The reward of `post_training.py`, in a module of its own: processes that score import it, and it imports nothing."""

from __future__ import annotations

from collections.abc import Sequence


def even(responses: Sequence[str]) -> list[float]:
    """The share of words with an even number: something that every response has."""
    found = []
    for response in responses:
        words = response.split()
        found.append(sum(word[-1] in "02468" for word in words) / max(len(words), 1))
    return found
