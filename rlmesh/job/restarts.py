"""What roles and drivers learn of restarts: plain, frozen, picklable values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

__all__ = ["SCOPES", "Phase", "RestartEvent", "Scope"]

Scope: TypeAlias = Literal["member", "role", "job", "never"]
"""What is restarted when a member fails: it alone, all members of its role, the whole job, or nothing."""

SCOPES: tuple[Scope, ...] = ("member", "role", "job", "never")

Phase: TypeAlias = Literal["restarting", "ready"]


@dataclass(frozen=True, slots=True)
class RestartEvent:
    """Members of a role are being replaced by new processes, or have been.

    Attributes:
        role, ranks: whose processes are new. Whatever these held in memory is gone.
        phase: ``restarting``: calls to them wait from now on; ``ready``: they serve again, after ``setup()`` and
            ``on_restart()``.
        scope: what was restarted: the member, its role, or the job.
        incarnations: of the new processes, one for each of ``ranks``.
        cause: what happened to the old ones, in one line.
        number: how many restarts of this kind there were within the policy's window, this one included.
        at: when the failure was seen, in seconds since the epoch.
        restored: with ``ready``, for each of ``ranks`` the version of the weights that it has restored by then, as it
            told ``send_weights(source, restored=…)``; None: it told nothing. In ``on_restart()``, what this process has
            told in ``setup()``. Before that, and for roles that send no weights, nothing is known: all are None.
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
        """The same, when ``rank`` has told what it restored."""
        told = (version if one == rank else old for one, old in zip(self.ranks, self.restored, strict=True))
        return replace(self, restored=tuple(told))
