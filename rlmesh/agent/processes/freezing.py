"""Keeps the members of a node from running while it is unknown whether they may."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable

from rlmesh.agent.processes import ownership
from rlmesh.agent.processes.ownership import Process

__all__ = ["Freezer"]


class Freezer:
    """Stops processes, and lets them go on.

    Args:
        roots: the numbers of the processes that are to be stopped with all that is below them.

    Attributes:
        active: whether they are stopped now.
    """

    def __init__(self, roots: Callable[[], Iterable[int]]) -> None:
        self._roots = roots
        self._frozen: dict[Process, None] = {}
        self.active = False

    def freeze(self) -> None:
        """To be repeated: who stopped all processes from outside may let these go on one after the other, and they may
        have started others."""
        self.active = True
        self._frozen |= dict.fromkeys(ownership.stop_all(set(self._roots())))

    def thaw(self) -> None:
        """Let those go on that were stopped here."""
        self.active, frozen, self._frozen = False, self._frozen, {}
        for process in frozen:
            ownership.send_signal(process, signal.SIGCONT)
