"""CUDA memory in other processes, by the driver's IPC handles.

torch has handles of its own (`torch.multiprocessing`), but counts who uses them in a file that only living receivers
count down: a receiver that is killed keeps the sender's memory for ever. So the driver is asked directly, and who
holds what is known from loans (`device`).

A handle names a whole allocation, one segment of torch's allocator, in which a tensor begins somewhere. Memory of
``expandable_segments:True`` and of ``backend:cudaMallocAsync`` has no handles. Devices are named by their UUIDs, since
each process may number them differently; a mask (CUDA_VISIBLE_DEVICES) that hides a device hides its memory too.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rlmesh.errors import DeviceUnreachable
from rlmesh.memory.device import Handle, NotShareable
from rlmesh.memory.native import Buffer

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _MemoryHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 16),)


class DriverError(Exception):
    """A call of the driver failed; ``name`` is the driver's for the error."""

    def __init__(self, what: str, name: str) -> None:
        super().__init__(f"{what}: {name}")
        self.name = name


class Driver:
    """The few calls of libcuda that torch does not offer. Devices are numbered as torch numbers them."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL("libcuda.so.1")
        for name, argtypes in {
            "cuDeviceGet": [ctypes.POINTER(ctypes.c_int), ctypes.c_int],
            "cuDeviceGetUuid_v2": [ctypes.POINTER(_Uuid), ctypes.c_int],
            "cuDevicePrimaryCtxRetain": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int],
            "cuCtxPushCurrent_v2": [ctypes.c_void_p],
            "cuCtxPopCurrent_v2": [ctypes.POINTER(ctypes.c_void_p)],
            "cuMemGetAddressRange_v2": [
                ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_size_t), ctypes.c_uint64,
            ],
            "cuIpcGetMemHandle": [ctypes.POINTER(_MemoryHandle), ctypes.c_uint64],
            "cuIpcOpenMemHandle_v2": [ctypes.POINTER(ctypes.c_uint64), _MemoryHandle, ctypes.c_uint],
            "cuIpcCloseMemHandle": [ctypes.c_uint64],
            "cuGetErrorName": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
        }.items():  # fmt: skip
            getattr(self._lib, name).argtypes = argtypes
        self._contexts: dict[int, ctypes.c_void_p] = {}

    def uuid(self, index: int) -> str:
        """As nvidia-smi shows it, of a GPU or of a slice of one."""
        found = _Uuid()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(found), self._device(index))
        text = bytes(found.bytes).hex()
        return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"

    def export(self, index: int, address: int) -> tuple[bytes, int]:
        """The handle of the allocation that holds an address, and how far behind its begin that is."""
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _MemoryHandle()
        with self._context(index):
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), base.value)
        return bytes(handle.reserved), address - base.value

    def open(self, index: int, handle: bytes) -> int:
        """Where the allocation lies in this process. Each opening must be closed once."""
        if len(handle) != _HANDLE_BYTES:
            raise DriverError("cuIpcOpenMemHandle", f"a handle of {len(handle)} bytes")
        address = ctypes.c_uint64()
        with self._context(index):
            structure = _MemoryHandle.from_buffer_copy(handle)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), structure, _LAZY_PEER_ACCESS)
        return address.value

    def close(self, index: int, address: int) -> None:
        with self._context(index):
            self._call("cuIpcCloseMemHandle", address)

    def _device(self, index: int) -> int:
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), index)
        return device.value

    @contextmanager
    def _context(self, index: int) -> Iterator[None]:
        """torch's context of the device, the primary one, on the calling thread."""
        context = self._contexts.get(index)
        if context is None:
            context = ctypes.c_void_p()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device(index))
            self._contexts[index] = context
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._lib, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorName(code, ctypes.byref(text))
            raise DriverError(name, (text.value or b"").decode() or f"error {code}")


@dataclass
class _Snapshot:
    flat: torch.Tensor
    """Its bytes, uint8, on the device."""
    ready: torch.cuda.Event


