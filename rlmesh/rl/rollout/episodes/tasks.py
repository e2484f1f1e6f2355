"""`EpisodeTask`: a request to play an episode, which is sent to a member."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlmesh.rl.engines.rollout import SamplingParams
from rlmesh.rl.rollout.requests import GroupRequest
from rlmesh.rl.types import Ids

__all__ = ["EpisodeTask"]

SEEDS = 1 << 31


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeTask:
    """An episode to play.

    Attributes:
        number: number of the episode, for errors.
        prompt: ``[tokens]``, the ids of the row's prompt.
        row: the row of the data set.
        seed: seed of the episode; None: the turns differ each time.
    """

    number: int
    prompt: Ids
    row: Mapping[str, Any]
    seed: int | None = None

    @classmethod
    def of(cls, request: GroupRequest) -> list[EpisodeTask]:
        """The episodes of a group. Their numbers are unique in the run."""
        prompt, first = np.asarray(request.prompt, np.int32), request.position * len(request.seeds)
        return [cls(first + place, prompt, request.row, seed) for place, seed in enumerate(request.seeds)]

    @property
    def name(self) -> str:
        """The name of the episode in errors."""
        return f"episode {self.number}"

    def params(self, params: SamplingParams, turn: int, max_tokens: int) -> SamplingParams:
        """The parameters of a turn. Its seed is derived from the episode's seed and the number of the turn (from 0 on),
        so it does not depend on the engine."""
        seed = None if self.seed is None else (self.seed * 8209 + turn) % SEEDS
        return replace(params, seed=seed, max_tokens=min(params.max_tokens, max_tokens))
