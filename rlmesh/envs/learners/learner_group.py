"""`LearnerGroup`: the learners of an algorithm, by policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlmesh.envs.batches.multi_agent_batch import MultiAgentBatch
from rlmesh.envs.batches.sample_batch import SampleBatch
from rlmesh.envs.modules.policy import Policy
from rlmesh.envs.multi_agent.settings import trains
from rlmesh.errors import UsageError

__all__ = ["LearnerGroup"]


class LearnerGroup:
    """The learners of the policies of the local runner, in this process.

    Args:
        policies: by id; each learns by its ``learn_on_batch``.
        policies_to_train: ids of those that learn, or a function of an id and a batch; None: all.
    """

    def __init__(self, policies: Mapping[str, Policy], policies_to_train: Any = None) -> None:
        self.policies, self.policies_to_train = dict(policies), policies_to_train

    def trains(self, policy_id: str, batch: Any = None) -> bool:
        """True if a policy learns."""
        return trains(self.policies_to_train, policy_id, batch)

    def require_learning(self) -> None:
        """Raise `UsageError` if a policy that shall learn cannot: policies of fixed rules are not to be trained."""
        if callable(self.policies_to_train):
            return
        for policy_id, policy in self.policies.items():
            if self.trains(policy_id) and type(policy).learn_on_batch is Policy.learn_on_batch:
                raise UsageError(
                    f"the policy {policy_id!r} ({type(policy).__name__}) has no learn_on_batch: name the policies that "
                    "learn in multi_agent(policies_to_train=[…])"
                )

    def update(self, batch: SampleBatch | MultiAgentBatch) -> dict[str, dict[str, Any]]:
        """Let each policy learn from its part of a batch.

        Returns:
            By id of the policies that learn: ``learner_stats``, and ``num_agent_steps_trained``.

        Raises:
            UsageError: the batch has a policy that is not there.
        """
        parts = batch.as_multi_agent().policy_batches
        unknown = [policy_id for policy_id in parts if policy_id not in self.policies]
        if unknown:
            raise UsageError(f"the batch has steps of policy {unknown[0]!r}; there is {', '.join(self.policies)}")
        results = {}
        for policy_id, part in parts.items():
            if not self.trains(policy_id, batch):
                continue
            result = dict(self.policies[policy_id].learn_on_batch(part))
            result.setdefault("num_agent_steps_trained", len(part))
            results[policy_id] = result
        return results
