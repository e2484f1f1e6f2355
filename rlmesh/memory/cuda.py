"""Opens CUDA memory of other processes, by the driver's IPC handles.

torch has its own handles (`torch.multiprocessing`), but counts their users in a file that only living receivers count
down: a receiver that is killed keeps the sender's memory for ever. So this module uses the driver's handles
(`cuda_driver`), and the references to slots of shared memory count the users (`device`).

Devices are named by their UUIDs, since each process may number them differently; a mask (CUDA_VISIBLE_DEVICES) that
hides a device hides its memory too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from rlmesh.errors import DeviceUnreachable
from rlmesh.memory.cuda_driver import CudaDriver, DriverError, driver
from rlmesh.memory.device_backend import Handle, NotShareable
from rlmesh.memory.native import Buffer


@dataclass
class _Snapshot:
    flat: torch.Tensor
    """The tensor's bytes, uint8, on the device."""
    ready: torch.cuda.Event


class _Raw:
    """Memory in the form that torch accepts from other libraries. ``owner`` is kept alive as long as the tensor."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 2,
        }  # fmt: skip


def bytes_at(address: int, nbytes: int, device: torch.device | str, owner: object = None) -> torch.Tensor:
    """A tensor of bytes ``[nbytes]`` over memory at an address; no copy. ``device`` is where that memory is."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.as_tensor(_Raw(address, nbytes, owner), device=device)


class _Copy:
    def __init__(
        self, value: torch.Tensor, driver: CudaDriver, index: int, address: int, events: tuple[torch.cuda.Event, ...]
    ) -> None:
        self.value: torch.Tensor | None = value
        self._driver, self._index, self._address, self._events = driver, index, address, events

    def wait(self) -> None:
        self.value = None  # The receiver's tensor must not be kept alive here.
        self._events[-1].synchronize()

    def close(self) -> None:
        self._driver.close(self._index, self._address)


class CudaBackend:
    """The GPUs that this process sees.

    Raises:
        DeviceUnreachable: this process sees no GPU.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise DeviceUnreachable(
                f"a CUDA tensor came to process {os.getpid()}, which has no GPU: {_mask()}, torch {torch.__version__}. "
                "Place the role on a GPU (resource(accelerator=1), or collocate it with the sender), or send "
                "tensor.cpu()"
            )
        torch.cuda.init()
        self._driver = driver()
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
                ready = open_event(device, handle.ready)
                source = bytes_at(address + handle.offset, handle.nbytes, device)
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
        # The copy blocks, since the buffer may be reused right afterwards.
        flat = torch.frombuffer(buffer, dtype=torch.uint8).to(torch.device("cuda", index))
        return flat.view(dtype).reshape(shape)


def open_event(device: torch.device | str, handle: bytes) -> torch.cuda.Event:
    """Open an event of another process. Open that process's memory first.

    Raises:
        DeviceUnreachable: the event cannot be opened.
    """
    try:
        event: torch.cuda.Event = torch.cuda.Event.from_ipc_handle(torch.device(device), handle)
    except RuntimeError as error:
        raise DeviceUnreachable(
            f"an event of another process on {device} cannot be opened: {error}. The driver keeps events in /dev/shm: "
            "both processes must see the same one (docker run --ipc=host, hostIPC: true)"
        ) from None
    return event


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    return plain.contiguous()


def _mask() -> str:
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "CUDA_VISIBLE_DEVICES is not set, which" if mask is None else f"CUDA_VISIBLE_DEVICES={mask!r}"
