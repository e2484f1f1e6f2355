"""`BucketCheck`: a sink compares what it has of a bucket with what the source says of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from rlmesh.errors import WeightSyncError
from rlmesh.weights.planning.buckets import Bucket
from rlmesh.weights.transfer.checksum import checksum_of_unit
from rlmesh.weights.transfer.tensor_bytes import checksums_of, how_many_checksums, in_memory


class BucketCheck:
    """One bucket.

    Args:
        pieces: of its entries, as they came.
        sent: gives the source's checksums, entry by entry; asked for when there is something to compare.
        share: (which, of how many): sinks that look at the same memory verify it together.
    """

    def __init__(
        self, bucket: Bucket, pieces: Sequence[Any], sent: Callable[[], Sequence[int]], share: tuple[int, int]
    ) -> None:
        self._bucket, self._sent, self._share = bucket, sent, share
        self._first = (0, *accumulate(how_many_checksums(piece) for piece in pieces))

    def copied(self, which: Sequence[int], found: Sequence[Sequence[int]]) -> None:
        """Compare all checksums of some entries.

        Raises:
            WeightSyncError: some are wrong; names their tensors.
        """
        sent, first = self._sent(), self._first
        pairs = zip(which, found, strict=True)
        self._refuse([i for i, sums in pairs if list(sums) != list(sent[first[i] : first[i + 1]])])

    def looked_at(self, which: Sequence[int], pieces: Sequence[Any], *, shared: bool) -> None:
        """Sum the pieces of some entries where they are, and compare. If that memory is ``shared`` by all sinks of a
        node, this one's share of it: a word that is wrong is in somebody's share, and the commit is of all or of none.
        One that looked at other memory by mistake would find its own share wrong; one that has no share in a small
        bucket looks at all of it.

        Raises:
            WeightSyncError: some are wrong; names their tensors.
        """
        part, of = self._share
        mine = [
            (i, piece, at)
            for i, piece in zip(which, pieces, strict=True)
            for at in range(self._first[i], self._first[i + 1])
            if shared and at % of == part and piece.nbytes
        ]
        if not mine:
            self.copied(which, checksums_of(pieces))
            return
        sent, first = self._sent(), self._first
        wrong = [i for i, piece, at in mine if checksum_of_unit(in_memory(piece), at - first[i]) != sent[at]]
        self._refuse(sorted(set(wrong)))

    def _refuse(self, wrong: Sequence[int]) -> None:
        if wrong:
            names = [self._bucket.names[i] for i in wrong]
            raise WeightSyncError(
                f"bucket {self._bucket.index} arrived altered: the checksums of {', '.join(names[:5])} "
                f"({len(names)} of {len(self._bucket.names)} tensors) are not the source's"
            )
