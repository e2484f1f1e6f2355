"""Packs: episodes concatenated in one row, without padding, and with the prompt of a group only once.

A row of a rectangular batch is as long as its longest episode: with long-tailed lengths, more than half of the
computation is padding, and a prompt with eight responses is computed eight times. A pack is one row of tokens made of
segments. A segment attends to itself (causally) and, if it has a prefix, to the whole prefix. So the prompt of a group
is one segment, and the remaining tokens of each episode are another, with the prompt as prefix.

Each token keeps its position within its episode, so a pack gives the same results as the episodes alone.

NumPy only: :mod:`rlmesh.rl.prefix` has the attention over a pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh.rl.balance import fill
from rlmesh.rl.types import Episode

__all__ = ["Pack", "Packs", "Segment", "pack", "same_prompts"]

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segment:
    """A contiguous range of a pack's tokens.

    Attributes:
        start, length: the tokens ``[start, start + length)`` of the pack.
        prefix_start, prefix_length: the tokens that the segment attends to besides its own; length 0: none.
    """

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """The input of one forward pass.

    ``targets`` are the policy's tokens, in a fixed order. All values per target (log-probabilities, advantages,
    weights) are ``[targets]`` in that order.

    Attributes:
        ids, positions: ``[tokens]``.
        segments: in the order of the tokens, without gaps.
        sources: ``[targets]``, the token whose state predicts the target.
        targets: ``[targets]``, the target's id.
        rows: ``[targets]``, the target's episode, as an index into the episodes that were packed.
        places: ``[targets]``, the target's index among its episode's tokens.
    """

    ids: Index
    positions: Index
    segments: tuple[Segment, ...]
    sources: Index
    targets: Index
    rows: Index
    places: Index

    def __len__(self) -> int:
        """The number of tokens that are computed."""
        return len(self.ids)

    def take(self, per_episode: Sequence[NDArray[np.generic]]) -> NDArray[np.generic]:
        """Select ``[targets]`` from one array per episode, each ``[tokens of the episode]``."""
        if not len(self.targets):
            return np.zeros(0, dtype=per_episode[0].dtype if len(per_episode) else np.float32)
        edges = np.flatnonzero(np.diff(self.rows)) + 1
        runs = zip(np.split(self.rows, edges), np.split(self.places, edges), strict=True)
        return np.concatenate([per_episode[rows[0]][places] for rows, places in runs])


@dataclass(frozen=True, slots=True, eq=False)
class Packs:
    """The packs of a batch, rank by rank.

    Attributes:
        by_rank: ``by_rank[rank][i]``; all ranks have equally many packs, the last of which may be empty.
        episode_tokens: tokens of all episodes, each prompt counted once per episode.
    """

    by_rank: tuple[tuple[Pack, ...], ...]
    episode_tokens: int
    tokens: int = field(init=False)
    """The number of tokens that are computed, over all ranks."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", sum(len(each) for packs in self.by_rank for each in packs))

    @property
    def saved_share(self) -> float:
        """The share of the episodes' tokens that sharing prompts saves, in [0, 1)."""
        return 1 - self.tokens / self.episode_tokens if self.episode_tokens else 0.0


def pack(
    episodes: Sequence[Episode],
    *,
    token_budget: int,
    ranks: int = 1,
    groups: Sequence[int] | None = None,
    share_prompts: bool = True,
) -> Packs:
    """Distribute episodes over packs and ranks.

    Episodes of one group stay together if the budget allows, so that their prompt is computed once; a group that does
    not fit is split, and its prompt is computed once per part.

    Args:
        episodes: of the whole batch.
        token_budget: token limit of a pack. A longer episode gets a pack of its own.
        ranks: number of ranks that get packs.
        groups: ``[episodes]``, equal for episodes of one prompt; ``None``: each episode is a group of its own.
        share_prompts: False computes a prompt once per episode.

    Raises:
        ValueError: the budget or the ranks are below 1, the number of groups is wrong, or two episodes of a group have
            different prompts.
    """
    if token_budget < 1 or ranks < 1:
        raise ValueError(f"token_budget and ranks must be ≥ 1, got {token_budget} and {ranks}")
    names = list(range(len(episodes))) if groups is None else list(groups)
    if len(names) != len(episodes):
        raise ValueError(f"{len(episodes)} episodes need as many groups, got {len(names)}")
    units = _units(episodes, names, token_budget) if share_prompts else [[i] for i in range(len(episodes))]
    sizes = [_size(episodes, unit) for unit in units]
    bins = fill(sizes, token_budget, multiple_of=ranks)
    bins.sort(key=lambda items: -sum(sizes[i] for i in items))
    # Dealt by falling size, forwards and backwards over the ranks, so that these get about equally many tokens.
    by_rank: list[list[Pack]] = [[] for _ in range(ranks)]
    for turn, items in enumerate(bins):
        lap, place = divmod(turn, ranks)
        rank = place if lap % 2 == 0 else ranks - 1 - place
        by_rank[rank].append(_build(episodes, [units[i] for i in items]))
    return Packs(tuple(map(tuple, by_rank)), sum(map(len, episodes)))


