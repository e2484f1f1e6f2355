"""Values that a `Sampler` exchanges with engines and rewards: requests for groups, and verdicts on groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from rlmesh.rl.types import Episode

__all__ = ["Engines", "ErrorKind", "GroupRequest", "Verdict", "requests_of", "sample_seed"]

ErrorKind = Literal["crashed", "died", "no weights", "error"]
"""Kinds of errors of a request. ``crashed``: the engine's process ended by itself, or the kernel killed it for lack of
memory. ``died``: the process ended for another reason, such as a signal from outside or the loss of its node. ``no
weights``: the request did not begin, since the engine has no weights or is restarting. ``error``: anything else."""


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A request for the responses of one group.

    Attributes:
        position: position of the group's slot.
        prompt: token ids.
        seeds: a seed per response, which depends on the run's seed and the position only (`sample_seed`).
        row: the row of the data set, for episodes of several turns.
    """

    position: int
    prompt: list[int]
    seeds: tuple[int, ...]
    row: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision on a scored group.

    Attributes:
        state: ``kept``: the group is trained; ``dropped``: all its rewards are equal; ``failed``: it has no reward;
            ``died``: the process of a scorer died.
        reason: the reason, for people.
    """

    state: Literal["kept", "dropped", "failed", "died"]
    reason: str = ""


class Engines(Protocol):
    """The interface of engines for a `Sampler`. Objects that play episodes with engines implement it too."""

    def ranks(self) -> Sequence[int]:
        """The ranks of the engines that got the last push, as far as is known."""
        ...

    def returned(self) -> bool:
        """True if engines are back that lack these weights, and can get them."""
        ...

    def ask(self, rank: int, requests: Sequence[GroupRequest]) -> Future[Any]:
        """Start to sample on an engine; returns a future with the argument of `episodes`. ``cancel()`` gives the
        requests up."""
        ...

    def episodes(self, result: Any) -> list[list[Episode]]:
        """The episodes of each request."""
        ...

    def progress(self) -> dict[int, int]:
        """A counter per rank that changes while an engine samples, also within a request. Engines that have none are
        left out."""
        ...

    def kind_of(self, error: BaseException) -> ErrorKind:
        """The kind of an error of `ask`."""
        ...


def sample_seed(seed: int, position: int, sample: int) -> int:
    """The seed of a response, from 0 to 2³¹ - 1: a function of the run's seed, the position and the response's
    number."""
    return int(np.random.SeedSequence([seed, position, sample]).generate_state(1)[0]) >> 1


def requests_of(prompts: Sequence[list[int]], seed: int) -> list[GroupRequest]:
    """A request for one response per prompt. Its seed depends on the prompt's index, not on the number of engines."""
    return [GroupRequest(place, prompt, (sample_seed(seed, place, 0),)) for place, prompt in enumerate(prompts)]
