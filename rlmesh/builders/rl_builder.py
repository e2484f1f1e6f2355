"""``RLJobBuilder``: a method for each of the usual roles of a reinforcement-learning job."""

from __future__ import annotations

from enum import Enum
from typing import Self

from rlmesh.builders.job_builder import DLJobBuilder
from rlmesh.builders.role_builder import CustomRoleBuilder, ElasticRoleBuilder, RoleBuilder, SimpleRoleBuilder
from rlmesh.job.description.roles import RLRoleType
from rlmesh.job.entry_points.entry import EntryLike

__all__ = ["RLJobBuilder", "RLRoleType"]


class RLJobBuilder(DLJobBuilder):
    """Describes a job of trainer, actor, rollout, reference, reward and critic; ``role(name)`` adds others.

    Actor and critic are elastic, the others simple; ``role(RLRoleType.REWARD).train(...)`` makes another
    choice. The trainer uses no accelerator unless ``resource`` sets one. An actor is required.
    """

    def trainer(self, entrypoint: EntryLike | None = None, class_name: str | None = None) -> RLSimpleRoleBuilder:
        """Define the role that drives the job: it ends when the trainer's ``run()`` returns."""
        return self.role(RLRoleType.TRAINER).run(entrypoint, class_name).resource()

    def actor(self, entrypoint: EntryLike | None = None, class_name: str | None = None) -> RLElasticRoleBuilder:
        """Define the policy that is trained."""
        return self.role(RLRoleType.ACTOR).train(entrypoint, class_name)

    def critic(self, entrypoint: EntryLike | None = None, class_name: str | None = None) -> RLElasticRoleBuilder:
        """Define the value function that is trained."""
        return self.role(RLRoleType.CRITIC).train(entrypoint, class_name)

    def rollout(self, entrypoint: EntryLike | None = None, class_name: str | None = None) -> RLSimpleRoleBuilder:
        """Define the engines that generate samples."""
        return self.role(RLRoleType.ROLLOUT).run(entrypoint, class_name)

    def reference(self, entrypoint: EntryLike | None = None, class_name: str | None = None) -> RLSimpleRoleBuilder:
        """Define the policy that the KL penalty is measured against."""
        return self.role(RLRoleType.REFERENCE).run(entrypoint, class_name)

    def reward(self, entrypoint: EntryLike | None = None, class_name: str | None = None) -> RLSimpleRoleBuilder:
        """Define the role that scores the samples."""
        return self.role(RLRoleType.REWARD).run(entrypoint, class_name)

    def run(self, entrypoint: EntryLike | None = None, class_name: str | None = None) -> RLSimpleRoleBuilder:
        return self._add(RLSimpleRoleBuilder(self, self._take_role("run"), entrypoint, class_name))

    def train(self, entrypoint: EntryLike | None = None, class_name: str | None = None) -> RLElasticRoleBuilder:
        return self._add(RLElasticRoleBuilder(self, self._take_role("train"), entrypoint, class_name))

    def custom(self, entrypoint: EntryLike | None = None, class_name: str | None = None) -> RLCustomRoleBuilder:
        return self._add(RLCustomRoleBuilder(self, self._take_role("custom"), entrypoint, class_name))

    def workload(
        self, role: str | Enum, entrypoint: EntryLike | None = None, class_name: str | None = None
    ) -> RLSimpleRoleBuilder:
        return self.role(role).run(entrypoint, class_name)

    def with_collocation_all(self, *exclude_roles: str | Enum) -> Self:
        """Collocate all roles that use accelerators, except the trainer and ``exclude_roles``."""
        return super().with_collocation_all(RLRoleType.TRAINER, *exclude_roles)

    def _job_problems(self, roles: set[str]) -> list[str]:
        if RLRoleType.ACTOR in roles:
            return []
        return [f"role ACTOR: is missing: an RL job needs .actor(...); its roles are {sorted(roles)}"]


class _RLRole(RoleBuilder["RLJobBuilder"]):
    """The methods of ``RLJobBuilder`` that ``DLJobBuilder`` does not have."""

    def trainer(self, entrypoint: EntryLike | None = None, class_name: str | None = None) -> RLSimpleRoleBuilder:
        """See the job builder."""
        return self._job.trainer(entrypoint, class_name)

    def actor(self, entrypoint: EntryLike | None = None, class_name: str | None = None) -> RLElasticRoleBuilder:
        """See the job builder."""
        return self._job.actor(entrypoint, class_name)

    def critic(self, entrypoint: EntryLike | None = None, class_name: str | None = None) -> RLElasticRoleBuilder:
        """See the job builder."""
        return self._job.critic(entrypoint, class_name)

    def rollout(self, entrypoint: EntryLike | None = None, class_name: str | None = None) -> RLSimpleRoleBuilder:
        """See the job builder."""
        return self._job.rollout(entrypoint, class_name)

    def reference(self, entrypoint: EntryLike | None = None, class_name: str | None = None) -> RLSimpleRoleBuilder:
        """See the job builder."""
        return self._job.reference(entrypoint, class_name)

    def reward(self, entrypoint: EntryLike | None = None, class_name: str | None = None) -> RLSimpleRoleBuilder:
        """See the job builder."""
        return self._job.reward(entrypoint, class_name)

    def run(self, entrypoint: EntryLike | None = None, class_name: str | None = None) -> RLSimpleRoleBuilder:
        return self._job.run(entrypoint, class_name)

    def train(self, entrypoint: EntryLike | None = None, class_name: str | None = None) -> RLElasticRoleBuilder:
        return self._job.train(entrypoint, class_name)

    def custom(self, entrypoint: EntryLike | None = None, class_name: str | None = None) -> RLCustomRoleBuilder:
        return self._job.custom(entrypoint, class_name)

    def workload(
        self, role: str | Enum, entrypoint: EntryLike | None = None, class_name: str | None = None
    ) -> RLSimpleRoleBuilder:
        return self._job.workload(role, entrypoint, class_name)


class RLSimpleRoleBuilder(_RLRole, SimpleRoleBuilder["RLJobBuilder"]):
    """A role of independent members, in a chain of an RL job."""


class RLElasticRoleBuilder(_RLRole, ElasticRoleBuilder["RLJobBuilder"]):
    """A role that is one SPMD group, in a chain of an RL job."""


class RLCustomRoleBuilder(_RLRole, CustomRoleBuilder["RLJobBuilder"]):
    """A role given by module and class name, in a chain of an RL job."""
