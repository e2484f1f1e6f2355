"""Tasks of reasoning-gym: their texts, and how answers are scored.

Sums of two one-digit numbers unless another is asked for: the model gets these right now and then from the start.
"""

from __future__ import annotations

import re
from typing import Any

EASY = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
"""Settings of data sets that are made easy."""
WORDING = {"chain_sum": "What is {expression}?"}
"""Words that so small a model understands better than the data set's own, from a task's metadata: of sums it gets two
of three right by greedy answers then, and one of three with the data set's words."""


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
        """1 for the right answer, by the data set's own scorer: of the last number in the text, if there is one."""
        numbers = re.findall(r"-?\d+", text)
        return float(self._data.score_answer(numbers[-1] if numbers else text.strip(), self._data[number]))
