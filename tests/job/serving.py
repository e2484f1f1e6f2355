"""Roles of jobs that really run."""

from __future__ import annotations

import asyncio
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


class Fragile:
    """Serves calls until it is told to die."""

    @rpc
    def echo(self, value: str) -> str:
        return f"{current_worker().name} {value}"

    @rpc
    async def forever(self) -> None:
        await asyncio.Event().wait()

    @rpc
    def die(self) -> None:
        print("the last words", flush=True)
        os._exit(7)
