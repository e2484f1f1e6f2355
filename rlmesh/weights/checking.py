"""`Check`: a sink compares what it has of a bucket with what the source says of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from rlmesh.errors import WeightSyncError
from rlmesh.weights.buckets import Bucket
from rlmesh.weights.checksum import checksum_of_unit
from rlmesh.weights.pieces import checksums_of, how_many_checksums, in_memory


class Check:
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
        One that looked at other memory by mistake would find its own share wrong.

        Raises:
            WeightSyncError: some are wrong; names their tensors.
        """
        part, of = self._share
        if not shared or of == 1:
            self.copied(which, checksums_of(pieces))
            return
        sent = self._sent()
        wrong = []
        for i, piece in zip(which, pieces, strict=True):
            data, first = in_memory(piece), self._first[i]
            mine = (at for at in range(first, self._first[i + 1]) if at % of == part)
            if any(checksum_of_unit(data, at - first) != sent[at] for at in mine):
                wrong.append(i)
        self._refuse(wrong)

    def _refuse(self, wrong: Sequence[int]) -> None:
        if wrong:
            names = [self._bucket.names[i] for i in wrong]
            raise WeightSyncError(
                f"bucket {self._bucket.index} arrived altered: the checksums of {', '.join(names[:5])} "
                f"({len(names)} of {len(self._bucket.names)} tensors) are not the source's"
            )
