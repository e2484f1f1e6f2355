"""``RLJobBuilder``: a method for each of the usual roles of a reinforcement-learning job."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Self

from rlmesh.builders.job_builder import DLJobBuilder
from rlmesh.builders.role_builder import CustomRoleBuilder, ElasticRoleBuilder, RoleBuilder, SimpleRoleBuilder
from rlmesh.job.description.roles import RLRoleType
from rlmesh.job.entry_points.entry import EntryLike

__all__ = ["RLJobBuilder", "RLRoleType"]


BUILT_IN = {
    RLRoleType.TRAINER: "rlmesh.rl.trainers.trainer.Trainer",
    RLRoleType.ACTOR: "rlmesh.rl.roles.actor.ActorRole",
    RLRoleType.CRITIC: "rlmesh.rl.roles.critic.CriticRole",
    RLRoleType.ROLLOUT: "rlmesh.rl.roles.rollout.RolloutRole",
    RLRoleType.REFERENCE: "rlmesh.rl.roles.reference.ReferenceRole",
    RLRoleType.REWARD: "rlmesh.rl.roles.reward.RewardRole",
}
"""The entry points of roles that have none of their own."""


class RLJobBuilder(DLJobBuilder):
    """Describes a job of trainer, actor, rollout, reference, reward and critic; ``role(name)`` adds others.

    Actor and critic are elastic, the others simple; ``role(RLRoleType.REWARD).train(...)`` makes another
    choice. The trainer uses no accelerator unless ``resource`` sets one. An actor is required.

    A role without an entry point is the built-in one of `rlmesh.rl.roles`, which reads its settings from the job's
    configuration, a `rlmesh.rl.trainers.run.Run`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._built_in: list[str] = []

    def trainer(self, entrypoint: EntryLike | None = None, class_name: str | None = None) -> RLSimpleRoleBuilder:
        """Define the role that drives the job: it ends when the trainer's ``run()`` returns."""
        return self.role(RLRoleType.TRAINER).run(*self._entry(RLRoleType.TRAINER, entrypoint, class_name)).resource()

    def actor(self, entrypoint: EntryLike | None = None, class_name: str | None = None) -> RLElasticRoleBuilder:
        """Define the policy that is trained."""
        return self.role(RLRoleType.ACTOR).train(*self._entry(RLRoleType.ACTOR, entrypoint, class_name))

    def critic(self, entrypoint: EntryLike | None = None, class_name: str | None = None) -> RLElasticRoleBuilder:
        """Define the value function that is trained."""
        return self.role(RLRoleType.CRITIC).train(*self._entry(RLRoleType.CRITIC, entrypoint, class_name))

    def rollout(self, entrypoint: EntryLike | None = None, class_name: str | None = None) -> RLSimpleRoleBuilder:
        """Define the engines that generate samples."""
        return self.role(RLRoleType.ROLLOUT).run(*self._entry(RLRoleType.ROLLOUT, entrypoint, class_name))

    def reference(self, entrypoint: EntryLike | None = None, class_name: str | None = None) -> RLSimpleRoleBuilder:
        """Define the policy that the KL penalty is measured against."""
        return self.role(RLRoleType.REFERENCE).run(*self._entry(RLRoleType.REFERENCE, entrypoint, class_name))

    def reward(self, entrypoint: EntryLike | None = None, class_name: str | None = None) -> RLSimpleRoleBuilder:
        """Define the role that scores the samples."""
        return self.role(RLRoleType.REWARD).run(*self._entry(RLRoleType.REWARD, entrypoint, class_name))

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

    def _entry(
        self, role: RLRoleType, entrypoint: EntryLike | None, class_name: str | None
    ) -> tuple[EntryLike | None, str | None]:
        """Return the entry point of a role: the given one, or the built-in one."""
        if entrypoint is not None or class_name is not None:
            return entrypoint, class_name
        self._built_in.append(role.name)
        return BUILT_IN[role], None

    def _job_problems(self, roles: set[str]) -> list[str]:
        problems = []
        if RLRoleType.ACTOR not in roles:
            problems.append(f"role ACTOR: is missing: an RL job needs .actor(...); its roles are {sorted(roles)}")
        config = self._fields.get("user_config")
        algorithm = getattr(config, "algorithm", None)
        if "TRAINER" in self._built_in and algorithm is not None:
            needs = getattr(algorithm, "needs", ())
            wanted = ["CRITIC"] * ("critic" in needs)
            if "ACTOR" in self._built_in:  # an actor of another class may sample, or keep the reference
                wanted += ["ROLLOUT"] + ["REFERENCE"] * ("reference" in needs)
            name = type(algorithm).__name__
            problems += [f"role {one}: is missing: {name} needs .{one.lower()}()" for one in wanted if one not in roles]
        if self._built_in and not (hasattr(config, "model") or (isinstance(config, Mapping) and "model" in config)):
            problems.append(
                f"config: {', '.join(self._built_in)} without a class are built-in roles, which read their settings "
                f"from a Run: add .config(Run(model=..., ...)), or name a class, as in .actor(MyActor); the "
                f"configuration is {type(config).__name__}"
            )
        return problems


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
