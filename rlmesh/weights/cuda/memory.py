"""GPU memory that a source shares with its sinks: opened allocations, and allocations that can always be shared.

`rlmesh.memory.cuda_driver` describes handles, and which memory has none. Opening a handle takes milliseconds, so
`OpenedAllocations` keeps each open. Weights in memory without handles are copied into a `ShareableAllocation` first.
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
    """The reason why no other process can open this process's GPU memory; empty if it can."""
    try:
        driver()
    except OSError as error:
        return f"the CUDA driver cannot be loaded: {error}"
    return ""


def this_process() -> bytes:
    """An identifier of this process: a sink in the source's process cannot open its handles, and need not."""
    return _process_token(os.getpid())


@cache
def _process_token(pid: int) -> bytes:
    # A pid may occur in several containers; and a forked child gets a token of its own.
    return secrets.token_bytes(8)


def export(tensor: Tensor) -> tuple[bytes, int]:
    """The handle of a tensor's allocation, and the tensor's offset in it; an empty handle for an empty tensor.

    Raises:
        Unshareable: the allocation has no handle (expandable segments, memory of a pool).
    """
    if not tensor.numel():
        return b"", 0
    try:
        return driver().export(tensor.get_device(), tensor.data_ptr())
    except DriverError as error:
        raise Unshareable(str(error)) from None


class OpenedAllocations:
    """Allocations of other processes that this process has open. Not thread-safe.

    Args:
        index: index of the GPU whose kernels read them.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._addresses: dict[bytes, int] = {}

    def address(self, handle: bytes) -> int:
        """The address of an allocation in this process.

        Raises:
            Unshareable: it cannot be opened.
        """
        found = self._addresses.get(handle)
        if found is None:
            try:
                found = self._addresses[handle] = driver().open(self._index, handle)
            except DriverError as error:
                raise Unshareable(f"{error}. Has the source ended? Do both run in containers that share their IPC and "
                                  "PID namespaces?") from None  # fmt: skip
        return found

    def keep_only(self, handles: Iterable[bytes]) -> None:
        """Close all allocations but these."""
        kept = set(handles)
        for handle in [h for h in self._addresses if h not in kept]:
            driver().close(self._index, self._addresses.pop(handle))

    def close(self) -> None:
        self.keep_only(())


class ShareableAllocation:
    """GPU memory outside of torch's allocator, which can always be shared. Free it when no process has it open.

    Raises:
        Unshareable: the GPU has not enough memory.
    """

    def __init__(self, nbytes: int, index: int) -> None:
        import torch

        self.nbytes, self._index = nbytes, index
        try:
            try:
                self.address = driver().allocate(index, nbytes)
            except DriverError:
                torch.cuda.empty_cache()  # torch caches freed memory
                self.address = driver().allocate(index, nbytes)
            self.handle, _ = driver().export(index, self.address)
        except DriverError as error:
            raise Unshareable(f"{nbytes:,} bytes on GPU {index}: {error}") from None

    def tensor(self, offset: int, nbytes: int) -> Any:
        """A part of the memory, ``[nbytes]`` of uint8; no copy."""
        from rlmesh.memory.cuda import bytes_at

        return bytes_at(self.address + offset, nbytes, f"cuda:{self._index}", self)

    def free(self) -> None:
        """Free the memory; no kernel and no other process may use it."""
        address, self.address = self.address, 0
        if address:
            driver().free(self._index, address)
