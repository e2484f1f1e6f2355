"""Tensors as bytes and back, checksums of these bytes, and parallel copies; for NumPy and torch alike.

A *piece* is the memory of one tensor of a bucket: ``[n]`` of uint8, contiguous, a NumPy array on a CPU and a torch
tensor on a GPU.

Checksums of host memory are XXH3 (64 bits, seed 0) from the library xxhash, one per unit of 512 KiB. A unit is copied
and hashed while it is in the cache; several threads (`ParallelCopy`) or several sinks share the units of one tensor.
Checksums guard against torn, stale and misplaced bytes, not against an adversary. GPUs have another checksum, of whole
tensors (`rlmesh.weights.cuda.devices`).
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, TypeAlias

import xxhash

from rlmesh.errors import WeightSyncError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Piece: TypeAlias = Bytes | torch.Tensor

UNIT_BYTES = 1 << 19
CHUNK_BYTES = 16 * UNIT_BYTES
"""A thread of `ParallelCopy` takes this much work at a time."""
MAX_THREADS = 4
"""More threads do not use more memory bandwidth, and other processes of the machine need cores."""
NUMPY_TYPES = frozenset(
    {"bool", "uint8", "int8", "int16", "uint16", "float16", "int32", "uint32", "float32", "int64", "uint64", "float64",
     "complex64"}
)  # fmt: skip


def is_torch(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_on_gpu(piece: Any) -> bool:
    return bool(getattr(piece, "is_cuda", False))


def dtype_name(tensor: Any) -> str:
    """The element type's name, as torch calls it."""
    return str(tensor.dtype).removeprefix("torch.")


def host_bytes(tensor: Any, dtype: str) -> Bytes:
    """A tensor's elements as ``dtype``, in C order, in host memory; copied only where type, order or device differ.

    Raises:
        WeightSyncError: NumPy has no such type.
    """
    import numpy as np

    if is_torch(tensor):
        import torch

        flat = tensor.detach().to(device="cpu", dtype=getattr(torch, dtype)).contiguous().reshape(-1)
        array: Bytes = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
        return array
    if dtype not in NUMPY_TYPES:
        raise WeightSyncError(f"NumPy has no {dtype}: sync to a sink of another type, or from tensors of torch")
    values: Bytes = np.ascontiguousarray(tensor, dtype=dtype).reshape(-1).view(np.uint8)
    return values


def tensor_of(piece: Any, dtype: str, shape: Sequence[int], framework: str) -> Any:
    """The tensor whose memory a piece is; no copy.

    Raises:
        WeightSyncError: NumPy has no such type.
    """
    if is_torch(piece):
        import torch

        return piece.view(getattr(torch, dtype)).view(tuple(shape))
    if framework == "torch":
        import torch

        if not piece.nbytes:
            return torch.empty(tuple(shape), dtype=getattr(torch, dtype))
        return torch.from_numpy(piece).view(getattr(torch, dtype)).view(tuple(shape))
    if dtype not in NUMPY_TYPES:
        raise WeightSyncError(f"NumPy has no {dtype}: let the sink take float32, or use a sink of torch")
    return piece.view(dtype).reshape(tuple(shape))


def as_array(piece: Any) -> Bytes:
    """A piece in host memory as an array; no copy."""
    array: Bytes = piece.numpy() if is_torch(piece) else piece
    return array


def checksum_count(nbytes: int) -> int:
    """The number of checksums of a tensor in host memory: one per started unit, and one for an empty tensor."""
    return max(1, -(-nbytes // UNIT_BYTES))


def checksum_of_unit(data: Bytes, unit: int) -> int:
    """The checksum of one unit of ``[n]`` of uint8, contiguous."""
    return xxhash.xxh3_64_intdigest(data[unit * UNIT_BYTES : (unit + 1) * UNIT_BYTES].data)


def checksums(data: Bytes) -> list[int]:
    """The checksums of all units of ``[n]`` of uint8, contiguous."""
    if data.nbytes <= UNIT_BYTES:
        return [xxhash.xxh3_64_intdigest(data.data)]
    return [checksum_of_unit(data, unit) for unit in range(checksum_count(data.nbytes))]


def checksums_of(pieces: Sequence[Any]) -> list[list[int]]:
    """The checksums of each piece, on whichever device it is."""
    if any(map(is_on_gpu, pieces)):
        from rlmesh.weights.cuda.copies import copy

        return [[one] for one in copy(pieces, None, [piece.nbytes for piece in pieces], summed=True)]
    return [checksums(as_array(piece)) for piece in pieces]


def copy_with_checksums(source: Bytes, target: Bytes) -> list[int]:
    """Copy bytes unit by unit; returns the checksums of what was written."""
    import numpy as np

    found = []
    for at in range(0, max(1, source.nbytes), UNIT_BYTES):
        here = slice(at, at + UNIT_BYTES)
        np.copyto(target[here], source[here])
        found.append(xxhash.xxh3_64_intdigest(target[here].data))
    return found


class ParallelCopy:
    """Copies and sums with several threads: the calling thread and a pool, whose threads start when first needed.

    One core does not use a machine's memory bandwidth (5 to 7 of 12 GB/s on two cores); NumPy and xxhash release the
    interpreter's lock. Work is cut into chunks, which idle threads take one after the other.

    Args:
        threads: 0: one per core, at most `MAX_THREADS`.
    """

    def __init__(self, threads: int = 0) -> None:
        self._others = (threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))) - 1
        self._pool = ThreadPoolExecutor(self._others, "rlmesh-weights-copy") if self._others else None

    def copy(self, work: Sequence[tuple[Bytes, Bytes]], *, summed: bool) -> list[list[int]]:
        """Copy (from, to) pairs of ``[n]`` bytes; returns the checksums of each pair's copy, if ``summed``."""
        chunks: list[tuple[int, Bytes, Bytes]] = []
        for pair, (source, target) in enumerate(work):
            starts = range(0, max(1, source.nbytes), CHUNK_BYTES)
            chunks += [(pair, source[at : at + CHUNK_BYTES], target[at : at + CHUNK_BYTES]) for at in starts]
        sums: list[list[int]] = [[] for _ in work]
        for (pair, _, _), found in zip(chunks, self._copy_chunks(chunks, summed), strict=True):
            sums[pair] += found
        return sums

    def _copy_chunks(self, chunks: Sequence[tuple[int, Bytes, Bytes]], summed: bool) -> list[list[int]]:
        import numpy as np

        found: list[list[int]] = [[] for _ in chunks]
        waiting = deque(range(len(chunks)))

        def take_chunks() -> None:
            while waiting:
                try:
                    chunk = waiting.popleft()
                except IndexError:
                    return  # another thread took the last chunk
                _, source, target = chunks[chunk]
                if summed:
                    found[chunk] = copy_with_checksums(source, target)
                else:
                    np.copyto(target, source)

        count = min(self._others, len(chunks) - 1)
        others = [self._pool.submit(take_chunks) for _ in range(count)] if self._pool is not None else []
        try:
            take_chunks()
        finally:
            waiting.clear()  # if a copy failed, the other threads stop too
            if others:
                wait(others)
        for other in others:
            other.result()
        return found

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True)
