"""GPU memory of a source in its sinks: who has which allocation open, and allocations that can always be shared.

`rlmesh.memory.cuda_driver` describes the handles, and the memory that has none. Opening a handle takes milliseconds,
so `OpenedAllocations` keeps each one open. Weights in memory without handles are copied into a `ShareableAllocation`
before they are shared.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

from rlmesh.memory.cuda_driver import DriverError, driver

if TYPE_CHECKING:
    from torch import Tensor


class Unshareable(Exception):
    """Memory that other processes cannot open."""


def why_not_shared() -> str:
    """Why no memory of this process's GPUs can be opened elsewhere; empty if it can."""
    try:
        driver()
    except OSError as error:
        return f"the CUDA driver cannot be loaded: {error}"
    return ""


def this_process() -> bytes:
    """Equal for a source and a sink in one process, which cannot open its own handles and need not."""
    return _name_of(os.getpid())


@cache
def _name_of(pid: int) -> bytes:
    # Numbers of processes repeat in other containers; and a process that forks is two.
    return secrets.token_bytes(8)


def export(tensor: Tensor) -> tuple[bytes, int]:
    """The handle of the allocation that a tensor is in, and the offset inside it; an empty handle for an empty tensor.

    Raises:
        Unshareable: it has none (expandable segments, memory of a pool).
    """
    if not tensor.numel():
        return b"", 0
    try:
        return driver().export(tensor.get_device(), tensor.data_ptr())
    except DriverError as error:
        raise Unshareable(str(error)) from None


class OpenedAllocations:
    """Allocations of other processes that this one has open. Not thread-safe.

    Args:
        index: the device whose kernels read them, by its number here.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._addresses: dict[bytes, int] = {}

    def address(self, handle: bytes) -> int:
        """Where an allocation is in this process."""
        found = self._addresses.get(handle)
        if found is None:
            try:
                found = self._addresses[handle] = driver().open(self._index, handle)
            except DriverError as error:
                raise Unshareable(f"{error}. Has the source ended? Do both run in containers that share their IPC and "
                                  "PID namespaces?") from None  # fmt: skip
        return found

    def keep_only(self, handles: Iterable[bytes]) -> None:
        """Close all others."""
        kept = set(handles)
        for handle in [h for h in self._addresses if h not in kept]:
            driver().close(self._index, self._addresses.pop(handle))

    def close(self) -> None:
        self.keep_only(())


class ShareableAllocation:
    """Memory that can always be shared, outside of torch's allocator. Free it when nobody has it open any more.

    Raises:
        Unshareable: there is no room for it.
    """

    def __init__(self, nbytes: int, index: int) -> None:
        import torch

        self.nbytes, self._index = nbytes, index
        try:
            try:
                self.address = driver().allocate(index, nbytes)
            except DriverError:
                torch.cuda.empty_cache()  # torch keeps freed memory to itself
                self.address = driver().allocate(index, nbytes)
            self.handle, _ = driver().export(index, self.address)
        except DriverError as error:
            raise Unshareable(f"{nbytes:,} bytes on GPU {index}: {error}") from None

    def tensor(self, offset: int, nbytes: int) -> Any:
        """Bytes of it, ``[nbytes]``; no copy."""
        from rlmesh.memory.cuda import bytes_at

        return bytes_at(self.address + offset, nbytes, f"cuda:{self._index}", self)

    def free(self) -> None:
        """Only when no kernel and no other process uses it."""
        address, self.address = self.address, 0
        if address:
            driver().free(self._index, address)
