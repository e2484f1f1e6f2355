"""Roles of jobs that really run."""

from __future__ import annotations

import os
import time

from rlmesh import current_worker, rpc


class Quick:
    """A driver that returns at once."""

    def run(self) -> None:
        current_worker().report(step=1, done=True)


class Endless:
    """A driver that works until it is asked to stop."""

    def run(self) -> None:
        worker = current_worker()
        while worker.step_boundary() is None:
            time.sleep(0.01)


class Echo:
    """Serves calls only."""

    @rpc
    def echo(self, value: str) -> str:
        return f"{current_worker().name} {value}"


def function() -> None:
    """An entry point that is a function."""
    print("function of", os.getpid(), flush=True)
