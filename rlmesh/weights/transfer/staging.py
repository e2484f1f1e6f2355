"""Staging of one bucket at a sink: its pieces are verified, and copied into the sink's memory or handed to it as is.

Where the sink gives memory (`OpenSink`), pieces are copied there and summed in one pass, so that the checksums cover
what the sink holds. Otherwise pieces are summed where they are, and the sink takes them by ``stage``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from rlmesh.errors import WeightSyncError
from rlmesh.weights.planning.buckets import Bucket
from rlmesh.weights.protocols import OpenSink, WeightSink
from rlmesh.weights.transfer.tensor_bytes import (
    as_array,
    checksum_count,
    checksum_of_unit,
    checksums,
    checksums_of,
    copy_with_checksums,
    is_on_gpu,
    tensor_of,
)


class BucketCheck:
    """Compares a sink's checksums of one bucket with the source's.

    Args:
        pieces: the bucket's entries, as they arrived.
        sent: returns the source's checksums, entry by entry; called when there is something to compare.
        share: (which, of how many): sinks that read the same memory verify it together.
    """

    def __init__(
        self, bucket: Bucket, pieces: Sequence[Any], sent: Callable[[], Sequence[int]], share: tuple[int, int]
    ) -> None:
        self._bucket, self._sent, self._share = bucket, sent, share
        counts = [1 if is_on_gpu(piece) else checksum_count(piece.nbytes) for piece in pieces]
        self._first = (0, *accumulate(counts))

    def compare(self, entries: Sequence[int], found: Sequence[Sequence[int]]) -> None:
        """Compare all checksums of some entries.

        Raises:
            WeightSyncError: some differ; names their tensors.
        """
        sent, first = self._sent(), self._first
        pairs = zip(entries, found, strict=True)
        self._refuse([i for i, sums in pairs if list(sums) != list(sent[first[i] : first[i + 1]])])

    def sum_and_compare(self, entries: Sequence[int], pieces: Sequence[Any], *, shared: bool) -> None:
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
            self.compare(entries, checksums_of(pieces))
            return
        sent = self._sent()
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
    ready: Callable[[], object],
) -> None:
    """Stage one bucket, and verify it if ``check`` is given.

    Args:
        open_sink: the sink, if it gives memory to write to.
        keep: the pieces stay valid for as long as they are referred to.
        ready: waits until the pieces may be read; called as late as possible.

    Raises:
        WeightSyncError: checksums differ, or the sink cannot take a tensor.
    """
    entries = bucket.entries
    rooms: Sequence[Any] = ()
    if open_sink is not None:
        rooms = open_sink.rooms(entries, keep=keep and not any(entry.is_part for entry in entries))
    filled = [i for i, room in enumerate(rooms) if room is not None]
    if filled:
        sums = _fill(pieces, rooms, bucket, filled, summed=check is not None, before=ready,
                     meanwhile=getattr(sink, "prepare_flip", None))  # fmt: skip
        if check is not None:
            check.compare(filled, sums)
    if len(filled) == len(entries):
        return
    ready()
    others = [i for i, room in enumerate(rooms) if room is None] if rooms else list(range(len(entries)))
    if is_on_gpu(pieces[others[0]]):
        pieces = list(pieces)
        for i, piece in zip(others, _on_this_gpu([pieces[i] for i in others]), strict=True):
            pieces[i] = piece
    if check is not None:
        check.sum_and_compare(others, [pieces[i] for i in others], shared=keep)
    tensors: dict[str, Any] = {}
    for i in others:
        tensor = tensor_of(pieces[i], entries[i].dtype, entries[i].shape, sink.framework)
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
    summed: bool, before: Callable[[], object], meanwhile: Callable[[], object] | None,
) -> list[list[int]]:  # fmt: skip
    """Copy pieces into the sink's memory, and wait for the end; returns the checksums of the copies, if ``summed``.

    Args:
        filled: indices of the bucket's entries for which the sink gave memory.
        before: called before the first piece is read.
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
