"""Signals to ``rlmesh launch``: they stop the jobs that the script started, or end the script."""

from __future__ import annotations

import signal
from contextlib import AbstractContextManager

from rlmesh.driver.options import Ambient
from rlmesh.driver.outcome import StoppedBySignal
from rlmesh.errors import JobStopped
from rlmesh.rendezvous.stop_signals import HEEDED, gives_notice, handling

__all__ = ["heeding_signals"]


def heeding_signals(block: Ambient) -> AbstractContextManager[None]:
    """Handles signals within a block.

    SIGUSR1 gives the block's running jobs notice, SIGTERM ends them (under Slurm it gives notice too). If no job runs,
    the script ends with ``JobStopped`` or ``StoppedBySignal``. ``submit`` on the main thread handles the signals
    itself while it waits; this is for the time before and after, and for jobs on other threads.
    """

    def heed(number: int) -> None:
        name = signal.Signals(number).name
        running = [job for job in block.jobs if not job.wait_ended(0)]
        for job in running:
            job.notice(name) if gives_notice(number) else job.stop(name)
        if running:
            return
        if gives_notice(number):
            raise JobStopped(f"{name} came while no job ran; start the script again to go on")
        stopped = StoppedBySignal(f"{name} came while no job ran")
        stopped.number = number
        raise stopped

    return handling(HEEDED, heed)
