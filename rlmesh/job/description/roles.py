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
    """Return the name of a role that is given as text or as a member of an enum.

    Any other value gives a text that is not a valid name, which the checks of names report.
    """
    if isinstance(role, Enum):
        return str(role.name)
    return role if isinstance(role, str) else f"<{role!r:.80}>"
