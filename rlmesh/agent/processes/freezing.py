"""Stops the members of a node while it is unknown whether they may run."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable

from rlmesh.agent.processes import ownership
from rlmesh.agent.processes.ownership import Process

__all__ = ["Freezer"]


class Freezer:
    """Stops processes and resumes them.

    Args:
        roots: returns the numbers of the processes to stop, with all processes below them.

    Attributes:
        active: True while the processes are stopped.
    """

    def __init__(self, roots: Callable[[], Iterable[int]]) -> None:
        self._roots = roots
        self._frozen: dict[Process, None] = {}
        self.active = False

    def freeze(self) -> None:
        """Stop the processes. Call repeatedly: whoever stopped all processes from outside may resume them one by one,
        and they may have started others."""
        self.active = True
        self._frozen |= dict.fromkeys(ownership.stop_all(set(self._roots())))

    def thaw(self) -> None:
        """Resume the processes that were stopped here."""
        self.active, frozen, self._frozen = False, self._frozen, {}
        for process in frozen:
            ownership.send_signal(process, signal.SIGCONT)
