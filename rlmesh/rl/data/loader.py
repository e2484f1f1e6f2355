"""`PromptLoader`: the prompts of a step, as a function of step, seed and data alone.

Nothing has to be saved to resume exactly: the position in the data follows from the number of the step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlmesh.errors import UsageError
from rlmesh.rl.data.dataset import Counts, Prompt, RLHFDataset

__all__ = ["Drawn", "Mixture", "PromptLoader", "Prompts", "load_prompts", "order"]


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
        seed: seed of the order.
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
        return Drawn((epoch, index), self.prompt((epoch, index)))

    def prompt(self, key: tuple[int, ...]) -> Prompt:
        """The prompt of a `Drawn.key`, as the data have it."""
        epoch, index = key
        in_epoch = getattr(self.data, "in_epoch", None)
        found: Prompt = in_epoch(epoch, index) if in_epoch else self.data[index]
        return found

    def position(self, steps: int) -> dict[str, int]:
        """The place of a run in its data after a number of steps: seed, epoch, index of the next prompt in the epoch's
        order, and the number of prompts of an epoch."""
        epoch, index = divmod(steps * self.batch_size, len(self.data))
        return {"seed": self.seed, "epoch": epoch, "index": index, "prompts": len(self.data)}

    def steps_of(self, epochs: int) -> int:
        """The number of steps after which ``epochs`` epochs are complete."""
        return -(-epochs * len(self.data) // self.batch_size)


class Mixture:
    """Several data sets as one, mixed by weight.

    The data set with the fewest prompts for its weight sets the size of an epoch: each epoch uses all of it, and a part
    of each other set, in proportion to the weights, rounded to whole prompts. The next epoch goes on with the next
    part; a set is shuffled anew once all of its prompts were used. Which prompts an epoch has depends on ``seed`` and
    the epoch only.

    Args:
        data: the data sets.
        weights: the weight of each set, > 0; ``None``: all prompts, each once per epoch.
        seed: determines which prompts of a larger set an epoch has.

    Attributes:
        counts: rows read, left out and left, of all data sets together.
        prompts_rounded_down: the number of prompts of an epoch in earlier versions, which rounded the parts down.

    Raises:
        UsageError: there is no data set, there is not one positive weight for each, or a weight gives its set less than
            one prompt in an epoch.
    """

    def __init__(self, data: Sequence[Prompts], weights: Sequence[float] | None = None, *, seed: int = 0) -> None:
        if not data:
            raise UsageError("a mixture needs at least one data set")
        shares = [float(len(one)) for one in data] if weights is None else [float(weight) for weight in weights]
        if len(shares) != len(data) or not all(0 < share < float("inf") for share in shares):
            raise UsageError(f"{len(data)} data sets need as many weights > 0, got {weights}")
        scarcest = min(len(one) / share for one, share in zip(data, shares, strict=True))
        parts = [scarcest * share for share in shares]
        for place, part in enumerate(parts):
            if part < 1 - 1e-9:
                raise UsageError(
                    f"the weights {shares} of {len(data)} data sets of {[len(one) for one in data]} prompts give data "
                    f"set {place} {part:.2g} prompts in an epoch of {sum(parts):.0f}, and it would have one, so its "
                    f"share would be {1 / part:.3g} times as large as its weight says: give it a larger weight, or "
                    "leave it out"
                )
        self._data, self._seed = list(data), seed
        self._parts = [int(part + 0.5) for part in parts]
        self._ends = list(accumulate(self._parts))
        self.prompts_rounded_down = sum(int(part + 1e-9) for part in parts)
        each = [counts for one in data if isinstance(counts := getattr(one, "counts", None), Counts)]
        self.counts = Counts(*(sum(getattr(one, field.name) for one in each) for field in fields(Counts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Prompt:
        return self.in_epoch(0, index)

    def in_epoch(self, epoch: int, index: int) -> Prompt:
        """A prompt of an epoch.

        Raises:
            IndexError: there is none of this index.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)}")
        place = bisect_right(self._ends, index)
        part, data = self._parts[place], self._data[place]
        position = epoch * part + index - (self._ends[place] - part)
        turn, at = divmod(position, len(data))
        return data[int(_order_of(self._seed, place, turn, len(data))[at])]


@lru_cache(maxsize=64)
def _order_of(seed: int, place: int, turn: int, count: int) -> NDArray[np.int64]:
    """The order in which a mixture uses the prompts of one of its data sets."""
    return np.random.default_rng([seed, place, turn]).permutation(count)


def load_prompts(data: Any, tokenizer: Any, *, seed: int = 0, **options: Any) -> RLHFDataset | Mixture:
    """A data set, or a mixture of several.

    Args:
        data: see `RLHFDataset`; or a mapping of files or folders to their weights, such as
            ``{"data/gsm8k/train.parquet": 3, "data/math/train.parquet": 1}``.
        tokenizer: of transformers.
        seed: seed of the mixture.
        options: further arguments of `RLHFDataset`.

    Raises:
        UsageError: see `RLHFDataset` and `Mixture`.
    """
    if not isinstance(data, Mapping):
        return RLHFDataset(data, tokenizer, **options)
    wrong = [weight for weight in data.values() if isinstance(weight, bool) or not isinstance(weight, (int, float))]
    if wrong or not data:
        raise UsageError(
            f"a mixture is a mapping of files to weights > 0, such as {{'data/train.parquet': 1}}; got {data!r:.200}"
        )
    return Mixture([RLHFDataset(files, tokenizer, **options) for files in data], list(data.values()), seed=seed)
