"""The names of the usual roles of a reinforcement-learning job."""

from __future__ import annotations

from enum import Enum, StrEnum

__all__ = ["RLRoleType", "role_name"]


class RLRoleType(StrEnum):
    """Roles that ``RLJobBuilder`` has methods for. Each equals its text: ``RLRoleType.ACTOR == "ACTOR"``."""

    TRAINER = "TRAINER"
    ACTOR = "ACTOR"
    ROLLOUT = "ROLLOUT"
    REFERENCE = "REFERENCE"
    REWARD = "REWARD"
    CRITIC = "CRITIC"


def role_name(role: object) -> str:
    """The plain text of a role that was given as text or as a member of an enum. Anything else gives text that is no
    role's name, which the checks of names report."""
    if isinstance(role, Enum):
        return str(role.name)
    return role if isinstance(role, str) else f"<{role!r:.80}>"
