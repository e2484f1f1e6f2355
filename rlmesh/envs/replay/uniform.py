"""A replay buffer that samples transitions uniformly, with returns of n steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh.envs.replay.columns import Columns, ColumnStore, Leaf, leaves, nested, spoken
from rlmesh.envs.replay.links import EpisodeLinks
from rlmesh.errors import UsageError

__all__ = ["ReplayBuffer"]

FORMAT = 1
OF_THE_LAST_STEP = ("new_obs", "terminateds", "truncateds", "dones", "state_out")
"""Columns that a transition of n steps takes from its last step; the others come from its first one."""


class ReplayBuffer:
    """The last ``capacity`` transitions; `sample` draws from them uniformly, with replacement.

    Rows are copied when they are added. The newest rows overwrite the oldest ones.

    With ``n_step`` above 1, a sampled transition spans up to n steps of its episode (Sutton and Barto 2018, section
    7.1): ``rewards`` is r_0 + γ r_1 + … + γ^(k-1) r_(k-1), ``new_obs``, ``terminateds`` and ``truncateds`` are those of
    its last step, and the column ``n_steps`` has k. So its target is ``rewards + γ^n_steps · V(new_obs)``, the last
    term only where it is not terminated. k is below n where the episode ends, and at its newest step so far. Batches
    then need the columns ``eps_id`` and ``t``; the steps of an episode may arrive in several batches.

    Args:
        capacity: number of transitions.
        seed: seed of the draws; without one they differ from run to run.
        n_step: steps of a sampled transition.
        gamma: discount γ of rewards within a transition.
        ignored: columns that are not stored.

    Raises:
        UsageError: a number is out of range.
    """

    _follows_episodes = False

    def __init__(
        self,
        capacity: int,
        *,
        seed: int | np.random.SeedSequence | None = None,
        n_step: int = 1,
        gamma: float = 0.99,
        ignored: tuple[str, ...] = ("infos",),
    ) -> None:
        name = type(self).__name__
        if capacity < 1 or n_step < 1:
            raise UsageError(f"{name}: capacity and n_step must be at least 1, not {capacity} and {n_step}")
        if not 0 <= gamma <= 1:
            raise UsageError(f"{name}: gamma must be from 0 to 1, not {gamma}")
        self.capacity, self.n_step, self.gamma = int(capacity), int(n_step), float(gamma)
        self.added = 0
        """Number of transitions that were ever added."""
        self._base = 0  # Rows before this number were left out of a restored state.
        self._store = ColumnStore(self.capacity, ignored)
        self._random = np.random.default_rng(seed)
        self._links = EpisodeLinks(self.capacity) if n_step > 1 or self._follows_episodes else None

    def __len__(self) -> int:
        return min(self.added - self._base, self.capacity)

    @property
    def oldest(self) -> int:
        """Number of the oldest transition that is stored; transitions are numbered from 0 in order of arrival."""
        return self.added - len(self)

    def add(self, batch: Columns) -> None:
        """Copy the rows of a batch: arrays [n, …] by column; dict and tuple observations are dicts and tuples of them.

        Raises:
            UsageError: the columns do not fit each other, or those of the first batch; nothing is added then.
        """
        rows, count = self._store.checked(batch)
        ends = self._ends(rows) if self._links is not None else None
        for start in range(0, count, self.capacity):
            part = {place: array[start : start + self.capacity] for place, array in rows.items()}
            size = min(self.capacity, count - start)
            self._store.write(self.added % self.capacity, part, size)
            if self._links is not None and ends is not None:
                self._links.add(self.added, part[("eps_id",)], part[("t",)], ends[start : start + size])
            self.added += size
            self._written(np.arange(self.added - size, self.added) % self.capacity)

    def _written(self, positions: NDArray[np.int64]) -> None:
        """Called after rows were written."""

    def _ends(self, rows: Mapping[Leaf, NDArray[Any]]) -> NDArray[np.bool_]:
        wanted = ["eps_id", "t", "rewards", "terminateds", "truncateds"]
        if missing := [name for name in wanted if (name,) not in rows]:
            raise UsageError(
                f"{type(self).__name__}: the batch lacks the columns {missing}, which tell the steps of episodes "
                f"apart; it has {sorted(spoken(place) for place in rows)}"
            )
        ended: NDArray[np.bool_] = rows[("terminateds",)].astype(bool) | rows[("truncateds",)].astype(bool)
        return ended

    def sample(self, count: int) -> dict[str, Any]:
        """``count`` transitions as a batch, with their numbers in the column ``batch_indexes``.

        Raises:
            UsageError: the buffer is empty.
        """
        self._fail_if_empty()
        return self._batch(self._random.integers(self.oldest, self.added, count))

    def _fail_if_empty(self) -> None:
        if not len(self):
            raise UsageError(f"{type(self).__name__}: nothing to sample, the buffer is empty; add batches first")

    def _batch(self, numbers: NDArray[np.int64]) -> dict[str, Any]:
        positions = numbers % self.capacity
        flat = self._store.read(positions)
        if self.n_step > 1 and self._links is not None:
            flat.update(self._over_n_steps(self._links, numbers))
        return {**nested(flat), "batch_indexes": numbers}

    def _over_n_steps(self, links: EpisodeLinks, numbers: NDArray[np.int64]) -> dict[Leaf, NDArray[Any]]:
        path, there = links.walk(numbers, self.n_step, self.oldest)
        positions = path % self.capacity
        rewards = self._store.arrays[("rewards",)]
        discounts = self.gamma ** np.arange(self.n_step)
        shape = (1, self.n_step, *[1] * (rewards.ndim - 1))
        summed = np.sum(rewards[positions] * (discounts * there).reshape(-1, *shape[1:]), axis=1)
        return {
            **self._store.read(positions[:, -1], OF_THE_LAST_STEP),
            ("rewards",): summed.astype(rewards.dtype) if rewards.dtype.kind == "f" else summed,
            ("n_steps",): there.sum(axis=1),
        }

    def state(self) -> dict[str, Any]:
        """Everything that `restore` needs to go on exactly, as a copy: arrays, numbers, text and dicts."""
        order = np.arange(self.oldest, self.added) % self.capacity
        state = {
            "format": FORMAT,
            "kind": type(self).__name__,
            "added": self.added,
            "random": self._random.bit_generator.state,
            "columns": nested(self._store.read(order)),
        }
        if self._links is not None:
            state["links"] = self._links.state(self.oldest, self.added)
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Replace the content by a state of a buffer of the same class.

        A buffer with the capacity of the saved one goes on exactly as that one. Into a smaller buffer the newest
        transitions come.

        Raises:
            UsageError: the state is of another class or format, or lacks links between the steps of episodes.
        """
        name = type(self).__name__
        if state.get("kind") != name or state.get("format") != FORMAT:
            raise UsageError(
                f"{name}: cannot restore the state of {state.get('kind')!r}, format {state.get('format')!r}; "
                f"it must be of {name}, format {FORMAT}"
            )
        if self._links is not None and "links" not in state:
            raise UsageError(f"{name}: the state was saved with n_step=1, so it cannot be restored with n_step above 1")
        self.added = int(state["added"])
        saved = next((len(array) for _, array in leaves(state["columns"])), 0)
        kept = min(saved, self.capacity)
        self._base = self.added - kept
        self._store.arrays = {}
        if kept:
            rows = {place: array[saved - kept :] for place, array in leaves(state["columns"])}
            self._store.write((self.added - kept) % self.capacity, rows, kept)
        self._random.bit_generator.state = state["random"]
        if self._links is not None:
            self._links.restore(state["links"], self.added - kept, self.added)
        self._restored(state, kept)

    def _restored(self, state: Mapping[str, Any], kept: int) -> None:
        """Called after the newest ``kept`` rows were restored."""
