"""`Offloaded`: memory that was moved off a device, and can be restored.

It moves the storages of tensors: parameters, views of flat buffers, optimizer state and all references to them stay the
same objects, but have no memory in the meantime.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlmesh.rl.engines.host_memory import KeptRooms

log = logging.getLogger(__name__)


def own_memory(tensors: Iterable[Tensor]) -> None:
    """Copy each tensor whose memory cannot be freed (a mapped file, memory of another library).

    Tensors that share such memory must be the same object.
    """
    for tensor in tensors:
        local = _local(tensor)
        if not local.untyped_storage().resizable():
            local.data = local.data.clone()


def free_unused_gpu_memory() -> None:
    """Return the memory that torch keeps without using it to the GPU, for other processes."""
    clear_workspaces()  # workspaces would keep their segments from being freed
    torch.cuda.empty_cache()


def clear_workspaces() -> None:
    """Free the workspaces of cuBLAS, which makes new ones when it needs them."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


class Offloaded:
    """The storages of ``tensors``, moved off their device.

    Args:
        tensors: all tensors that use the memory; several may share it.
        file: the file for the bytes; None: host memory, pinned if the device is a GPU.
        rooms: where the bytes of a GPU go without a file; keep it for the next time, which then takes no new memory.
    """

    def __init__(self, tensors: Iterable[Tensor], file: Path | None, rooms: KeptRooms | None = None) -> None:
        storages = {}
        for tensor in tensors:
            storage = _local(tensor).untyped_storage()
            if storage.nbytes() and storage.device.type != "meta":
                storages[storage._cdata] = storage
        fixed = sum(storage.nbytes() for storage in storages.values() if not storage.resizable())
        if fixed:
            # NumPy arrays refer to this memory, so torch must not free it.
            log.warning("%d bytes stay where they are: NumPy arrays were made of these tensors", fixed)
        self._storages = [storage for storage in storages.values() if storage.resizable()]
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._file = file
        self._copies: list[Tensor] = []
        if file is None:
            self._copies = _on_host(self._storages, rooms or KeptRooms())
        else:
            _write(file, self._storages)
        for storage in self._storages:
            storage.resize_(0)
        self._empty_cache()

    @property
    def nbytes(self) -> int:
        """The number of bytes that were moved."""
        return sum(self._sizes)

    def restore(self) -> None:
        """Move all bytes back to their storages."""
        if self._file is not None:
            self._read(self._file)
        else:
            for storage, size, copy in zip(self._storages, self._sizes, self._copies, strict=True):
                storage.resize_(size)
                _bytes_of(storage).copy_(copy)
        self.forget()

    def _read(self, file: Path) -> None:
        with file.open("rb") as stream:
            for storage, size in zip(self._storages, self._sizes, strict=True):
                storage.resize_(size)
                found = np.fromfile(stream, np.uint8, size)
                if len(found) != size:
                    raise OSError(f"{file} is shorter than what was written to it: it was changed since the offload")
                _bytes_of(storage).copy_(torch.from_numpy(found))

    def forget(self) -> None:
        """Drop the bytes."""
        self._copies = []
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _empty_cache(self) -> None:
        if any(storage.device.type == "cuda" for storage in self._storages):
            free_unused_gpu_memory()


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """``[n]`` of uint8 over the storage's memory, with a version counter separate from that of the tensors on it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _on_host(storages: list[torch.UntypedStorage], rooms: KeptRooms) -> list[Tensor]:
    on_gpu = rooms.of([storage for storage in storages if storage.device.type == "cuda"])
    free = iter(on_gpu)
    return [
        next(free).copy_(_bytes_of(storage)) if storage.device.type == "cuda" else _bytes_of(storage).clone()
        for storage in storages
    ]


def _write(file: Path, storages: Iterable[torch.UntypedStorage]) -> None:
    """Write the storages to a file; if the disk is full, no file is left and the memory is unchanged."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        # A new private file, so that nothing is written to a link or file of another user.
        file.unlink(missing_ok=True)
        with open(file, "xb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o600)) as stream:
            for storage in storages:
                # A copy, since torch cannot free memory that NumPy has referred to.
                _bytes_of(storage).to("cpu", copy=True).numpy().tofile(stream)
            stream.flush()
            os.fsync(stream.fileno())
    except BaseException:
        file.unlink(missing_ok=True)
        raise
