"""Runtimes that a program leaves open: their threads end before the interpreter does."""

from __future__ import annotations

import atexit
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlmesh.runtime.runtime import Runtime

__all__ = ["with_threads"]

with_threads: weakref.WeakSet[Runtime] = weakref.WeakSet()
"""The runtimes of this process that have threads of their own."""


def _close_all() -> None:
    """Close what the program did not close: threads must not run while the interpreter is taken down around them."""
    for runtime in list(with_threads):
        runtime.close()


# As concurrent.futures does it: before the handlers of atexit, one of which is pyzmq's, without which the frames that
# ZeroMQ still holds cannot be freed.
getattr(threading, "_register_atexit", atexit.register)(_close_all)
