"""Reaps zombies that a member inherits and nobody waits for.

Each worker is a subreaper: a process that its shell commands leave in the background becomes its own child, and a
zombie when it ends. A zombie may as well be a child that the member's code started and has yet to wait for, whose exit
status must not be taken away; the kernel does not tell one from the other. So the children that this process starts are
noted at their start, and only other zombies are reaped. A library in C may start processes that are not noted; so a few
zombies are left alone for longer than such a library takes to wait for them.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rlmesh.agent.processes import ownership
from rlmesh.runtime.runtime import Runtime

__all__ = ["Reaper", "StartedChildren"]

LOOK_S = 0.2
SOON_S = 0.3
"""Seconds after which many zombies are reaped: since there are many, nobody waits for them."""
LATE_S = 30.0
"""Seconds after which a few zombies are reaped."""
FEW = 3


class StartedChildren:
    """The children that this process has started and not waited for yet."""

    def __init__(self) -> None:
        self.pids: set[int] = set()
        self._before = threading.local()

    def watch(self) -> bool:
        """Note all children from now on until the process ends; False if the kernel does not list children."""
        import _posixsubprocess
        import subprocess

        children = children_of_main_thread()
        if children is None or not hasattr(subprocess, "_fork_exec"):
            return False
        self.pids.update(children)
        os.register_at_fork(before=self._fork_begins, after_in_parent=self._forked)
        # subprocess and multiprocessing start programs without the hooks of a fork.
        for module, name in ((subprocess, "_fork_exec"), (_posixsubprocess, "fork_exec"), (os, "posix_spawn"),
                             (os, "posix_spawnp")):  # fmt: skip
            setattr(module, name, self._noting(getattr(module, name)))
        return True

    def _noting(self, start: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(start)
        def noted(*args: Any, **kwargs: Any) -> int:
            pid = start(*args, **kwargs)
            self.pids.add(pid)
            return pid

        return noted

    def _fork_begins(self) -> None:
        self._before.children = _read("/proc/thread-self/children") or ()

    def _forked(self) -> None:
        now = _read("/proc/thread-self/children") or ()
        self.pids.update(set(now) - set(getattr(self._before, "children", ())))

    def forget_ended(self) -> None:
        """Forget children that were waited for."""
        own = os.getpid()
        for pid in list(self.pids):
            found = ownership.read_process(pid)
            if found is None or found.parent != own:
                self.pids.discard(pid)


class Reaper:
    """Reaps zombies on a runtime's loop.

    Args:
        started: children that must not be reaped.
        clock: a monotonic clock in seconds.
    """

    def __init__(self, started: StartedChildren, clock: Callable[[], float] = time.monotonic) -> None:
        self._started, self._clock = started, clock
        self._seen: dict[int, float] = {}

    def start(self, runtime: Runtime) -> None:
        """Check until the runtime ends."""
        runtime.post(self._again)

    def _again(self) -> None:
        self.look()
        asyncio.get_running_loop().call_later(LOOK_S, self._again)

    def look(self) -> None:
        """Reap the zombies that are due."""
        children = children_of_main_thread() or ()
        self._started.forget_ended()
        now = self._clock()
        unclaimed = [pid for pid in children if pid not in self._started.pids and _is_zombie(pid)]
        self._seen = {pid: self._seen.get(pid, now) for pid in unclaimed}
        wait_s = SOON_S if len(unclaimed) > FEW else LATE_S
        for pid, seen_at in self._seen.items():
            if now - seen_at >= wait_s:
                with suppress(ChildProcessError):  # other code waited for it after all
                    os.waitpid(pid, os.WNOHANG)


def children_of_main_thread() -> tuple[int, ...] | None:
    """This process's children that its main thread started or inherited (it inherits all orphans); None if unknown."""
    return _read(f"/proc/self/task/{os.getpid()}/children")


def _read(path: str) -> tuple[int, ...] | None:
    try:
        with open(path) as file:
            return tuple(map(int, file.read().split()))
    except (OSError, ValueError):
        return None


def _is_zombie(pid: int) -> bool:
    found = ownership.read_process(pid)
    return found is not None and not found.running
