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


def role_name(role: str | Enum) -> str:
    """The plain text of a role that was given as text or as a member of an enum."""
    return str(role.name) if isinstance(role, Enum) else str(role)
