"""Which signals to a launcher give notice that the job must end soon, and which end it."""

from __future__ import annotations

import signal

from rlmesh.agent.processes.ownership import signals_are_shared

__all__ = ["HEEDED", "gives_notice"]

HEEDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a launcher acts on, besides those of the terminal."""


def gives_notice(number: int) -> bool:
    """Whether the signal lets all ranks stop together: SIGUSR1 and SIGUSR2 do, and under Slurm SIGTERM too, which is
    what comes first when a job is preempted."""
    return number in (signal.SIGUSR1, signal.SIGUSR2) or (number == signal.SIGTERM and signals_are_shared())
