"""`SampleBuffer`: the groups between sampling and training. This is its smallest form: sampling happens on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from rlmesh.rl.data.loader import Drawn, PromptLoader
from rlmesh.rl.types import Group

__all__ = ["Buffer", "SampleBuffer"]

Sampler = Callable[[Sequence[Drawn], int], list[Group]]
"""(prompts, step) → one group per prompt, in order."""


class Buffer(Protocol):
    """The interface that every pipeline offers to the training loop."""

    def take(self, step: int) -> list[Group]:
        """The groups of a step, in the order of its prompts. They count as in use until `free` is called."""
        ...

    def free(self, step: int) -> None:
        """Report that the groups of a step are done with: trained on, dropped or failed."""
        ...


class SampleBuffer:
    """Samples a step's prompts when the step begins, so that nothing is ever stale.

    Args:
        loader: gives the prompts of each step.
        sample: makes groups of prompts.
    """

    def __init__(self, loader: PromptLoader, sample: Sampler) -> None:
        self._loader, self._sample = loader, sample
        self._taken: set[int] = set()

    def take(self, step: int) -> list[Group]:
        self._taken.add(step)
        return self._sample(self._loader.batch(step - 1), step)

    def free(self, step: int) -> None:
        self._taken.discard(step)

    @property
    def taken(self) -> frozenset[int]:
        """The steps whose groups are neither trained nor dropped."""
        return frozenset(self._taken)
