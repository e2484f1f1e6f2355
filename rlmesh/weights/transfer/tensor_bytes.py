"""Tensors as bytes and back, their checksums, and the staging of a bucket at a sink; for NumPy and torch alike.

A *piece* is the memory of one tensor of a bucket: ``[n]`` of uint8, contiguous, a NumPy array on a CPU and a torch
tensor on a GPU.

Checksums of host memory are XXH3 (64 bits, seed 0) from the library xxhash, one per unit of 512 KiB. A unit is copied
and hashed while it is in the cache; several threads or several sinks share the units of one tensor. Checksums
guard against torn, stale and misplaced bytes, not against an adversary. GPUs have another checksum, of whole tensors
(`rlmesh.weights.cuda.devices`).

A sink stages a bucket by `stage_pieces`. Where the sink gives memory (`OpenSink`), pieces are copied there and summed
in one pass, so that the checksums cover what the sink holds. Otherwise pieces are summed where they are, and the sink
takes them by ``stage``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

import xxhash

from rlmesh.errors import WeightSyncError
from rlmesh.weights.planning.buckets import Bucket
from rlmesh.weights.protocols import OpenSink, WeightSink

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Piece: TypeAlias = Bytes | torch.Tensor

UNIT_BYTES = 1 << 19
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


class BucketCheck:
    """Compares a sink's checksums of one bucket with the source's.

    Args:
        pieces: the bucket's entries, as they arrive in each push: sizes and devices are looked at.
        share: (which, of how many): sinks that read the same memory verify it together.
    """

    def __init__(self, bucket: Bucket, pieces: Sequence[Any], share: tuple[int, int]) -> None:
        self._bucket, self._share = bucket, share
        counts = [1 if is_on_gpu(piece) else checksum_count(piece.nbytes) for piece in pieces]
        self._first = (0, *accumulate(counts))

    def compare(self, entries: Sequence[int], found: Sequence[Sequence[int]], sent: Sequence[int]) -> None:
        """Compare all checksums of some entries with those that the source sent for the bucket.

        Raises:
            WeightSyncError: some differ; names their tensors.
        """
        first = self._first
        pairs = zip(entries, found, strict=True)
        self._refuse([i for i, sums in pairs if list(sums) != list(sent[first[i] : first[i + 1]])])

    def sum_and_compare(
        self, entries: Sequence[int], pieces: Sequence[Any], sent: Sequence[int], *, shared: bool
    ) -> None:
        """Sum the pieces of some entries where they are, and compare.

        If all sinks of a node read this memory (``shared``), each sink sums its share of the units: a wrong word is in
        one sink's share, and a push commits on all sinks or none. A sink that read other memory by mistake would find
        its own share wrong. A sink without a share in a small bucket sums all of it.

        Raises:
            WeightSyncError: some differ; names their tensors.
        """
        part, of = self._share
        first = self._first
        mine = [
            (i, piece, unit)
            for i, piece in zip(entries, pieces, strict=True)
            for unit in range(first[i], first[i + 1])
            if shared and unit % of == part and piece.nbytes
        ]
        if not mine:
            self.compare(entries, checksums_of(pieces), sent)
            return
        wrong = [i for i, piece, unit in mine if checksum_of_unit(as_array(piece), unit - first[i]) != sent[unit]]
        self._refuse(sorted(set(wrong)))

    def _refuse(self, wrong: Sequence[int]) -> None:
        if wrong:
            names = [self._bucket.names[i] for i in wrong]
            raise WeightSyncError(
                f"bucket {self._bucket.index} arrived altered: the checksums of {', '.join(names[:5])} "
                f"({len(names)} of {len(self._bucket.names)} tensors) are not the source's"
            )


def stage_pieces(
    sink: WeightSink,
    open_sink: OpenSink | None,
    bucket: Bucket,
    pieces: Sequence[Any],
    *,
    keep: bool,
    check: BucketCheck | None,
    sent: Sequence[int] | Callable[[], Sequence[int]],
    ready: Callable[[], object] | None = None,
) -> None:
    """Stage one bucket, and verify it if ``check`` is given.

    Args:
        open_sink: the sink, if it gives memory to write to.
        keep: the pieces stay valid for as long as they are referred to.
        sent: the source's checksums, or a function that gives them once ``ready`` has returned.
        ready: waits until the pieces may be read; called as late as possible. None: they may be read.

    Raises:
        WeightSyncError: checksums differ, or the sink cannot take a tensor.
    """
    entries = bucket.entries
    others: Sequence[int] = range(len(entries))
    if open_sink is not None:
        rooms = open_sink.rooms(entries, keep=keep and not any(entry.is_part for entry in entries))
        filled = [i for i, room in enumerate(rooms) if room is not None]
        if filled:
            sums = _fill(pieces, rooms, bucket, filled, summed=check is not None, before=ready,
                         meanwhile=getattr(sink, "prepare_flip", None))  # fmt: skip
            if check is not None:
                check.compare(filled, sums, sent() if callable(sent) else sent)
        others = [i for i, room in enumerate(rooms) if room is None]
    if not others:
        return
    if ready is not None:
        ready()
    left = pieces if len(others) == len(entries) else [pieces[i] for i in others]
    if is_on_gpu(left[0]):
        left = _on_this_gpu(left)
    if check is not None:
        check.sum_and_compare(others, left, sent() if callable(sent) else sent, shared=keep)
    tensors: dict[str, Any] = {}
    for i, piece in zip(others, left, strict=True):
        tensor = tensor_of(piece, entries[i].dtype, entries[i].shape, sink.framework)
        tensors.update(dict.fromkeys((entries[i].name, *entries[i].tied), tensor))
    sink.stage(tensors, keep=keep)


def _on_this_gpu(pieces: Sequence[Any]) -> Sequence[Any]:
    """The pieces, copied here if they are on another GPU.

    That memory was opened for this GPU's kernels alone, and torch might run kernels on the other GPU.
    """
    import torch

    here = torch.device("cuda", torch.cuda.current_device())
    if pieces[0].device == here:
        return pieces
    from rlmesh.weights.cuda.copies import copy

    places = [torch.empty_like(piece, device=here) for piece in pieces]
    copy(pieces, places, [piece.nbytes for piece in pieces], summed=False)
    return places


def _fill(
    pieces: Sequence[Any], rooms: Sequence[Any], bucket: Bucket, filled: Sequence[int], *,
    summed: bool, before: Callable[[], object] | None, meanwhile: Callable[[], object] | None,
) -> list[list[int]]:  # fmt: skip
    """Copy pieces into the sink's memory, and wait for the end; returns the checksums of the copies, if ``summed``.

    Args:
        filled: indices of the bucket's entries for which the sink gave memory.
        before: called before the first piece is read, if given.
        meanwhile: called while a GPU copies.
    """
    sizes, starts = bucket.sizes, bucket.starts
    if len(filled) < len(sizes):
        pieces, rooms = [pieces[i] for i in filled], [rooms[i] for i in filled]
        sizes = tuple(sizes[i] for i in filled)
        starts = tuple(starts[i] for i in filled) if starts is not None else None
    from rlmesh.weights.cuda.copies import bytes_of, copy

    if is_on_gpu(pieces[0]):
        found = copy(pieces, rooms, sizes, starts, summed=summed, before=before, meanwhile=meanwhile)
        return [[one] for one in found]
    import torch

    if before is not None:
        before()
    sums = []
    for i, (piece, room, size) in enumerate(zip(map(as_array, pieces), rooms, sizes, strict=True)):
        start = starts[i] if starts is not None else 0
        place = bytes_of(room)[start : start + size]
        if place.is_cuda:
            if summed:
                sums.append(checksums(piece))
            place.copy_(torch.from_numpy(piece))
        elif summed:
            sums.append(copy_with_checksums(piece, place.numpy()))
        else:
            place.copy_(torch.from_numpy(piece))
    return sums
