"""Restart policies of a job description."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from rlmesh.job.description.spec import Spec
from rlmesh.job.nearest_name import did_you_mean
from rlmesh.job.restarts import SCOPES, Scope

__all__ = ["RestartPolicy", "effective_policy", "names_a_budget", "restart_problems"]


class RestartPolicy(Spec):
    """The restart policy of a role's members.

    A policy may be given as its scope alone: ``restart="never"``.

    Attributes:
        scope: what is restarted when a member's process dies: ``member``: the member alone; ``role``: all members of
            its
            role, with a new rendezvous; ``job``: all members of the job; ``never``: nothing, the job fails. ``None``:
            ``role`` for elastic roles, whose members cannot return alone, ``member`` for others.
        max_restarts: maximum number of restarts within ``window_s``; the next failure ends the job, with the
            first cause.
        window_s: age in seconds from which restarts do not count any more.
        delay_s: the first restart within the window is immediate, the second is delayed by this time, and each further
            one by twice the previous delay.
        max_delay_s: maximum delay.
        on_error: also restart a member whose own code raised. By default such an error ends the job: the same code
            would most likely raise again.
    """

    scope: Scope | None = None
    max_restarts: int = Field(default=3, ge=0)
    window_s: float = Field(default=600.0, gt=0)
    delay_s: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    max_delay_s: float = Field(default=60.0, ge=0, allow_inf_nan=False)
    on_error: bool = False

    @model_validator(mode="before")
    @classmethod
    def _from_scope(cls, data: Any) -> Any:
        if isinstance(data, str):
            data = {"scope": data}
        if isinstance(data, dict) and isinstance(scope := data.get("scope"), str) and scope not in SCOPES:
            raise ValueError(f"there is no restart scope {scope!r}.{did_you_mean(scope, SCOPES)}")
        return data


def effective_policy(
    elastic: bool, role: RestartPolicy | None, job: RestartPolicy | None, max_restarts: int | None, scope: str | None
) -> RestartPolicy:
    """Return the effective policy of a role, with its scope set.

    Args:
        elastic: the members form a group, which restarts as a whole: ``member`` means ``role`` for it.
        role, job: the described policies; the role's wins.
        max_restarts: the role's own number, if it has one.
        scope: the scope given at the launch, which wins over any description.
    """
    policy = (role or job or RestartPolicy()).model_copy()
    if max_restarts is not None:
        policy.max_restarts = max_restarts
    chosen = scope or policy.scope or "member"
    if policy.max_restarts == 0:
        chosen = "never"
    policy.scope = "role" if chosen == "member" and elastic else chosen  # type: ignore[assignment]
    return policy


def names_a_budget(role: RestartPolicy | None, job: RestartPolicy | None, max_restarts: int | None) -> bool:
    """True if a job itself sets the number of restarts of a role; arguments as for `effective_policy`."""
    policy = role or job
    return max_restarts is not None or (policy is not None and "max_restarts" in policy.model_fields_set)


def restart_problems(elastic: bool, policy: RestartPolicy | None) -> list[str]:
    """Return the faults of a role's own policy."""
    if elastic and policy is not None and policy.scope == "member":
        return [
            "restart: scope 'member' cannot work for an elastic role, whose members form one group: use 'role', which "
            "starts all of them again with a new rendezvous"
        ]
    return []
