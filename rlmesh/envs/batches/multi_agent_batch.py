"""`MultiAgentBatch`: one sample batch per policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rlmesh.envs.batches.sample_batch import SampleBatch
from rlmesh.errors import UsageError

__all__ = ["MultiAgentBatch"]


class MultiAgentBatch:
    """The sample batches of several policies, from the same steps of environments.

    Args:
        policy_batches: a batch for each policy, by the policy's id.
        env_steps: number of steps of environments, in each of which several agents may have acted.
    """

    def __init__(self, policy_batches: Mapping[str, SampleBatch], env_steps: int) -> None:
        for policy_id, batch in policy_batches.items():
            if not isinstance(batch, SampleBatch):
                raise UsageError(f"MultiAgentBatch: {policy_id!r} has a SampleBatch, not {type(batch).__name__}")
        if env_steps < 0:
            raise UsageError(f"MultiAgentBatch(env_steps={env_steps}): a number of steps is not negative")
        self.policy_batches: dict[str, SampleBatch] = dict(policy_batches)
        self.count = int(env_steps)

    def __getitem__(self, policy_id: str) -> SampleBatch:
        try:
            return self.policy_batches[policy_id]
        except KeyError:
            known = ", ".join(self.policy_batches)
            raise KeyError(f"the batch has no policy {policy_id!r}; it has {known}") from None

    def __len__(self) -> int:
        """Number of steps of environments."""
        return self.count

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MultiAgentBatch):
            return NotImplemented
        return self.count == other.count and self.policy_batches == other.policy_batches

    __hash__ = None  # type: ignore[assignment]

    def env_steps(self) -> int:
        """Number of steps of environments."""
        return self.count

    def agent_steps(self) -> int:
        """Number of steps of agents: the rows of all policies."""
        return sum(len(batch) for batch in self.policy_batches.values())

    @property
    def size_bytes(self) -> int:
        """Size of all columns in bytes."""
        return sum(batch.size_bytes for batch in self.policy_batches.values())

    def copy(self) -> MultiAgentBatch:
        """The same rows in memory of their own."""
        return MultiAgentBatch({key: batch.copy() for key, batch in self.policy_batches.items()}, self.count)

    def as_multi_agent(self) -> MultiAgentBatch:
        """This batch itself."""
        return self

    @staticmethod
    def wrap_as_needed(batches: Mapping[str, SampleBatch], env_steps: int) -> SampleBatch | MultiAgentBatch:
        """The plain batch if ``default_policy`` is the only policy, else a `MultiAgentBatch`."""
        if len(batches) == 1 and "default_policy" in batches:
            return batches["default_policy"]
        return MultiAgentBatch(batches, env_steps)

    @staticmethod
    def concat_samples(batches: Iterable[SampleBatch | MultiAgentBatch]) -> MultiAgentBatch:
        """Join batches policy by policy; a plain batch counts as that of ``default_policy``.

        Raises:
            UsageError: there are no batches, or the columns of one policy differ.
        """
        given: list[Any] = [batch.as_multi_agent() for batch in batches]
        if not given:
            raise UsageError("concat_samples: there is no batch to join")
        parts: dict[str, list[SampleBatch]] = {}
        for batch in given:
            for policy_id, part in batch.policy_batches.items():
                parts.setdefault(policy_id, []).append(part)
        joined = {policy_id: SampleBatch.concat_samples(each) for policy_id, each in parts.items()}
        return MultiAgentBatch(joined, sum(batch.count for batch in given))

    def __repr__(self) -> str:
        return f"MultiAgentBatch({self.policy_batches!r}, env_steps={self.count})"
