"""Random episodes for tests of packing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from rlmesh.rl.types import Episode, Turn

VOCABULARY = 50


@dataclass(frozen=True)
class Episodes:
    """Groups of episodes with a common prompt; responses may be empty, and some have a turn of the environment."""

    episodes: list[Episode]
    groups: list[int]
    seed: int

    def normal(self) -> list[np.ndarray]:
        """Standard normal values, one per token of each episode."""
        random = np.random.default_rng([self.seed, 1])
        return [random.normal(size=len(episode)) for episode in self.episodes]


def episodes_of(lengths: list[tuple[int, list[int]]], seed: int) -> Episodes:
    """Per group the length of the prompt and those of the responses."""
    random = np.random.default_rng(seed)
    episodes, groups = [], []

    def policy(count: int) -> Turn:
        ids = random.integers(0, VOCABULARY, count).astype(np.int32)
        spans = ((1, 0, count),) if count else ()
        return Turn(ids, "policy", random.normal(size=count).astype(np.float32), version_spans=spans)

    for group, (prompt, responses) in enumerate(lengths):
        ids = random.integers(0, VOCABULARY, prompt)
        for count in responses:
            turns = [Turn.said(ids), policy(count)]
            if count % 3 == 2:
                turns += [Turn.said(random.integers(0, VOCABULARY, 2)), policy(count)]
            episodes.append(Episode(tuple(turns)))
            groups.append(group)
    return Episodes(episodes, groups, seed)


@st.composite
def groups_of_episodes(draw: st.DrawFn) -> Episodes:
    lengths = st.tuples(st.integers(1, 6), st.lists(st.integers(0, 6), min_size=1, max_size=4))
    return episodes_of(draw(st.lists(lengths, min_size=1, max_size=4)), draw(st.integers(0, 2**31)))


def padded(rows: list[np.ndarray[Any, Any]], *, fill: float = 0.0) -> torch.Tensor:
    """Stack an array per episode into a tensor ``[episodes, longest]``, with ``fill`` after the end of each."""
    longest = max(map(len, rows), default=0)
    matrix = np.full((len(rows), longest), fill, dtype=rows[0].dtype if rows else np.float32)
    for row, values in enumerate(rows):
        matrix[row, : len(values)] = values
    return torch.from_numpy(matrix)
