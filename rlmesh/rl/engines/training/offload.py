"""`Offloaded`: memory that was taken from a device, and can be brought back.

It works on storages, below tensors: parameters, views of flat buffers, optimizer state and all who refer to them stay
the same objects, and only have no memory meanwhile.
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

log = logging.getLogger(__name__)


def own_memory(tensors: Iterable[Tensor]) -> None:
    """Give each tensor that lies in memory which cannot be freed (a mapped file, another library's) a copy of its own.
    Tensors that share such memory must be one object."""
    for tensor in tensors:
        local = _local(tensor)
        if not local.untyped_storage().resizable():
            local.data = local.data.clone()


class Offloaded:
    """The storages below ``tensors``, moved away.

    Args:
        tensors: whatever holds the memory; several may share it.
        file: where the bytes go; None: into the host's memory, pinned if the device is a GPU.
    """

    def __init__(self, tensors: Iterable[Tensor], file: Path | None) -> None:
        storages = {}
        for tensor in tensors:
            storage = _local(tensor).untyped_storage()
            if storage.nbytes() and storage.device.type != "meta":
                storages[storage._cdata] = storage
        fixed = sum(storage.nbytes() for storage in storages.values() if not storage.resizable())
        if fixed:
            # NumPy arrays show that memory: torch cannot free it without cutting the ground from under them.
            log.warning("%d bytes stay where they are: NumPy arrays were made of these tensors", fixed)
        self._storages = [storage for storage in storages.values() if storage.resizable()]
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._file = file
        self._copies: list[Tensor] = []
        if file is None:
            self._copies = [_on_host(_bytes_of(storage)) for storage in self._storages]
        else:
            _write(file, self._storages)
        for storage in self._storages:
            storage.resize_(0)
        self._empty_cache()

    @property
    def nbytes(self) -> int:
        """How much was moved."""
        return sum(self._sizes)

    def restore(self) -> None:
        """Bring everything back to where it was."""
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
            torch.cuda.empty_cache()


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """``[n]`` of uint8: the storage's own memory. Its version counter is not that of the tensors on it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _on_host(bytes_: Tensor) -> Tensor:
    if not bytes_.is_cuda:
        return bytes_.clone()
    copy = torch.empty(bytes_.shape, dtype=torch.uint8, pin_memory=True)
    return copy.copy_(bytes_)


def _write(file: Path, storages: Iterable[torch.UntypedStorage]) -> None:
    """All or nothing: whoever finds the disk full still has the memory."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        # A new file of this user's alone: a link or a file that others have put there is not written to.
        file.unlink(missing_ok=True)
        with open(file, "xb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o600)) as stream:
            for storage in storages:
                # A copy, since torch can no longer free memory that NumPy has seen.
                _on_host(_bytes_of(storage)).numpy().tofile(stream)
            stream.flush()
            os.fsync(stream.fileno())
    except BaseException:
        file.unlink(missing_ok=True)
        raise
