"""GPU memory of one process in another: handles of whole allocations, by the CUDA driver's own functions.

A handle names an allocation (``cuMemAlloc``), which may hold many tensors of torch's caching allocator; a tensor is a
handle and an offset. Opening a handle takes milliseconds, so `Opened` keeps them. Memory of expandable segments is made
by another part of the driver and has no such handles: it is found out here (`Unshareable`), and whoever sends copies
into memory that was allocated for it by `allocate`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch import device as torch_device

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class Unshareable(Exception):
    """Memory that other processes cannot open."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


@cache
def _driver() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    pointer, size = ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_size_t)
    library.cuMemGetAddressRange_v2.argtypes = [pointer, size, ctypes.c_uint64]
    library.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(_Handle), ctypes.c_uint64]
    library.cuIpcOpenMemHandle_v2.argtypes = [pointer, _Handle, ctypes.c_uint]
    library.cuIpcCloseMemHandle.argtypes = [ctypes.c_uint64]
    library.cuMemAlloc_v2.argtypes = [pointer, ctypes.c_size_t]
    library.cuMemFree_v2.argtypes = [ctypes.c_uint64]
    return library


def why_not_shared() -> str:
    """Why no memory of this process's GPUs can be opened elsewhere; empty if it can."""
    try:
        _driver()
    except OSError as error:
        return f"the CUDA driver cannot be loaded: {error}"
    return ""


def _check(code: int, what: str) -> None:
    if code != 0:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(name))
        raise Unshareable(f"{what}: {(name.value or b'?').decode()} ({code})")


def make_current(device: str | torch_device) -> None:
    """Give the calling thread the device's context, without which the driver refuses it. A thread that has launched
    nothing yet has none, whatever torch calls its current device."""
    import torch

    with torch.cuda.device(device):
        torch.cuda.synchronize()


def export(address: int) -> tuple[bytes, int]:
    """The handle of the allocation that an address is in, and the offset inside it; see `make_current`.

    Raises:
        Unshareable: it has none (expandable segments, memory of a pool).
    """
    base, nbytes, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    driver = _driver()
    _check(driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(nbytes), address), "cuMemGetAddressRange")
    _check(driver.cuIpcGetMemHandle(ctypes.byref(handle), base.value), "cuIpcGetMemHandle")
    return bytes(handle), address - base.value


class Opened:
    """Allocations of other processes that this one has open. Not thread-safe."""

    def __init__(self) -> None:
        self._addresses: dict[bytes, int] = {}

    def address(self, handle: bytes) -> int:
        """Where an allocation is in this process, for kernels of the current device."""
        found = self._addresses.get(handle)
        if found is None:
            address = ctypes.c_uint64()
            value = _Handle.from_buffer_copy(handle)
            _check(
                _driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), value, _LAZY_PEER_ACCESS), "cuIpcOpenMemHandle"
            )
            found = self._addresses[handle] = address.value
        return found

    def keep_only(self, handles: Iterable[bytes]) -> None:
        """Close all others."""
        kept = set(handles)
        for handle in [h for h in self._addresses if h not in kept]:
            _driver().cuIpcCloseMemHandle(self._addresses.pop(handle))

    def close(self) -> None:
        self.keep_only(())


class _Span:
    """Memory for torch to look at, by the CUDA array interface."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
            "stream": None,
        }


def bytes_at(address: int, nbytes: int, device: str, owner: object = None) -> Tensor:
    """A tensor of bytes ``[nbytes]`` over memory at an address; no copy. ``device`` is where that memory is."""
    import torch

    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.as_tensor(_Span(address, nbytes, owner), device=device)


class Allocation:
    """Memory that can always be shared, outside of torch's allocator. Free it when nobody has it open any more."""

    def __init__(self, nbytes: int, device: str) -> None:
        import torch

        self.nbytes, self.device = nbytes, device
        make_current(device)
        with torch.cuda.device(device):
            address = ctypes.c_uint64()
            code = _driver().cuMemAlloc_v2(ctypes.byref(address), max(nbytes, 1))
            if code != 0:
                torch.cuda.empty_cache()  # torch keeps freed memory to itself
                code = _driver().cuMemAlloc_v2(ctypes.byref(address), max(nbytes, 1))
            _check(code, f"cuMemAlloc of {nbytes:,} bytes")
        self.address = address.value
        self.handle, _ = export(self.address)

    def tensor(self, offset: int, nbytes: int) -> Tensor:
        return bytes_at(self.address + offset, nbytes, self.device, self)

    def free(self) -> None:
        """Only when no kernel and no other process uses it."""
        address, self.address = self.address, 0
        if address:
            _driver().cuMemFree_v2(address)
