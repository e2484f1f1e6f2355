"""Values that a `Sampler` exchanges with engines and rewards: requests for groups, and verdicts on groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from rlmesh.rl.types import Episode

__all__ = ["Engines", "ErrorKind", "GroupRequest", "Verdict", "requests_of", "sample_seed", "sample_seeds"]

WORD = 1 << 32

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


def sample_seeds(seed: int, positions: Sequence[int], samples: int) -> list[tuple[int, ...]]:
    """`sample_seed` of all responses of groups, group by group, computed together."""
    if not 0 <= seed < WORD or max(positions, default=0) >= WORD:
        return [tuple(sample_seed(seed, position, number) for number in range(samples)) for position in positions]
    places = np.repeat(np.asarray(positions, np.uint32), samples)
    numbers = np.tile(np.arange(samples, dtype=np.uint32), len(positions))
    state = _first_state([np.full_like(places, seed), places, numbers]) >> np.uint32(1)
    return [tuple(row) for row in state.reshape(len(positions), samples).tolist()]


def _first_state(entropy: Sequence[NDArray[np.uint32]]) -> NDArray[np.uint32]:
    """``SeedSequence(words).generate_state(1)[0]`` for each column of at most four words of entropy.

    NumPy's documentation promises that the algorithm of `SeedSequence` does not change (O'Neill 2015, "Developing a
    seed_seq alternative").
    """
    factor, shift = 0x43B0D7E5, np.uint32(16)

    def hashed(words: NDArray[np.uint32], multiplier: int = 0x931E8875) -> NDArray[np.uint32]:
        nonlocal factor
        words = words ^ np.uint32(factor)
        factor = factor * multiplier % WORD
        words = words * np.uint32(factor)
        return words ^ (words >> shift)

    nothing = np.zeros_like(entropy[0])
    pool = [hashed(words) for words in [*entropy, *[nothing] * 4][:4]]
    for source in range(4):
        for target in range(4):
            if source != target:
                mixed = pool[target] * np.uint32(0xCA01F9DD) - hashed(pool[source]) * np.uint32(0x4973F715)
                pool[target] = mixed ^ (mixed >> shift)
    factor = 0x8B51F9DD
    return hashed(pool[0], 0x58F38DED)


def requests_of(prompts: Sequence[list[int]], seed: int) -> list[GroupRequest]:
    """A request for one response per prompt. Its seed depends on the prompt's index, not on the number of engines."""
    seeds = sample_seeds(seed, range(len(prompts)), 1)
    return [GroupRequest(place, prompt, own) for place, (prompt, own) in enumerate(zip(prompts, seeds, strict=True))]
