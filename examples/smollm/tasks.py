"""Tasks of reasoning-gym as rows of a data set, and the reward of an answer.

The default are sums of two one-digit numbers: the untrained model solves some of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import reasoning_gym

EASY = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
"""Settings that make data sets easy."""
WORDING = {"chain_sum": "What is {expression}?"}
"""Wordings, from a task's metadata, that a small model understands better than the data set's own: it answers two of
three sums right with this wording, and one of three with the data set's."""


@cache
def tasks(name: str, size: int, seed: int) -> Any:
    """A data set by name; the same seed gives the same tasks."""
    return reasoning_gym.create_dataset(name, size=size, seed=seed, **EASY.get(name, {}))


def write(file: Path, name: str, size: int, seed: int) -> None:
    """Write tasks as JSON lines."""
    lines = []
    for number, task in enumerate(tasks(name, size, seed)):
        text = WORDING[name].format(**task["metadata"]) if name in WORDING else task["question"]
        row = {
            "prompt": [{"role": "user", "content": f"{text} Answer with the number only."}],
            "ground_truth": task["answer"],
            "extra_info": {"name": name, "size": size, "seed": seed, "number": number},
        }
        lines.append(json.dumps(row) + "\n")
    file.write_text("".join(lines))


def right(response: str, extra_info: Mapping[str, Any]) -> float:
    """The data set's score, 1 if right, of the last number in the response, or of all of it if it has no number."""
    numbers = re.findall(r"-?\d+", response)
    data = tasks(extra_info["name"], extra_info["size"], extra_info["seed"])
    return float(data.score_answer(numbers[-1] if numbers else response.strip(), data[extra_info["number"]]))
