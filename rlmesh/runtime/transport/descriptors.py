"""Is there room for another ZeroMQ socket? libzmq ends the whole process when it gets no descriptor (an assertion in C,
not an exception), so it is asked before."""

from __future__ import annotations

import os
import resource

from rlmesh.errors import UsageError

SPARE = 64
"""Descriptors that stay free: a socket takes a handful, and its connections come later."""


def check_room_for_sockets(address: str) -> None:
    """Raises:
    UsageError: this process has too few descriptors left for a socket to ``address``.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return
    used = len(os.listdir("/proc/self/fd"))
    if used + SPARE > limit:
        raise UsageError(
            f"process {os.getpid()} has {used} of {limit} file descriptors open, too few are left for a ZeroMQ socket "
            f"({address}), which would end the process: raise the limit (`ulimit -n`, LimitNOFILE=) or close files"
        )
