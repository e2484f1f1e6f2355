"""Tasks of reasoning-gym, and the scores of answers.

The default are sums of two one-digit numbers: the untrained model solves some of them.
"""

from __future__ import annotations

import re
from typing import Any

EASY = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
"""Settings that make data sets easy."""
WORDING = {"chain_sum": "What is {expression}?"}
"""Wordings, from a task's metadata, that a small model understands better than the data set's own: it answers two of
three sums right with this wording, and one of three with the data set's."""


class Tasks:
    """A data set by name; the same seed gives the same tasks."""

    def __init__(self, name: str, size: int, seed: int) -> None:
        import reasoning_gym

        self._data: Any = reasoning_gym.create_dataset(name, size=size, seed=seed, **EASY.get(name, {}))
        self._wording = WORDING.get(name)

    def question(self, number: int) -> str:
        task = self._data[number]
        text = self._wording.format(**task["metadata"]) if self._wording else task["question"]
        return f"{text} Answer with the number only."

    def score(self, number: int, text: str) -> float:
        """The data set's score, 1 if right, of the last number in the text, or of the whole text without numbers."""
        numbers = re.findall(r"-?\d+", text)
        return float(self._data.score_answer(numbers[-1] if numbers else text.strip(), self._data[number]))
