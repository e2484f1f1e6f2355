"""`LearnerGroup`: the learners of an algorithm, by policy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rlmesh.drafts import Draft
from rlmesh.envs.batches.multi_agent_batch import MultiAgentBatch
from rlmesh.envs.batches.sample_batch import SampleBatch
from rlmesh.envs.modules.policy import Policy
from rlmesh.envs.multi_agent.settings import trains
from rlmesh.errors import UsageError

if TYPE_CHECKING:
    from rlmesh.envs.learners.remote.learners import RemoteLearners

__all__ = ["LearnerGroup"]

FORMAT = 1


class LearnerGroup:
    """The learners of the policies of the local runner: in this process, or several in processes of their own.

    Remote learners have equal weights. Each updates with a share of the batch, and their gradients are averaged by the
    rows of these shares, so the result is that of one learner with the whole batch, up to rounding. The policies of
    this process have the weights of the last update.

    Args:
        policies: by id; each learns by its ``learn_on_batch``, or, remotely, by its learner.
        policies_to_train: ids of those that learn, or a function of an id and a batch; None: all.
        num_learners: 0: in this process; otherwise the group starts an rlmesh job with so many members, and ends it
            with `stop`, or when the program ends.
        settings: ``timeout_s`` (longest wait for an update), ``max_restarts`` (of the learners, within ten minutes),
            ``run_dir`` (folder of the job).

    Raises:
        UsageError: a policy cannot learn remotely.
        LaunchError: the job could not be started.
    """

    def __init__(
        self, policies: Mapping[str, Policy], policies_to_train: Any = None, *, num_learners: int = 0, **settings: Any
    ) -> None:  # fmt: skip
        if type(num_learners) is not int or num_learners < 0:
            raise UsageError(f"LearnerGroup(num_learners={num_learners!r}): a whole number of at least 0")
        self.policies, self.policies_to_train = dict(policies), policies_to_train
        self._require_learning()
        self.num_learners = num_learners
        self._remote: RemoteLearners | None = None
        if num_learners:
            from rlmesh.envs.learners.remote.learners import RemoteLearners

            trained = {name: policy for name, policy in policies.items() if self._may_learn(name, policy)}
            self._remote = RemoteLearners(trained, num_learners, **settings)

    def __len__(self) -> int:
        """Number of learners."""
        return max(1, self.num_learners)

    def trains(self, policy_id: str, batch: Any = None) -> bool:
        """True if a policy learns."""
        return trains(self.policies_to_train, policy_id, batch)

    def _may_learn(self, policy_id: str, policy: Policy) -> bool:
        """True unless a policy is known to learn never: it is not to be trained, or has fixed rules."""
        if callable(self.policies_to_train):
            return type(policy).learn_on_batch is not Policy.learn_on_batch
        return self.trains(policy_id)

    def _require_learning(self) -> None:
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
            RLMeshError: remote learners ended more often than they may. The weights are those of the last update.
        """
        parts = batch.as_multi_agent().policy_batches
        unknown = [policy_id for policy_id in parts if policy_id not in self.policies]
        if unknown:
            raise UsageError(f"the batch has steps of policy {unknown[0]!r}; there is {', '.join(self.policies)}")
        parts = {policy_id: part for policy_id, part in parts.items() if self.trains(policy_id, batch)}
        for policy_id in parts:
            if not self._may_learn(policy_id, self.policies[policy_id]):
                raise UsageError(
                    f"policies_to_train names {policy_id!r}, and {type(self.policies[policy_id]).__name__} has no "
                    "learn_on_batch"
                )
        if self._remote is not None:
            stats = self._remote.update(parts) if parts else {}
            return {
                policy_id: {"learner_stats": stats[policy_id], "num_agent_steps_trained": len(part)}
                for policy_id, part in parts.items()
            }
        results = {}
        for policy_id, part in parts.items():
            result = dict(self.policies[policy_id].learn_on_batch(part))
            result.setdefault("num_agent_steps_trained", len(part))
            results[policy_id] = result
        return results

    def get_weights(self) -> dict[str, Any]:
        """Weights by policy id, those of the last update."""
        return {policy_id: policy.get_weights() for policy_id, policy in self.policies.items()}

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        """Take over weights by policy id, at all learners, for target networks too."""
        for policy_id, each in weights.items():
            policy = self._policy(policy_id)
            policy.set_weights(each)
            learner: Any = getattr(policy, "learner", None)
            if hasattr(learner, "follow"):
                learner.follow(1.0)

    def get_state(self) -> dict[str, Any]:
        """Weights, optimizers and counters by policy id, those of the last update."""
        return {policy_id: policy.get_state() for policy_id, policy in self.policies.items()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take over a state of `get_state`, at all learners."""
        for policy_id, each in state.items():
            self._policy(policy_id).set_state(each)

    def save(self, path: str | Path) -> str:
        """Write the state into a file, which is there as a whole or not at all; returns its path."""
        import torch

        from rlmesh.envs.batches.tensors import tensors_of_tree

        path = Path(path)
        with Draft(path) as file:
            torch.save({"format": FORMAT, "learners": tensors_of_tree(self.get_state())}, file)
        return str(path)

    save_to_path = save

    def restore(self, path: str | Path) -> None:
        """Take over the state of a file of `save`, at all learners.

        Raises:
            UsageError: the file is none, or has other networks.
        """
        import torch

        from rlmesh.envs.batches.tensors import arrays_of_tree

        if not Path(path).is_file():
            raise UsageError(f"LearnerGroup.restore: there is no file {path}")
        content = torch.load(path, weights_only=True)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise UsageError(f"LearnerGroup.restore: {path} was not written by LearnerGroup.save of this version")
        try:
            self.set_state(arrays_of_tree(content["learners"]))
        except RuntimeError as error:
            raise UsageError(f"LearnerGroup.restore: the networks of {path} are others: {error}") from None

    restore_from_path = restore

    def _policy(self, policy_id: str) -> Policy:
        if policy_id not in self.policies:
            raise UsageError(f"there is no policy {policy_id!r}; there is {', '.join(self.policies)}")
        return self.policies[policy_id]

    def stop(self) -> None:
        """End the job of remote learners; a second call does nothing."""
        if self._remote is not None:
            self._remote.stop()

    shutdown = stop

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
