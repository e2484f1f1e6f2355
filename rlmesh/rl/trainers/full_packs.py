"""`fullest_pack`: the largest pack that a training step can have within a token budget."""

from __future__ import annotations

import numpy as np

from rlmesh.rl.packing import Pack, pack
from rlmesh.rl.types import Episode, Turn

__all__ = ["episode_of", "fullest_pack"]


def episode_of(prompt: int, response: int) -> Episode:
    """An episode of ``prompt`` and ``response`` tokens; all of them are token 0."""
    turn = Turn(
        np.zeros(response, np.int32),
        "policy",
        np.zeros(response, np.float32),
        version_spans=((0, 0, response),) if response else (),
    )
    return Episode((Turn.said(np.zeros(prompt, np.int32)), turn))


def fullest_pack(budget: int, prompt: int, response: int, samples: int, prompts: int) -> Pack:
    """The largest pack of episodes of full length, filled up to the budget by a shorter one.

    Args:
        budget: token limit; an episode that is longer has a pack of its own.
        prompt, response: tokens of the longest prompt, and of the longest response.
        samples: responses per prompt.
        prompts: prompts per batch.
    """
    wanted = min(prompts, budget // (prompt + response) + 1)
    episodes = [episode_of(prompt, response) for _ in range(wanted * samples)]
    groups = [number for number in range(wanted) for _ in range(samples)]
    (packs,) = pack(episodes, groups=groups, token_budget=budget).by_rank
    largest = max(packs, key=len)
    if (free := budget - len(largest)) < 2 or len(packs) == 1:
        return largest
    rows = sorted(set(largest.rows.tolist()))
    kept, named = [episodes[row] for row in rows], [groups[row] for row in rows]
    filler = episode_of(min(prompt, free // 2), free - min(prompt, free // 2))
    return pack([*kept, filler], groups=[*named, wanted], token_budget=budget).by_rank[0][0]
