"""Converts between the roles' packs and tensors of the whole batch, and divides a step among the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from rlmesh.rl.algorithms.protocol import Evaluated, Normalisers, TokenWeights
from rlmesh.rl.components import Columns
from rlmesh.rl.engines.training.packed import EMPTY
from rlmesh.rl.packing import Pack, Packs, Tokens, pack, same_prompts
from rlmesh.rl.roles.trained import Share
from rlmesh.rl.types import Episode, Group, Outcome, Score

__all__ = [
    "advantages_of",
    "evaluated_of",
    "joined",
    "lengths_of",
    "matrix_of",
    "pack_metrics",
    "packs_of",
    "parts_of",
    "shares_of",
    "value_metrics",
    "values_of",
]

LIMITS = ("length", "time", "max_turns")
"""The reasons of episodes that a limit has ended."""


def packs_of(
    episodes: Sequence[Episode], groups: Sequence[int], *, minibatches: int, token_budget: int, ranks: int
) -> list[Packs]:
    """The packs of each optimizer step of a pass over a batch.

    Args:
        episodes: the episodes of the batch; those of a group follow each other.
        groups: ``[episodes]``, the number of each episode's group, from 0 on.
        minibatches: number of optimizer steps; groups are divided among them in order.
        token_budget, ranks: see :func:`rlmesh.rl.packing.pack`.
    """
    count = max(groups, default=-1) + 1
    edges = np.searchsorted(groups, [count * number // minibatches for number in range(minibatches + 1)])
    found = []
    for start, end in pairwise(edges.tolist()):
        part = episodes[start:end]
        own = pack(part, groups=same_prompts(part, groups[start:end]), token_budget=token_budget, ranks=ranks)
        moved = (tuple(replace(one, rows=one.rows + start) for one in by_rank) for by_rank in own.by_rank)
        found.append(replace(own, by_rank=tuple(moved)))
    return found


def parts_of(packs: Packs, members: int) -> list[list[Pack]]:
    """The packs of each member: the packs of its rank or, if they were made for another number of ranks, an equal
    part."""
    if len(packs.by_rank) == members:
        return [list(own) for own in packs.by_rank]
    flat = [one for own in packs.by_rank for one in own]
    edges = [len(flat) * number // members for number in range(members + 1)]
    return [flat[start:end] for start, end in pairwise(edges)]


def joined(parts: Sequence[Packs]) -> Packs:
    """The packs of several optimizer steps as one."""
    by_rank = tuple(tuple(one for own in each for one in own) for each in zip(*(p.by_rank for p in parts), strict=True))
    return Packs(by_rank, sum(part.episode_tokens for part in parts))


def pack_metrics(parts: Sequence[Packs], token_budget: int) -> dict[str, float]:
    """Metrics of the passes over a batch.

    ``packs/passes``: forward and backward passes of a rank over the batch; ``packs/tokens``: mean tokens of a pass;
    ``packs/fill``: their share of the budget; ``packs/ranks_wait``: the share of the ranks' time in which they wait for
    the rank with the most tokens, if time grows with tokens; ``prompt_tokens_saved``: see `Packs.saved_share`.
    """
    sizes = [[[len(one) for one in own] for own in part.by_rank] for part in parts]
    full = [size for part in sizes for own in part for size in own if size]
    largest = [max(map(sum, part)) for part in sizes]
    ranks = len(parts[0].by_rank)
    mean = float(np.mean(full)) if full else 0.0
    return {
        "packs/passes": float(sum(max(map(len, part)) for part in sizes)),
        "packs/tokens": mean,
        "packs/fill": mean / token_budget,
        "packs/ranks_wait": 1 - sum(part.tokens for part in parts) / (ranks * sum(largest)) if sum(largest) else 0.0,
        "prompt_tokens_saved": joined(parts).saved_share,
    }


def matrix_of(mask: torch.Tensor, packs: Packs, rows: Sequence[np.ndarray[Any, Any]]) -> torch.Tensor:
    """Values per target of packs as ``[episodes, time]``, float64, 0 elsewhere.

    Args:
        mask: ``[episodes, time]``.
        packs: the packs of the whole batch.
        rows: the values, ``[targets]`` for each pack, rank by rank.
    """
    found = torch.zeros(mask.shape, dtype=torch.float64)
    flat = [one for own in packs.by_rank for one in own]
    for one, numbers in zip(flat, rows, strict=True):
        found[torch.from_numpy(one.rows), torch.from_numpy(one.places)] = torch.from_numpy(numbers).double()
    return found


def values_of(outcomes: Sequence[Outcome]) -> torch.Tensor:
    """The scores ``[outcomes]``, float64; 0 where an outcome is no score."""
    return torch.tensor([one.value if isinstance(one, Score) else 0.0 for one in outcomes], dtype=torch.float64)


def shares_of(packs: Packs, batch: Evaluated, weights: TokenWeights, *, minibatches: int = 1) -> list[Share]:
    """The share of each rank in an optimizer step.

    Each of the ``minibatches`` optimizer steps has packs of its own; the mean of their losses is the loss of the whole
    batch.

    Args:
        packs: the packs of the step.
        batch, weights: the whole batch, and its weights.
        minibatches: number of optimizer steps in a pass over the batch.
    """
    tokens = float((weights.policy > 0).sum()) / minibatches
    normalisers = Normalisers(*(divisor / minibatches for divisor in weights.normalisers))
    return [
        Share(
            tuple(own),
            tuple(Columns.of(one, batch, weights, "cpu", torch.float32) for one in own),
            Columns.of(EMPTY, batch, weights, "cpu", torch.float32),
            normalisers,
            tokens,
        )
        for own in packs.by_rank
    ]


def value_metrics(batch: Evaluated, weights: TokenWeights) -> dict[str, float]:
    """The explained variance of a critic's values as a metric; empty without a critic.

    It is ``1 − Var(R − V) / Var(R)`` over the tokens that count: 1 for exact values, 0 for a constant, and below 0 for
    values that are worse than a constant.
    """
    if batch.values is None or weights.returns is None:
        return {}
    values, returns = batch.values[batch.usable], weights.returns[batch.usable]
    spread = float(returns.var(correction=0))
    left = float((returns - values).var(correction=0))
    found = {"critic/value_mean": float(values.mean()), "critic/return_mean": float(returns.mean())}
    return found | ({"critic/explained_variance": 1 - left / spread} if spread else {})


def evaluated_of(
    episodes: Sequence[Episode], tokens: Tokens, numbers: Sequence[int], totals: Sequence[Outcome],
    greedy: Sequence[Outcome] | None, found: dict[str, torch.Tensor], version: int,
) -> Evaluated:  # fmt: skip
    """The batch in the form that an algorithm takes.

    Args:
        episodes, tokens: the episodes of the batch, and their tokens.
        numbers: the number of each episode's group.
        totals: the combined outcome of each episode's rewards.
        greedy: for each group, the outcome of a greedy response.
        found: columns that the roles computed.
        version: version of the weights in training.
    """
    return Evaluated(
        mask=torch.from_numpy(tokens.mask),
        groups=torch.tensor(numbers),
        rewards=values_of(totals),
        valid=torch.tensor(
            [
                isinstance(one, Score) and (greedy is None or isinstance(greedy[number], Score))
                for one, number in zip(totals, numbers, strict=True)
            ]
        ),
        sampled_log_probs=torch.from_numpy(tokens.sampled_log_probs),
        greedy_rewards=None if greedy is None else values_of([greedy[number] for number in numbers]),
        cut_off=torch.tensor([episode.finish_reason in LIMITS for episode in episodes]),
        current=torch.tensor([episode.sampled_by(version) for episode in episodes]),
        **{"log_probs": None, **found},
    )


def advantages_of(groups: Sequence[Group], batch: Evaluated, weights: TokenWeights) -> dict[int, float]:
    """The mean advantage over the sampled tokens, by ``id(episode)``, for the episodes of a batch that have a reward.

    Args:
        groups: the groups of the batch.
    """
    means = (weights.advantages * batch.mask).sum(1) / batch.lengths.clamp(min=1)
    episodes = zip(Group.episodes_of(groups), means.tolist(), batch.valid.tolist(), strict=True)
    return {id(episode): mean for episode, mean, valid in episodes if valid}


def lengths_of(groups: Sequence[Group]) -> dict[str, float]:
    """The mean length of responses, and the share that a limit cut off."""
    episodes = Group.episodes_of(groups)
    return {
        "response_tokens": float(np.mean([episode.response_tokens for episode in episodes])),
        "cut_off_share": float(np.mean([episode.finish_reason in LIMITS for episode in episodes])),
    }
