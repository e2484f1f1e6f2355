"""`ParallelCopy`: several threads that copy and sum much memory side by side.

One core alone does not fill the memory of a machine (5 to 7 of 12 GB/s on two cores); NumPy works without the
interpreter's lock, and so does xxhash. Work is cut into turns of a few MiB, which whoever is free takes next.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from rlmesh.weights.transfer.checksum import UNIT_BYTES, copy_with_checksums

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

TURN_BYTES = 16 * UNIT_BYTES
MOST = 4
"""More threads than that fill no memory faster, and there are others on the machine."""


class ParallelCopy:
    """The thread that asks, and up to ``hands - 1`` more, which start when there is work for them.

    Args:
        hands: 0: as many as there are cores, at most `MOST`.
    """

    def __init__(self, hands: int = 0) -> None:
        self._others = (hands or min(MOST, len(os.sched_getaffinity(0)))) - 1
        self._pool = ThreadPoolExecutor(self._others, "rlmesh-weights-copy") if self._others else None

    def copy(self, work: Sequence[tuple[Bytes, Bytes]], *, summed: bool) -> list[list[int]]:
        """Copy (from, to), bytes ``[n]`` each; gives the checksums of what was copied, of each pair, if ``summed``."""
        turns: list[tuple[int, Bytes, Bytes]] = []
        for which, (source, target) in enumerate(work):
            starts = range(0, max(1, source.nbytes), TURN_BYTES)
            turns += [(which, source[at : at + TURN_BYTES], target[at : at + TURN_BYTES]) for at in starts]
        sums: list[list[int]] = [[] for _ in work]
        for (which, _, _), found in zip(turns, self._do(turns, summed), strict=True):
            sums[which] += found
        return sums

    def _do(self, turns: Sequence[tuple[int, Bytes, Bytes]], summed: bool) -> list[list[int]]:
        import numpy as np

        found: list[list[int]] = [[] for _ in turns]
        left = deque(range(len(turns)))

        def take_turns() -> None:
            while left:
                try:
                    turn = left.popleft()
                except IndexError:
                    return  # another one was faster
                _, source, target = turns[turn]
                if summed:
                    found[turn] = copy_with_checksums(source, target)
                else:
                    np.copyto(target, source)

        count = min(self._others, len(turns) - 1)
        others = [self._pool.submit(take_turns) for _ in range(count)] if self._pool is not None else []
        try:
            take_turns()
        finally:
            left.clear()  # if this one failed
            wait(others)
        for other in others:
            other.result()
        return found

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True)