def same_prompts(episodes: Sequence[Episode], groups: Sequence[int]) -> list[int]:
    """``[episodes]``, numbers for `pack`, equal for episodes of one group whose prompts are equal. An environment may
    give the episodes of a group different beginnings."""
    places: dict[tuple[int, bytes], int] = {}
    return [
        places.setdefault((group, episode.prompt_ids.tobytes()), len(places))
        for episode, group in zip(episodes, groups, strict=True)
    ]


def _units(episodes: Sequence[Episode], names: Sequence[int], budget: int) -> list[list[int]]:
    """Episodes that share one prompt in one pack: groups, split where they exceed the budget."""
    members: dict[int, list[int]] = {}
    for i, name in enumerate(names):
        members.setdefault(name, []).append(i)
    units = []
    for name, group in members.items():
        prompt = episodes[group[0]].prompt_ids
        for i in group[1:]:
            if not np.array_equal(episodes[i].prompt_ids, prompt):
                raise ValueError(f"episodes {group[0]} and {i} are of group {name} but have different prompts")
        rest = [len(episodes[i]) - len(prompt) for i in group]
        parts = fill(rest, max(budget - len(prompt), 1))
        units += [[group[i] for i in part] for part in parts if part]
    return units


def _size(episodes: Sequence[Episode], unit: Sequence[int]) -> int:
    prompt = len(episodes[unit[0]].prompt_ids)
    return prompt + sum(len(episodes[i]) - prompt for i in unit)


def _sampled(episode: Episode) -> Index:
    """The indices of the tokens that the policy sampled."""
    ends = list(accumulate(map(len, episode.turns)))
    ranges = [
        np.arange(end - len(turn), end)
        for turn, end in zip(episode.turns, ends, strict=True)
        if turn.source == "policy"
    ]
    return ranges[0] if len(ranges) == 1 else np.concatenate([np.zeros(0, np.int64), *ranges])


def _build(episodes: Sequence[Episode], units: Sequence[Sequence[int]]) -> Pack:
    ids: list[NDArray[np.int32]] = []
    positions: list[Index] = []
    sources, targets, rows, places = (list[Index]() for _ in range(4))
    segments: list[Segment] = []
    at = 0

    def add(tokens: NDArray[np.int32], first: int, prefix: tuple[int, int]) -> int:
        nonlocal at
        start, at = at, at + len(tokens)
        ids.append(tokens)
        positions.append(np.arange(first, first + len(tokens)))
        segments.append(Segment(start, len(tokens), *prefix))
        return start

    for unit in units:
        prompt = len(episodes[unit[0]].prompt_ids)
        shared = len(unit) > 1
        prompt_at = add(episodes[unit[0]].prompt_ids, 0, (0, 0)) if shared else at
        for row in unit:
            whole = episodes[row].ids
            if shared and len(whole) == prompt:
                continue
            start = add(whole[prompt:], prompt, (prompt_at, prompt)) if shared else add(whole, 0, (0, 0)) + prompt
            chosen = _sampled(episodes[row])
            # The first token after the prompt is predicted by the prompt's last one.
            before = chosen - 1
            sources.append(np.where(before < prompt, prompt_at + before, start + before - prompt))
            targets.append(whole[chosen].astype(np.int64))
            rows.append(np.full(len(chosen), row))
            places.append(chosen)

    def joined(parts: Sequence[NDArray[np.integer[Any]]]) -> Index:
        return np.concatenate([np.zeros(0, np.int64), *parts])

    return Pack(
        joined(ids),
        joined(positions),
        tuple(segments),
        sources=joined(sources),
        targets=joined(targets),
        rows=joined(rows),
        places=joined(places),
    )
