"""One replay buffer per policy of a multi-agent environment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rlmesh.envs.replay.uniform import ReplayBuffer
from rlmesh.errors import UsageError

__all__ = ["MultiAgentReplayBuffer"]


class MultiAgentReplayBuffer:
    """Replay buffers by policy, made when the first batch of a policy arrives; each is sampled independently.

    Args:
        kind: class of the buffers.
        capacity: capacity of each buffer, in transitions of its policy.
        seed: seed from which each policy's own seed is derived, whatever the order in which policies arrive.
        by_policy: further arguments of the buffers of some policies.
        options: further arguments of each buffer.
    """

    def __init__(
        self, kind: type[ReplayBuffer] = ReplayBuffer, *, capacity: int, seed: int | None = None,
        by_policy: Mapping[str, Mapping[str, Any]] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.buffers: dict[str, ReplayBuffer] = {}
        self._kind, self._seed, self._options = kind, seed, {"capacity": capacity, **options}
        self._by_policy = dict(by_policy or {})
        for more in self._by_policy.values() or [{}]:
            kind(**self._options, **more)  # Wrong arguments are refused here, not at the first batch.

    def __len__(self) -> int:
        return sum(map(len, self.buffers.values()))

    def add(self, batch: Any) -> None:
        """Add a ``MultiAgentBatch``, or a mapping from policy to batch.

        Raises:
            UsageError: a policy's batch has other columns than its first one; the other policies' rows are added.
        """
        for policy, rows in getattr(batch, "policy_batches", batch).items():
            if policy not in self.buffers:
                self.buffers[policy] = self._made(policy)
            self.buffers[policy].add(rows)

    def _made(self, policy: str) -> ReplayBuffer:
        seed = None if self._seed is None else np.random.SeedSequence([self._seed, *policy.encode()])
        return self._kind(seed=seed, **self._options, **self._by_policy.get(policy, {}))

    def sample(self, count: int, policies: Iterable[str] | None = None, **options: Any) -> dict[str, dict[str, Any]]:
        """``count`` transitions of each policy, or of those named.

        Raises:
            UsageError: a policy is unknown, or nothing was added.
        """
        wanted = list(self.buffers) if policies is None else list(policies)
        if not wanted:
            raise UsageError("MultiAgentReplayBuffer: nothing to sample, the buffer is empty; add batches first")
        return {policy: self._of(policy).sample(count, **options) for policy in wanted}

    def update_priorities(self, updates: Mapping[str, tuple[Any, Any]]) -> None:
        """Set priorities, by policy as (batch_indexes, priorities).

        Raises:
            UsageError: a policy is unknown, or its buffer has no priorities.
        """
        for policy, (indexes, priorities) in updates.items():
            buffer: Any = self._of(policy)
            if not hasattr(buffer, "update_priorities"):
                raise UsageError(
                    f"MultiAgentReplayBuffer: {type(buffer).__name__} has no priorities; use PrioritizedReplayBuffer"
                )
            buffer.update_priorities(indexes, priorities)

    def _of(self, policy: str) -> ReplayBuffer:
        if policy not in self.buffers:
            raise UsageError(
                f"MultiAgentReplayBuffer: no batch of policy {policy!r} was added; known: {sorted(self.buffers)}"
            )
        return self.buffers[policy]

    def state(self) -> dict[str, Any]:
        """The state of each policy's buffer."""
        return {policy: buffer.state() for policy, buffer in self.buffers.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Replace the content by a state.

        Raises:
            UsageError: a buffer's state is of another class or format.
        """
        self.buffers = {policy: self._made(policy) for policy in state}
        for policy, buffer in self.buffers.items():
            buffer.restore(state[policy])
