"""Waits for file descriptors whatever their numbers are.

A service may have thousands of files and connections open, and ``select.select`` raises an error for a descriptor whose
number is 1,024 or more.
"""

from __future__ import annotations

import errno
import math
import os
import select
from collections.abc import Iterable

__all__ = ["await_readable", "await_writable"]


def await_readable(fds: Iterable[int], within_s: float) -> set[int]:
    """Wait until one of the descriptors is readable or at its end, for ``within_s`` seconds at most; return those that
    are. A process descriptor is readable once its process has ended.

    Raises:
        OSError: a descriptor is closed.
    """
    return _await(fds, select.POLLIN, within_s)


def await_writable(fd: int, within_s: float) -> bool:
    """Wait until the descriptor takes data or reports an error, for ``within_s`` seconds at most; False if it does not.

    Raises:
        OSError: the descriptor is closed.
    """
    return bool(_await([fd], select.POLLOUT, within_s))


def _await(fds: Iterable[int], what: int, within_s: float) -> set[int]:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, what)
    ready = poll.poll(math.ceil(max(0.0, within_s) * 1000))
    if any(event & select.POLLNVAL for _, event in ready):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    return {fd for fd, _ in ready}
