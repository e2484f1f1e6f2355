"""Links from each stored step to the next step of its episode."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["NO_ROW", "EpisodeLinks"]

NO_ROW = -1


class EpisodeLinks:
    """For each row of a ring, the number of the row with the next step of the same episode, or ``NO_ROW``.

    Rows are numbered from 0 in the order in which they were added; row n lies at position n % capacity. A link may
    outlive the row that it leads to, if steps were not added in the order of time.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.next = np.full(capacity, NO_ROW, np.int64)
        self.tails: dict[Any, tuple[int, int]] = {}
        """Row and time of the newest step of each episode that has not ended."""
        self._prune_at = 1024

    def add(self, first: int, episodes: NDArray[Any], times: NDArray[Any], ended: NDArray[np.bool_]) -> None:
        """Link new rows: row ``first + i`` is step ``times[i]`` of episode ``episodes[i]``, and its last one if ended.

        The steps of an episode may stand anywhere among the rows, and may continue rows that were added before.
        """
        count, capacity = len(episodes), self.capacity
        if not count:
            return
        numbers = first + np.arange(count)
        self.next[numbers % capacity] = NO_ROW
        order = np.lexsort((times, episodes))
        episodes, times, ended, numbers = episodes[order], times[order], ended[order], numbers[order]
        same = episodes[1:] == episodes[:-1]
        linked = np.flatnonzero(same & (times[1:] == times[:-1] + 1) & ~ended[:-1])
        self.next[numbers[linked] % capacity] = numbers[linked + 1]
        starts = np.concatenate(([0], np.flatnonzero(~same) + 1))
        ends = np.append(starts[1:], count) - 1
        for start, end in zip(starts, ends, strict=True):
            episode = episodes[start].item()
            tail = self.tails.pop(episode, None)
            if tail is not None and tail[1] + 1 == times[start] and tail[0] >= first + count - capacity:
                self.next[tail[0] % capacity] = numbers[start]
            if not ended[end]:
                self.tails[episode] = (int(numbers[end]), int(times[end]))
        if len(self.tails) > self._prune_at:  # episodes that were cut, for example by a runner's death
            self.tails = {key: tail for key, tail in self.tails.items() if tail[0] >= first + count - capacity}
            self._prune_at = max(1024, 2 * len(self.tails))

    def walk(self, rows: NDArray[np.int64], steps: int, oldest: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Row numbers [n, steps] of consecutive steps from ``rows`` on, and where they exist; elsewhere the last one
        is repeated. Rows before ``oldest`` are overwritten, so they do not exist.
        """
        found = np.repeat(rows[:, None], steps, axis=1)
        there = np.ones(found.shape, np.bool_)
        for step in range(1, steps):
            following = self.next[found[:, step - 1] % self.capacity]
            there[:, step] = there[:, step - 1] & (following >= oldest)
            found[:, step] = np.where(there[:, step], following, found[:, step - 1])
        return found, there

    def state(self, oldest: int, added: int) -> dict[str, Any]:
        """The links of rows ``oldest`` to ``added - 1``, and the open episodes."""
        return {"next": self.next[np.arange(oldest, added) % self.capacity], "tails": dict(self.tails)}

    def restore(self, state: dict[str, Any], oldest: int, added: int) -> None:
        """Take over the newest rows of a state; rows before ``oldest`` are left out."""
        self.next[:] = NO_ROW
        kept = np.asarray(state["next"])[len(state["next"]) - (added - oldest) :]
        self.next[np.arange(oldest, added) % self.capacity] = kept
        self.tails = {key: (int(row), int(time)) for key, (row, time) in state["tails"].items() if row >= oldest}
