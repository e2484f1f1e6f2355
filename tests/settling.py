"""Runtimes take what they are told on their loops, a moment later."""

from __future__ import annotations

import threading

from rlmesh.runtime.runtime import Runtime
from tests.own_time import HANG_S


def settle(*runtimes: Runtime) -> None:
    """Wait until each runtime has taken the address books, exits and connections that it was told so far."""
    for runtime in runtimes:
        taken = threading.Event()
        runtime.post(taken.set)
        assert taken.wait(HANG_S), f"the loop of {runtime.name} did not turn within {HANG_S:g} s"