class _Raw:
    """Memory as torch takes it from others."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 2,
        }  # fmt: skip


class _Copy:
    def __init__(
        self, value: torch.Tensor, driver: Driver, index: int, address: int, events: tuple[torch.cuda.Event, ...]
    ) -> None:
        self.value: torch.Tensor | None = value
        self._driver, self._index, self._address, self._events = driver, index, address, events

    def wait(self) -> None:
        self.value = None  # It is its receiver's, not kept here until then.
        self._events[-1].synchronize()

    def close(self) -> None:
        self._driver.close(self._index, self._address)


class CudaBackend:
    """The GPUs that this process sees.

    Raises:
        DeviceUnreachable: it sees none.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise DeviceUnreachable(
                f"a CUDA tensor came to process {os.getpid()}, which has no GPU: {_mask()}, torch {torch.__version__}. "
                "Place the role on a GPU (resource(accelerator=1), or collocate it with the sender), or send "
                "tensor.cpu()"
            )
        torch.cuda.init()
        self._driver = Driver()
        self._uuids = [self._driver.uuid(index) for index in range(torch.cuda.device_count())]

    def device_of(self, tensor: torch.Tensor) -> str:
        return self._uuids[tensor.get_device()]

    def snapshot(self, tensor: torch.Tensor) -> _Snapshot:
        with torch.cuda.device(tensor.device):
            plain = _plain(tensor)
            try:
                if plain.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
                    plain = plain.clone()
            except torch.cuda.OutOfMemoryError as error:
                raise NotShareable(f"there is no room for a copy on the device: {error}") from None
            ready = torch.cuda.Event(interprocess=True)
            ready.record()
            return _Snapshot(plain.reshape(-1).view(torch.uint8), ready)

    def handle(self, snapshot: _Snapshot) -> Handle:
        flat = snapshot.flat
        index = flat.get_device()
        try:
            memory, offset = self._driver.export(index, flat.data_ptr())
        except DriverError as error:
            raise NotShareable(
                f"{error}. Memory of PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True or backend:cudaMallocAsync "
                "cannot be opened by other processes: leave these options out"
            ) from None
        return Handle(self._uuids[index], memory, offset, flat.numel(), snapshot.ready.ipc_handle())

    def open(self, handle: Handle, dtype: torch.dtype, shape: tuple[int, ...]) -> _Copy:
        if handle.device not in self._uuids:
            raise DeviceUnreachable(
                f"the tensor lies on {handle.device}, which process {os.getpid()} cannot see: {_mask()} shows it "
                f"{', '.join(self._uuids)}. Collocate the two roles on one device, let both see it, or send "
                "tensor.cpu()"
            )
        index = self._uuids.index(handle.device)
        device = torch.device("cuda", index)
        try:
            address = self._driver.open(index, handle.memory)
        except DriverError as error:
            raise DeviceUnreachable(
                f"memory of another process on {handle.device} cannot be opened: {error}. Has that process ended? "
                "Do both run in containers that share their IPC and PID namespaces?"
            ) from None
        try:
            with torch.cuda.device(index):
                stream = torch.cuda.current_stream()
                ready = torch.cuda.Event.from_ipc_handle(device, handle.ready)
                source = torch.as_tensor(_Raw(address + handle.offset, handle.nbytes), device=device)
                target = torch.empty(handle.nbytes, dtype=torch.uint8, device=device)
                ready.wait(stream)
                target.copy_(source, non_blocking=True)
                copied = torch.cuda.Event(blocking=True)
                copied.record(stream)
        except BaseException:
            torch.cuda.synchronize(device)
            self._driver.close(index, address)
            raise
        return _Copy(target.view(dtype).reshape(shape), self._driver, index, address, (ready, copied))

    def again(self, snapshot: _Snapshot, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        with torch.cuda.device(snapshot.flat.device):
            snapshot.ready.wait(torch.cuda.current_stream())
            snapshot.flat.record_stream(torch.cuda.current_stream())
            return snapshot.flat.clone().view(dtype).reshape(shape)

    def to_host(self, source: torch.Tensor | _Snapshot) -> Buffer:
        if isinstance(source, _Snapshot):
            source.ready.synchronize()
            source = source.flat
        plain = _plain(source).reshape(-1).view(torch.uint8).cpu()
        return plain.numpy().data

    def from_host(self, buffer: Buffer, device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        index = self._uuids.index(device) if device in self._uuids else torch.cuda.current_device()
        # A copy that blocks: the buffer may be used for something else right after.
        flat = torch.frombuffer(buffer, dtype=torch.uint8).to(torch.device("cuda", index))
        return flat.view(dtype).reshape(shape)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    return plain.contiguous()


def _mask() -> str:
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "CUDA_VISIBLE_DEVICES is not set, which" if mask is None else f"CUDA_VISIBLE_DEVICES={mask!r}"
