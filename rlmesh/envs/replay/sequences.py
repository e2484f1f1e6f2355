"""A replay buffer that samples consecutive steps of episodes, for recurrent modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh.envs.replay.columns import nested
from rlmesh.envs.replay.uniform import ReplayBuffer
from rlmesh.errors import UsageError

__all__ = ["SequenceReplayBuffer"]


class SequenceReplayBuffer(ReplayBuffer):
    """Stored steps of episodes, sampled as sequences with the recurrent state at their first step.

    A sequence has ``burn_in + length`` steps: the first ``burn_in`` ones only warm the state up (Kapturowski et al.
    2019, "R2D2"), unless the sequence begins with its episode, where the state is exact. It ends early where its
    episode ends, and at the episode's newest step so far; the rest is zeros.

    Batches need ``eps_id``, ``t``, ``rewards``, ``terminateds`` and ``truncateds``; the steps of an episode may arrive
    in several batches.

    Args:
        capacity: number of steps.
        length: steps of a sequence from which a module learns.
        burn_in: steps before them.
        stride: sequences begin at steps whose ``t`` is a multiple of this number; 1 lets them begin anywhere.
        state_columns: columns with recurrent states, of which a sequence has only that of its first step.
        seed, ignored: as in `ReplayBuffer`.

    Raises:
        UsageError: a number is out of range.
    """

    _follows_episodes = True

    def __init__(
        self,
        capacity: int,
        *,
        length: int,
        burn_in: int = 0,
        stride: int = 1,
        state_columns: tuple[str, ...] = ("state_in",),
        seed: int | np.random.SeedSequence | None = None,
        ignored: tuple[str, ...] = ("infos", "state_out"),
    ) -> None:
        super().__init__(capacity, seed=seed, ignored=ignored)
        if length < 1 or burn_in < 0 or stride < 1:
            raise UsageError(
                f"SequenceReplayBuffer: length and stride must be at least 1 and burn_in at least 0, not {length}, "
                f"{stride} and {burn_in}"
            )
        self.length, self.burn_in, self.stride = length, burn_in, stride
        self.state_columns = state_columns
        self._starts = np.empty(self.capacity, np.int64)
        self._starts_added = self._starts_dropped = 0

    def _written(self, positions: NDArray[np.int64]) -> None:
        """Note which of the newest rows may begin a sequence, and forget those that were overwritten."""
        times = self._store.arrays[("t",)][positions]
        numbers = np.arange(self.added - len(positions), self.added)[times % self.stride == 0]
        self._drop_starts(len(positions))
        self._starts[(self._starts_added + np.arange(len(numbers))) % self.capacity] = numbers
        self._starts_added += len(numbers)

    def _drop_starts(self, overwritten: int) -> None:
        """Forget starts among the rows that were overwritten last; numbers of starts rise, so these come first."""
        end = min(self._starts_added, self._starts_dropped + overwritten)
        oldest = self._starts[np.arange(self._starts_dropped, end) % self.capacity]
        self._starts_dropped += int(np.searchsorted(oldest, self.oldest))

    def sample(self, count: int) -> dict[str, Any]:
        """``count`` sequences: columns [n, burn_in + length, …], and state columns [n, …] of their first steps.

        ``mask`` [n, burn_in + length] is true where there is a step, ``learn_mask`` where it is also behind the
        burn-in, or the sequence begins its episode. ``batch_indexes`` [n] has the number of each first step.

        Raises:
            UsageError: no stored step may begin a sequence.
        """
        self._fail_if_empty()
        drawn = self._random.integers(self._starts_dropped, self._starts_added, count)
        return self._sequences(self._starts[drawn % self.capacity])

    def _fail_if_empty(self) -> None:
        super()._fail_if_empty()
        if self._starts_added == self._starts_dropped:
            raise UsageError(
                f"{type(self).__name__}: none of the {len(self)} stored steps begins a sequence, since no t is a "
                f"multiple of stride={self.stride}; add more steps, or choose a smaller stride"
            )

    def _sequences(self, first: NDArray[np.int64]) -> dict[str, Any]:
        """The sequences that begin with the rows of these numbers."""
        assert self._links is not None
        rows, there = self._links.walk(first, self.burn_in + self.length, self.oldest)
        flat = self._store.read(rows % self.capacity, tuple(self._names - set(self.state_columns)))
        for array in flat.values():
            array[~there] = 0
        flat.update(self._store.read(first % self.capacity, self.state_columns))
        learn = there.copy()
        learn[:, : self.burn_in] &= self._store.arrays[("t",)][first % self.capacity][:, None] == 0
        return {**nested(flat), "mask": there, "learn_mask": learn, "batch_indexes": first}

    @property
    def _names(self) -> set[str]:
        return {str(place[0]) for place in self._store.arrays}

    def _restored(self, state: Mapping[str, Any], kept: int) -> None:
        self._starts_added = self._starts_dropped = 0
        if kept:
            self._written(np.arange(self.oldest, self.added) % self.capacity)
