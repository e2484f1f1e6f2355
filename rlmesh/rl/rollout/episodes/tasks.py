"""`EpisodeTask`: one episode that is to be played, as it travels to the member that plays it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlmesh.rl.engines.rollout import SamplingParams
from rlmesh.rl.types import Ids

__all__ = ["EpisodeTask"]

SEEDS = 1 << 31


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeTask:
    """An episode to play.

    Attributes:
        number: of the episode within its step, for errors.
        prompt: ``[tokens]``, the ids of the row's prompt.
        row: of the data set.
        seed: of the episode; None: different turns each time.
    """

    number: int
    prompt: Ids
    row: Mapping[str, Any]
    seed: int | None = None

    @property
    def name(self) -> str:
        """The name of the episode in errors."""
        return f"episode {self.number}"

    def params(self, params: SamplingParams, turn: int, max_tokens: int) -> SamplingParams:
        """The parameters of a turn: its seed is made of the episode's and the number of the turn, from 0 on, whichever
        engine samples it."""
        seed = None if self.seed is None else (self.seed * 8209 + turn) % SEEDS
        return replace(params, seed=seed, max_tokens=min(params.max_tokens, max_tokens))
