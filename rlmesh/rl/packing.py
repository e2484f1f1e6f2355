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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlmesh.rl.balance import fill
from rlmesh.rl.types import Episode, Turn

__all__ = ["Pack", "Packs", "Segment", "Tokens", "pack", "same_prompts"]

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The tokens of a batch of episodes in one row, one episode after the other.

    Attributes:
        turns: the turns of all episodes.
        ids: ``[tokens]``, int32.
        sampled: ``[tokens]``, True at the tokens that the policy sampled.
        starts, lengths: ``[episodes]``, the first token and the number of tokens of each.
        prompts: ``[episodes]``, the number of tokens of the prompt.
    """

    turns: list[Turn]
    ids: NDArray[np.int32]
    sampled: NDArray[np.bool_]
    starts: Index
    lengths: Index
    prompts: Index

    @classmethod
    def of(cls, episodes: Sequence[Episode]) -> Tokens:
        """Concatenate the tokens of episodes."""
        turns = [turn for episode in episodes for turn in episode.turns]
        counts = np.array([len(episode.turns) for episode in episodes], dtype=np.int64)
        sizes = np.array([len(turn.ids) for turn in turns], dtype=np.int64)
        first = counts.cumsum() - counts
        lengths = np.add.reduceat(sizes, first) if len(turns) else np.zeros(0, np.int64)
        return cls(
            turns,
            np.concatenate([np.zeros(0, np.int32), *(turn.ids for turn in turns)]),
            np.repeat(np.array([turn.source == "policy" for turn in turns], dtype=np.bool_), sizes),
            lengths.cumsum() - lengths,
            lengths,
            sizes[first],
        )

    @property
    def mask(self) -> NDArray[np.bool_]:
        """``[episodes, longest]``, True at the tokens that the policy sampled."""
        return self.matrix(self.sampled)

    @property
    def sampled_log_probs(self) -> NDArray[np.float64]:
        """``[episodes, longest]``, see `Episode.sampled_log_probs`; 0 elsewhere."""
        by_policy = [turn for turn in self.turns if turn.source == "policy"]
        row = np.zeros(len(self.ids))
        if by_policy:
            row[self.sampled] = np.concatenate([turn.whole_log_probs for turn in by_policy])
        return self.matrix(row)

    def matrix(self, row: NDArray[Any]) -> NDArray[Any]:
        """Reshape a value per token, ``[tokens]``, to ``[episodes, longest]``; 0 after an episode's end."""
        found = np.zeros((len(self.lengths), self.lengths.max(initial=0)), dtype=row.dtype)
        found[np.arange(found.shape[1]) < self.lengths[:, None]] = row
        return found


