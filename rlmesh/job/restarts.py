"""Restart events for roles and drivers: plain, frozen, picklable values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

__all__ = ["SCOPES", "Phase", "RestartEvent", "Scope"]

Scope: TypeAlias = Literal["member", "role", "job", "never"]
"""Scope of a restart after a member's failure: the member alone, all members of its role, the whole job, or none."""

SCOPES: tuple[Scope, ...] = ("member", "role", "job", "never")

Phase: TypeAlias = Literal["restarting", "ready"]


@dataclass(frozen=True, slots=True)
class RestartEvent:
    """Members of a role are being replaced by new processes, or have been.

    Attributes:
        role, ranks: the members with new processes. Their state in memory is lost.
        phase: ``restarting``: calls to them wait from now on; ``ready``: they serve again, after ``setup()`` and
            ``on_restart()``.
        scope: the restarted unit: the member, its role, or the job.
        incarnations: incarnations of the new processes, one for each of ``ranks``.
        cause: what happened to the old processes, in one line.
        number: number of restarts of the unit within the rule's window, including this one.
        at: when the failure was seen, in seconds since the epoch.
        restored: with ``ready``, for each of ``ranks`` the version of the weights that it has restored, as reported by
            ``send_weights(source, restored=…)``; None: not reported. In ``on_restart()``, the version that this process
            has reported in ``setup()``. Earlier, and for roles that send no weights, all are None.
    """

    role: str
    ranks: tuple[int, ...]
    phase: Phase
    scope: Scope
    incarnations: tuple[int, ...]
    cause: str
    number: int
    at: float
    restored: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        if not self.restored:
            object.__setattr__(self, "restored", (None,) * len(self.ranks))

    def with_restored(self, rank: int, version: int | None) -> RestartEvent:
        """Return the event with the version that ``rank`` has restored."""
        versions = (version if one == rank else old for one, old in zip(self.ranks, self.restored, strict=True))
        return replace(self, restored=tuple(versions))
