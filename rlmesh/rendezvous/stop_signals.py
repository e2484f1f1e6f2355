"""Signals to a launcher: which give notice that the job must end soon, and which end it."""

from __future__ import annotations

import signal

from rlmesh.agent.processes.ownership import signals_are_shared

__all__ = ["HEEDED", "gives_notice"]

HEEDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a launcher handles, besides those of the terminal."""


def gives_notice(number: int) -> bool:
    """True if the signal lets all ranks stop together: SIGUSR1, SIGUSR2, and under Slurm SIGTERM, which precedes a
    preemption."""
    return number in (signal.SIGUSR1, signal.SIGUSR2) or (number == signal.SIGTERM and signals_are_shared())
