"""`LearnerGroup`: the learners of an algorithm, by policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlmesh.envs.batches.multi_agent_batch import MultiAgentBatch
from rlmesh.envs.batches.sample_batch import SampleBatch
from rlmesh.envs.modules.policy import Policy
from rlmesh.errors import UsageError

__all__ = ["LearnerGroup"]


class LearnerGroup:
    """The learners of the policies of the local runner, in this process.

    Args:
        policies: by id; each learns by its ``learn_on_batch``.
    """

    def __init__(self, policies: Mapping[str, Policy]) -> None:
        self.policies = dict(policies)

    def update(self, batch: SampleBatch | MultiAgentBatch) -> dict[str, dict[str, Any]]:
        """Let each policy learn from its part of a batch.

        Returns:
            By policy id: ``learner_stats``, and ``num_agent_steps_trained``.

        Raises:
            UsageError: the batch has a policy that is not there.
        """
        parts = batch.as_multi_agent().policy_batches
        unknown = [policy_id for policy_id in parts if policy_id not in self.policies]
        if unknown:
            raise UsageError(f"the batch has steps of policy {unknown[0]!r}; there is {', '.join(self.policies)}")
        results = {}
        for policy_id, part in parts.items():
            result = dict(self.policies[policy_id].learn_on_batch(part))
            result.setdefault("num_agent_steps_trained", len(part))
            results[policy_id] = result
        return results
