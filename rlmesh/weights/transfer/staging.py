"""What a sink does with the pieces of a bucket: it copies them into its memory or takes them as they are, and sums.

Two ways. Where the sink has room (`OpenSink`), pieces are copied there and summed in one pass: what is compared with
the source is what the sink holds. Otherwise pieces are summed where they are, and the sink takes them by ``stage``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlmesh.weights.planning.buckets import Bucket
from rlmesh.weights.protocols import OpenSink, WeightSink
from rlmesh.weights.transfer.bucket_check import BucketCheck
from rlmesh.weights.transfer.checksum import checksums, copy_with_checksums
from rlmesh.weights.transfer.tensor_bytes import in_memory, is_torch, tensor_of


def stage_pieces(
    sink: WeightSink,
    bucket: Bucket,
    pieces: Sequence[Any],
    *,
    keep: bool,
    check: BucketCheck | None,
    ready: Callable[[], object],
) -> None:
    """Stage one bucket; with ``check``, verified.

    Args:
        keep: the pieces stay valid for as long as somebody refers to them.
        ready: waits until the pieces may be read; called as late as can be.
    """
    entries = bucket.entries
    rooms: Sequence[Any] = [None] * len(entries)
    if isinstance(sink, OpenSink):
        rooms = sink.rooms(entries, keep=keep and not any(entry.is_part for entry in entries))
    filled = [i for i, room in enumerate(rooms) if room is not None]
    if filled:
        sums = _fill(pieces, rooms, bucket, filled, summed=check is not None, before=ready,
                     meanwhile=getattr(sink, "prepare_flip", None))  # fmt: skip
        if check is not None:
            check.copied(filled, sums)
    if len(filled) == len(entries):
        return
    ready()
    left = [i for i, room in enumerate(rooms) if room is None]
    if is_torch(pieces[left[0]]) and pieces[left[0]].is_cuda:
        pieces = list(pieces)
        for i, piece in zip(left, _here([pieces[i] for i in left]), strict=True):
            pieces[i] = piece
    if check is not None:
        check.looked_at(left, [pieces[i] for i in left], shared=keep)
    tensors: dict[str, Any] = {}
    for i in left:
        tensor = tensor_of(pieces[i], entries[i].dtype, entries[i].shape, sink.framework)
        tensors.update(dict.fromkeys((entries[i].name, *entries[i].tied), tensor))
    sink.stage(tensors, keep=keep)


def _here(pieces: Sequence[Any]) -> Sequence[Any]:
    """Pieces that are on another GPU, on this one: that memory was opened for this GPU's kernels alone, and torch might
    use the other one's."""
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
    summed: bool, before: Callable[[], object], meanwhile: Callable[[], object] | None,
) -> list[list[int]]:  # fmt: skip
    """Copy pieces to their places, and wait for the end; the checksums of what was copied, if they are wanted.

    Args:
        filled: which of the bucket's entries have a place.
        before: called before the first is read.
        meanwhile: what may be done while a GPU copies.
    """
    sizes, starts = bucket.sizes, bucket.starts
    if len(filled) < len(sizes):
        pieces, rooms = [pieces[i] for i in filled], [rooms[i] for i in filled]
        sizes = tuple(sizes[i] for i in filled)
        starts = tuple(starts[i] for i in filled) if starts is not None else None
    from rlmesh.weights.cuda.copies import bytes_of, copy

    if is_torch(pieces[0]) and pieces[0].is_cuda:
        found = copy(pieces, rooms, sizes, starts, summed=summed, before=before, meanwhile=meanwhile)
        return [[one] for one in found]
    import torch

    before()
    sums = []
    for i, (piece, room, size) in enumerate(zip(map(in_memory, pieces), rooms, sizes, strict=True)):
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
