"""`BucketWriter` and `BucketReader`: tensors for workers in other processes of this machine.

They go through anonymous memory, of which a process that dies leaves no file behind. The writer reuses one memory for
all buckets; a reader copies the tensors.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["BucketReader", "BucketWriter"]

ALIGNMENT = 64


class BucketWriter:
    """Writes one bucket at a time, over the one before."""

    def __init__(self) -> None:
        self._fd = -1
        self._map: mmap.mmap | None = None
        self._serial = 0

    def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Write tensors, a tensor with several names once; returns the argument of `BucketReader.read`, which has plain
        values only."""
        rows: list[list[Any]] = []
        places: dict[int, int] = {}
        size = 0
        for name, tensor in tensors.items():
            at = places.get(id(tensor))
            if at is None:
                at = places[id(tensor)] = size
                size += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
            rows.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), at])
        self._room(size)
        assert self._map is not None
        # A tensor with several names is written once.
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        written = set()
        for (_, _, _, at), tensor in zip(rows, tensors.values(), strict=True):
            if at in written or not tensor.numel():
                continue
            written.add(at)
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            whole[at : at + flat.numel()].copy_(flat)
        del whole
        return {"pid": os.getpid(), "fd": self._fd, "serial": self._serial, "size": len(self._map), "rows": rows}

    def _room(self, size: int) -> None:
        if self._map is not None and len(self._map) >= size:
            return
        self.close()
        self._fd = os.memfd_create("rlmesh-weights", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, max(size, mmap.PAGESIZE))
        self._map = mmap.mmap(self._fd, max(size, mmap.PAGESIZE))
        self._serial += 1

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            os.close(self._fd)
        self._map, self._fd = None, -1


class BucketReader:
    """Reads buckets in another process of the same user."""

    def __init__(self) -> None:
        self._key: tuple[int, int] | None = None
        self._map: mmap.mmap | None = None

    def read(self, written: Mapping[str, Any]) -> Iterable[tuple[str, Tensor]]:
        """Copies of the tensors; names that shared bytes get one tensor."""
        key = (written["pid"], written["serial"])
        if self._key != key:
            self.close()
            fd = os.open(f"/proc/{written['pid']}/fd/{written['fd']}", os.O_RDWR | os.O_CLOEXEC)
            try:
                self._map = mmap.mmap(fd, written["size"])
            finally:
                os.close(fd)
            self._key = key
        assert self._map is not None
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        made: dict[int, Tensor] = {}
        for name, dtype, shape, at in written["rows"]:
            kind = getattr(torch, dtype)
            if at not in made or list(made[at].shape) != shape:
                count = torch.Size(shape).numel()
                nbytes = count * torch.empty((), dtype=kind).element_size()
                # A copy, since layers may keep it until their other tensors have come.
                made[at] = whole[at : at + nbytes].clone().view(kind).view(shape)
            yield name, made[at]

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
        self._map, self._key = None, None
