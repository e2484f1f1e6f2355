"""Optional base classes for roles.

A role is any class; these save a few lines. They are built without arguments, and ``current_worker()`` gives access to
the worker.
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
    """A role with access to its name, its ranks and the job's configuration."""

    @property
    def config(self) -> Any:
        """The argument of the job's ``.config(...)``."""
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
        """True if this role shares its device with another one."""
        return bool(current_worker().collocated_roles)

    def get_device_collocation(self) -> frozenset[str]:
        """Return the roles that share this member's device, including its own; empty without sharing."""
        return current_worker().collocated_roles

    def setup(self) -> None:
        """Called once before the member is ready: load models and data here."""

    def on_restart(self, event: RestartEvent) -> None:
        """Called after ``setup()`` in a process that replaces a failed one, before it serves calls.

        Restore here what can be restored without the trainer. ``event`` has the reason, and the members replaced with
        this one.
        """

    def on_stop(self, request: StopRequest) -> None:
        """Called before ``teardown()`` if the job is stopped before its end and is to be resumed: save what must
        survive.

        ``request.step`` is the step after which all ranks stopped, ``request.reason`` the reason. Roles that drive the
        job are
        asked first, after their ``run()``; the other roles still serve calls at that time.
        """

    def teardown(self) -> None:
        """Called once at the end of the job; not called in a member that is replaced."""


class BaseRLWorkload(BaseWorkload):
    """A role of a reinforcement-learning job, with methods that tell which one it is."""

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
        """True if this member is actor or rollout, and the two share a device."""
        both = {RLRoleType.ACTOR.name, RLRoleType.ROLLOUT.name}
        return self.role in both and both <= self.get_device_collocation()


class BaseTrainer(BaseWorkload):
    """A role that drives the job: ``run()`` is ``init()``, then ``fit()``."""

    def init(self) -> None:
        """Prepare data, and the other roles' models."""

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
        """Return handles of all members of a role, by rank; empty if the job has no such role."""
        from rlmesh.runtime.group import RoleGroup

        try:
            return list(RoleGroup[Any](role_name(role_type)))
        except RoleNotFound:
            return []


class BaseRLTrainer(BaseTrainer):
    """A trainer with properties for the handles of the usual roles."""

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
