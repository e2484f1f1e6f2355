"""Optional base classes for roles.

A role is any class; these only save a few lines. They are built without arguments and know about
themselves through ``current_worker()``.
"""

from __future__ import annotations

import os
from enum import Enum
from typing import TYPE_CHECKING, Any

from rlmesh.errors import RoleNotFound, UsageError
from rlmesh.job.context import (
    ControlLink,
    JobInfo,
    RestartEvent,
    Resume,
    StopRequest,
    WorkerContext,
    current_worker,
    set_current_worker,
)
from rlmesh.job.description.roles import RLRoleType, role_name

if TYPE_CHECKING:
    from rlmesh.runtime.group import MemberHandle

__all__ = [
    "BaseRLTrainer",
    "BaseRLWorkload",
    "BaseTrainer",
    "BaseWorkload",
    "ControlLink",
    "JobInfo",
    "RestartEvent",
    "Resume",
    "StopRequest",
    "WorkerContext",
    "current_worker",
    "set_current_worker",
]


class BaseWorkload:
    """A role that knows its name, its ranks and the job's configuration."""

    @property
    def config(self) -> Any:
        """What the job's ``.config(...)`` was given."""
        return current_worker().job_info.user_config

    @property
    def name(self) -> str:
        """``ROLE:rank``."""
        return current_worker().name

    @property
    def role(self) -> str:
        return current_worker().role

    @property
    def rank(self) -> int:
        return current_worker().rank

    @property
    def world_size(self) -> int:
        return current_worker().world_size

    @property
    def local_rank(self) -> int:
        return current_worker().local_rank

    @property
    def local_world_size(self) -> int:
        return current_worker().local_world_size

    @property
    def torch_master_addr(self) -> str:
        """``MASTER_ADDR`` of an elastic role, empty otherwise."""
        return os.environ.get("MASTER_ADDR", "")

    @property
    def torch_master_port(self) -> int:
        """``MASTER_PORT`` of an elastic role, -1 otherwise."""
        return int(os.environ.get("MASTER_PORT", "-1"))

    def has_device_collocation(self) -> bool:
        """Whether this role shares its device with another one."""
        return bool(current_worker().collocated_roles)

    def get_device_collocation(self) -> frozenset[str]:
        """The roles that share this member's device, its own among them; empty if it shares with none."""
        return current_worker().collocated_roles

    def setup(self) -> None:
        """Called once before the member is ready: load models and data here."""

    def on_restart(self, event: RestartEvent) -> None:
        """Called after ``setup()`` in a process that takes the place of one that failed, before it serves calls:
        restore here what can be restored without the trainer. ``event`` says why, and who was replaced with it."""

    def on_stop(self, request: StopRequest) -> None:
        """Called before ``teardown()`` if the job is stopped before its end and is to be resumed: save what must
        survive. ``request.step`` is the step after which all ranks stopped, ``request.reason`` says why. The roles
        that drive the job are asked first, after their ``run()``; the others still serve calls then."""

    def teardown(self) -> None:
        """Called once at the end of the job. A member that is replaced is not asked."""


class BaseRLWorkload(BaseWorkload):
    """A role of a reinforcement-learning job that can ask which one it is."""

    def is_actor_role(self) -> bool:
        return self.role == RLRoleType.ACTOR

    def is_reference_role(self) -> bool:
        return self.role == RLRoleType.REFERENCE

    def is_rollout_role(self) -> bool:
        return self.role == RLRoleType.ROLLOUT

    def is_reward_role(self) -> bool:
        return self.role == RLRoleType.REWARD

    def is_critic_role(self) -> bool:
        return self.role == RLRoleType.CRITIC

    def is_actor_or_rollout_device_collocation(self) -> bool:
        """Whether this member is actor or rollout, and the two share a device."""
        both = {RLRoleType.ACTOR.name, RLRoleType.ROLLOUT.name}
        return self.role in both and both <= self.get_device_collocation()


class BaseTrainer(BaseWorkload):
    """A role that drives the job: ``run()`` is ``init()``, then ``fit()``."""

    def init(self) -> None:
        """Prepare: data, and the other roles' models."""

    def fit(self) -> None:
        """Train. Subclasses define this or ``run()``."""
        raise UsageError(
            f"{type(self).__qualname__} (role {self.role}) defines neither fit() nor run(): "
            "put the training loop into fit(self)."
        )

    def run(self) -> None:
        self.init()
        self.fit()

    def get_actor_handles(self, role_type: str | Enum) -> list[MemberHandle]:
        """Handles of all members of a role, by rank; empty if the job has no such role."""
        from rlmesh.runtime.group import RoleGroup

        try:
            return list(RoleGroup[Any](role_name(role_type)))
        except RoleNotFound:
            return []


class BaseRLTrainer(BaseTrainer):
    """A trainer with the handles of the usual roles at hand."""

    @property
    def actors(self) -> list[MemberHandle]:
        """Handles of all actors, by rank."""
        return self.get_actor_handles(RLRoleType.ACTOR)

    @property
    def references(self) -> list[MemberHandle]:
        """Handles of all reference members, by rank."""
        return self.get_actor_handles(RLRoleType.REFERENCE)

    @property
    def rollouts(self) -> list[MemberHandle]:
        """Handles of all rollout members, by rank."""
        return self.get_actor_handles(RLRoleType.ROLLOUT)

    @property
    def rewards(self) -> list[MemberHandle]:
        """Handles of all reward members, by rank."""
        return self.get_actor_handles(RLRoleType.REWARD)

    @property
    def critics(self) -> list[MemberHandle]:
        """Handles of all critics, by rank."""
        return self.get_actor_handles(RLRoleType.CRITIC)
