"""Requests for groups, and what becomes of them: the values between a `Sampler` and engines, rewards and algorithm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from rlmesh.rl.types import Episode

__all__ = ["Engines", "ErrorKind", "GroupRequest", "Verdict", "requests_of", "sample_seed"]

ErrorKind = Literal["crashed", "died", "no weights", "error"]
"""Meanings of an error of a request. ``crashed``: the engine's process ended by itself, or the kernel ended it for lack
of memory. ``died``: the process is gone, perhaps by a signal from outside, or with its node. ``no weights``: the
request was not begun, since the engine has no weights or is being restarted. ``error``: anything else."""


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A request for the responses of one group.

    Attributes:
        position: of the group's slot.
        prompt: token ids.
        seeds: one per response; they depend on the run's seed and the position only (`sample_seed`).
        row: of the data set, for episodes of several turns.
    """

    position: int
    prompt: list[int]
    seeds: tuple[int, ...]
    row: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision on a scored group.

    Attributes:
        state: ``kept``: it is trained; ``dropped``: it teaches nothing; ``failed``: it has no reward; ``died``: the
            process of a scorer died.
        reason: for people.
    """

    state: Literal["kept", "dropped", "failed", "died"]
    reason: str = ""


class Engines(Protocol):
    """The engines, as a sampler sees them. Agents that sample through engines can take their place."""

    def ranks(self) -> Sequence[int]:
        """The ranks of the engines that got the weights pushed last, as far as is known."""
        ...

    def returned(self) -> bool:
        """True if engines are back that lack these weights, and can get them."""
        ...

    def ask(self, rank: int, requests: Sequence[GroupRequest]) -> Future[Any]:
        """Start to sample on one engine; the future has what `episodes` reads. ``cancel()`` gives the requests up."""
        ...

    def episodes(self, result: Any) -> list[list[Episode]]:
        """The episodes of each request."""
        ...

    def progress(self) -> dict[int, int]:
        """By rank, numbers that change while an engine samples, also within a request; without engines that cannot
        say it."""
        ...

    def kind_of(self, error: BaseException) -> ErrorKind:
        """The meaning of an error of `ask`."""
        ...


def sample_seed(seed: int, position: int, sample: int) -> int:
    """The seed of one response, from 0 to 2³¹ - 1: a function of the run's seed, the position and its number."""
    return int(np.random.SeedSequence([seed, position, sample]).generate_state(1)[0]) >> 1


def requests_of(prompts: Sequence[list[int]], seed: int) -> list[GroupRequest]:
    """A request for one response per prompt. Its seed depends on the prompt's place, and not on the number of engines
    that share the requests."""
    return [GroupRequest(place, prompt, (sample_seed(seed, place, 0),)) for place, prompt in enumerate(prompts)]
