"""`CircularBuffer`: the last batches, each for a number of uses."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlmesh.envs.batches.multi_agent_batch import MultiAgentBatch
from rlmesh.envs.batches.sample_batch import SampleBatch
from rlmesh.errors import UsageError

__all__ = ["CircularBuffer"]


class CircularBuffer:
    """Whole batches, of which a random one is drawn; each is drawn at most ``uses`` times (Luo et al. 2020, 3.3).

    A batch that is added to a full buffer replaces the oldest one.

    Args:
        capacity: number of batches.
        uses: how often a batch may be drawn.
        seed: of the draws.
    """

    def __init__(self, capacity: int, uses: int, *, seed: int | None = None) -> None:
        for name, value in (("capacity", capacity), ("uses", uses)):
            if type(value) is not int or value < 1:
                raise UsageError(f"CircularBuffer({name}={value!r}): a whole number of at least 1")
        self.capacity, self.uses = capacity, uses
        self._rng = np.random.default_rng(seed)
        self._entries: list[tuple[Any, list[int], int]] = []  # batch, versions, uses that are left

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, batch: Any, versions: Sequence[int]) -> None:
        """Add a batch, and the numbers of the weights that sampled it."""
        self._entries = [*self._entries, (batch, list(versions), self.uses)][-self.capacity :]

    def sample(self) -> tuple[Any, list[int]]:
        """A random batch, and the numbers of the weights that sampled it.

        Raises:
            UsageError: all batches are used up.
        """
        if not self._entries:
            raise UsageError("CircularBuffer.sample: all batches are used up; add one")
        # Of batches with uses left for several draws, each use is as likely as any other one.
        ends = list(itertools.accumulate(uses for _, _, uses in self._entries))
        index = bisect.bisect_right(ends, self._rng.random() * ends[-1])
        batch, versions, uses = self._entries[index]
        if uses == 1:
            del self._entries[index]
        else:
            self._entries[index] = batch, versions, uses - 1
        return batch, versions

    def state(self) -> dict[str, Any]:
        """The batches and the generator, for a checkpoint."""
        entries = [
            {
                "policies": {name: dict(part) for name, part in batch.as_multi_agent().policy_batches.items()},
                "env_steps": batch.env_steps(), "versions": versions, "left": left,
                "one": isinstance(batch, SampleBatch),
            }
            for batch, versions, left in self._entries
        ]  # fmt: skip
        return {"entries": entries, "rng": self._rng.bit_generator.state}

    def restore(self, state: Mapping[str, Any], *, later: int = 0) -> None:
        """Replace the content by a state; the numbers of weights have become larger by ``later``."""
        self._entries = []
        for each in state["entries"]:
            parts = {name: SampleBatch(part) for name, part in each["policies"].items()}
            batch = next(iter(parts.values())) if each["one"] else MultiAgentBatch(parts, each["env_steps"])
            self._entries.append((batch, [number + later for number in each["versions"]], each["left"]))
        self._rng.bit_generator.state = state["rng"]
