"""Binds this process to CPUs and NUMA nodes, through the kernel's own calls."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence

from rlmesh.placement.binding import Binding, ranges

_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
"""Numbers of set_mempolicy and get_mempolicy."""
PREFERRED, PREFERRED_MANY = 1, 5
MAX_NODES = 1024

__all__ = ["bind", "memory_nodes"]


def bind(binding: Binding) -> tuple[str, ...]:
    """Bind the calling thread and every thread that it starts later. Memory is preferably taken from these nodes, so
    that a full node costs speed and not the process.

    Returns:
        The bindings that failed, with errors: a container may forbid them.
    """
    failed = []
    try:
        os.sched_setaffinity(0, binding.cpus)
    except OSError as error:
        failed.append(f"CPUs {ranges(binding.cpus)}: {error}")
    try:
        _prefer(binding.numa)
    except OSError as error:
        failed.append(f"memory of NUMA {ranges(binding.numa)}: {error}")
    return tuple(failed)


def _prefer(nodes: Sequence[int]) -> None:
    mode = PREFERRED if len(nodes) == 1 else PREFERRED_MANY
    words = (ctypes.c_ulong * (MAX_NODES // 64))()
    for node in nodes:
        words[node // 64] |= 1 << (node % 64)
    _call(0, ctypes.c_int(mode), words, ctypes.c_ulong(MAX_NODES))


def memory_nodes() -> tuple[int, ...]:
    """The NUMA nodes that this thread's memory policy names; empty if it names none.

    Raises:
        OSError: the kernel does not tell.
    """
    mode = ctypes.c_int()
    words = (ctypes.c_ulong * (MAX_NODES // 64))()
    _call(1, ctypes.byref(mode), words, ctypes.c_ulong(MAX_NODES), None, ctypes.c_ulong(0))
    return tuple(node for node in range(MAX_NODES) if words[node // 64] >> (node % 64) & 1)


def _call(which: int, *args: object) -> None:
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        raise OSError(38, f"no memory policy on {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(numbers[which]), *args) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
