"""`PromptLoader`: the prompts of a step, as a function of step, seed and data alone.

Nothing has to be saved to resume exactly: the position in the data follows from the number of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlmesh.errors import UsageError
from rlmesh.rl.data.dataset import Prompt

__all__ = ["Drawn", "Mixture", "PromptLoader", "Prompts", "order"]


class Prompts(Protocol):
    """A sequence of prompts: a `RLHFDataset`, a `Mixture`, or a class of your own."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Prompt: ...


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """A prompt with its place in the run.

    Attributes:
        key: (epoch, index in the data): unique within a run.
        prompt: the prompt.
    """

    key: tuple[int, int]
    prompt: Prompt


@lru_cache(maxsize=8)
def order(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    """The order of the prompts in an epoch, ``[count]``: a permutation that seed and epoch determine."""
    return np.random.default_rng([seed, epoch]).permutation(count)


class PromptLoader:
    """Batches of prompts.

    Epochs follow each other without a gap: a batch may take the end of one epoch and the beginning of the next, so that
    all batches have the same size and each prompt occurs exactly once per epoch.

    Args:
        data: the prompts.
        batch_size: prompts per step.
        seed: of the order.
        shuffle: False keeps the order of the data.

    Raises:
        UsageError: there are fewer prompts than a batch has, or the batch size is below 1.
    """

    def __init__(self, data: Prompts, batch_size: int, *, seed: int = 0, shuffle: bool = True) -> None:
        if batch_size < 1:
            raise UsageError(f"batch_size={batch_size} must be ≥ 1")
        if len(data) < batch_size:
            raise UsageError(
                f"{len(data)} prompts are too few for a batch of {batch_size}: a step would take one twice. Give more "
                "data, or a smaller batch_size"
            )
        self.data, self.batch_size, self.seed, self.shuffle = data, batch_size, seed, shuffle

    def batch(self, step: int) -> list[Drawn]:
        """The prompts of a step.

        Args:
            step: from 0 on.
        """
        start = step * self.batch_size
        return [self.draw(position) for position in range(start, start + self.batch_size)]

    def draw(self, position: int) -> Drawn:
        """The prompt at a position of the endless sequence of epochs."""
        epoch, place = divmod(position, len(self.data))
        index = int(order(self.seed, epoch, len(self.data))[place]) if self.shuffle else place
        return Drawn((epoch, index), self.data[index])

    def steps_of(self, epochs: int) -> int:
        """The number of steps after which ``epochs`` epochs are complete."""
        return -(-epochs * len(self.data) // self.batch_size)


class Mixture:
    """Several data sets as one, mixed by weight.

    The mixture has as many prompts as the data sets allow in these proportions without repetition: the data set that is
    smallest for its weight is used whole, of the others a subset that ``seed`` determines.

    Args:
        data: the data sets.
        weights: of each, > 0; ``None``: all prompts, each once.
        seed: determines which prompts of a larger set are taken.

    Raises:
        UsageError: no data set, or another number of weights, or one that is not positive.
    """

    def __init__(self, data: Sequence[Prompts], weights: Sequence[float] | None = None, *, seed: int = 0) -> None:
        if not data:
            raise UsageError("a mixture needs at least one data set")
        shares = [float(len(one)) for one in data] if weights is None else [float(weight) for weight in weights]
        if len(shares) != len(data) or min(shares) <= 0:
            raise UsageError(f"{len(data)} data sets need as many weights > 0, got {weights}")
        scarcest = min(len(one) / share for one, share in zip(data, shares, strict=True))
        self._data = list(data)
        self._taken = [
            np.random.default_rng([seed, place]).permutation(len(one))[: max(1, int(scarcest * share + 1e-9))]
            for place, (one, share) in enumerate(zip(data, shares, strict=True))
        ]
        self._ends = list(accumulate(map(len, self._taken)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)}")
        place = next(place for place, end in enumerate(self._ends) if index < end)
        before = self._ends[place - 1] if place else 0
        return self._data[place][int(self._taken[place][index - before])]