class Segment(NamedTuple):
    """A contiguous range of a pack's tokens.

    Attributes:
        start, length: the segment has the tokens ``[start, start + length)`` of the pack.
        prefix_start, prefix_length: the range of tokens that the segment attends to besides its own; length 0: none.
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
        episodes: the episodes of the whole batch.
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
    tokens = Tokens.of(episodes)
    units = _units(tokens, names, token_budget) if share_prompts else [[i] for i in range(len(episodes))]
    prompts, lengths = tokens.prompts.tolist(), tokens.lengths.tolist()
    sizes = [sum(lengths[i] for i in unit) - prompts[unit[0]] * (len(unit) - 1) for unit in units]
    bins = fill(sizes, token_budget, multiple_of=ranks)
    bins.sort(key=lambda items: -sum(sizes[i] for i in items))
    # Packs are dealt by falling size, forwards and backwards over the ranks, so that all get about equally many tokens.
    by_rank: list[list[Pack]] = [[] for _ in range(ranks)]
    for turn, items in enumerate(bins):
        lap, place = divmod(turn, ranks)
        rank = place if lap % 2 == 0 else ranks - 1 - place
        by_rank[rank].append(_build(tokens, [units[i] for i in items]))
    return Packs(tuple(map(tuple, by_rank)), len(tokens.ids))


def same_prompts(episodes: Sequence[Episode], groups: Sequence[int]) -> list[int]:
    """``[episodes]``, numbers for `pack`, equal for episodes of one group whose prompts are equal. An environment may
    give the episodes of a group different beginnings."""
    places: dict[tuple[int, bytes], int] = {}
    return [
        places.setdefault((group, episode.prompt_ids.tobytes()), len(places))
        for episode, group in zip(episodes, groups, strict=True)
    ]


def _ranges(starts: Index, lengths: Index) -> Index:
    """``start, start + 1, …`` of each range, one range after the other."""
    ends = lengths.cumsum()
    return np.arange(lengths.sum()) + np.repeat(starts - (ends - lengths), lengths)


def _units(tokens: Tokens, names: Sequence[int], budget: int) -> list[list[int]]:
    """Episodes that share one prompt in one pack: groups, split where they exceed the budget."""
    members: dict[int, list[int]] = {}
    for i, name in enumerate(names):
        members.setdefault(name, []).append(i)
    prompts, rests = tokens.prompts.tolist(), (tokens.lengths - tokens.prompts).tolist()
    starts = tokens.starts.tolist()
    whole = tokens.ids.tobytes()
    width = tokens.ids.itemsize

    def prompt(i: int) -> bytes:
        return whole[starts[i] * width : (starts[i] + prompts[i]) * width]

    units = []
    for name, group in members.items():
        first = prompt(group[0])
        for i in group[1:]:
            if prompt(i) != first:
                raise ValueError(f"episodes {group[0]} and {i} are of group {name} but have different prompts")
        rest, room = [rests[i] for i in group], max(budget - prompts[group[0]], 1)
        if len(group) == 1 or sum(rest) <= room:
            units.append(group)
        else:
            units += [[group[i] for i in part] for part in fill(rest, room) if part]
    return units


def _build(tokens: Tokens, units: Sequence[Sequence[int]]) -> Pack:
    segments: list[Segment] = []
    firsts: list[int] = []  # for each segment, the index of its first token among the tokens of all episodes
    order: list[int] = []  # the episodes, and for each the place of its prompt and of the token after it
    prompt_places: list[int] = []
    rest_places: list[int] = []
    starts, prompts, lengths = tokens.starts.tolist(), tokens.prompts.tolist(), tokens.lengths.tolist()
    at = 0
    for unit in units:
        prompt, prompt_at, shared = prompts[unit[0]], at, len(unit) > 1
        if shared:
            segments.append(Segment(at, prompt))
            firsts.append(starts[unit[0]])
            at += prompt
        for row in unit:
            # An earlier episode of the unit has brought the shared prompt.
            skipped = prompt if shared else 0
            if length := lengths[row] - skipped:
                order.append(row)
                prompt_places.append(prompt_at)
                rest_places.append(at + prompt - skipped)
                segments.append(Segment(at, length, prompt_at, prompt) if shared else Segment(at, length))
                firsts.append(starts[row] + skipped)
                at += length
    own = np.array(firsts, dtype=np.int64)
    sizes = np.array([segment.length for segment in segments], dtype=np.int64)
    skips = np.array([segment.prefix_length for segment in segments], dtype=np.int64)
    rows = np.array(order, dtype=np.int64)
    everything = _ranges(tokens.starts[rows], tokens.lengths[rows])
    chosen = tokens.sampled[everything]
    count = tokens.lengths[rows]
    places = _ranges(np.zeros_like(count), count)[chosen]

    def each(values: Sequence[int] | Index) -> Index:
        """One value per episode, for each of its targets."""
        return np.repeat(np.asarray(values, dtype=np.int64), count)[chosen]

    # The first token after the prompt is predicted by the prompt's last one.
    before, prompt_lengths = places - 1, each(tokens.prompts[rows])
    return Pack(
        tokens.ids[_ranges(own, sizes)].astype(np.int64),
        _ranges(skips, sizes),
        tuple(segments),
        sources=np.where(
            before < prompt_lengths, each(prompt_places) + before, each(rest_places) + before - prompt_lengths
        ),
        targets=tokens.ids[everything[chosen]].astype(np.int64),
        rows=each(rows),
        places=places,
    )
