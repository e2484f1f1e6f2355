"""The checksum of a tensor: a position-weighted sum of its bytes as 64-bit integers, modulo 2**64.

::

    checksum = Σ (2·i + 1) · w_i      over the little-endian 64-bit words w_i, the last one padded with zeros

The weights are odd, so that no single flipped bit is lost, and differ, so that words which change places are seen. It
guards against torn, stale and misplaced bytes, not against an adversary. Being a sum of integers it is the same in
whatever order it is taken: on a CPU, on a GPU, in parts.

Blocks of N words are summed up twice while they are in the cache: each block to one number, and all of them to one
vector. With i = k·N + j for word j of block k,

    block_k = Σ_j w_kj        once_j = Σ_k w_kj
    checksum = Σ_k 2·k·N·block_k + Σ_j (2j + 1)·once_j

so all that is done per word is two additions: 11 GB/s on one core here. A product per word would take longer than
memory does. With a copy on the way 5 (a copy alone is 7).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

MASK = (1 << 64) - 1
BLOCK_WORDS = 1 << 13
BLOCK_BYTES = 8 * BLOCK_WORDS
"""64 KiB."""
TURN_BYTES = 8 * BLOCK_BYTES
"""What is copied and summed at a time, so that it is in the cache: 512 KiB. Threads that do so side by side ask for the
interpreter's lock between the steps of a turn only."""


class Sums(NamedTuple):
    """Of some words: the checksum, if they were a tensor, and their plain sum; modulo 2**64."""

    weighted: int
    plain: int

    @classmethod
    def of(cls, data: Bytes, into: Bytes | None = None) -> Sums:
        """Of bytes in memory: ``[n]`` of uint8, contiguous. They are copied on the way, block by block, if there is
        something to copy them into; what is summed is then what was written, while it is in the cache."""
        import numpy as np

        whole = data.nbytes // BLOCK_BYTES * BLOCK_BYTES
        head = _blocks(data[:whole], None if into is None else into[:whole]) if whole else cls(0, 0)
        if whole == data.nbytes:
            return head
        rest = data[whole:]
        if into is not None:
            np.copyto(into[whole:], rest)
            rest = into[whole:]
        return head.then(_rest(rest), whole // 8)

    def then(self, other: Sums, words: int) -> Sums:
        """Of these ``words`` words and those that follow."""
        weighted = self.weighted + other.weighted + 2 * words * other.plain
        return Sums(weighted & MASK, (self.plain + other.plain) & MASK)


def checksum(data: Bytes) -> int:
    """Of bytes in memory: ``[n]`` of uint8, contiguous."""
    return Sums.of(data).weighted


def copy_with_checksum(source: Bytes, target: Bytes) -> int:
    """Copy bytes and give the checksum of what was copied."""
    return Sums.of(source, target).weighted


def share_of(nbytes: int, which: int, of: int) -> slice:
    """The bytes of a tensor that one of several readers looks at: whole words, each looked at by one of them."""
    words = -(-nbytes // 8)
    begin, end = words * which // of, words * (which + 1) // of
    return slice(8 * begin, min(8 * end, nbytes))


def reference(data: bytes) -> int:
    """The definition, word by word: slow, for tests and for readers."""
    padded = data + bytes(-len(data) % 8)
    words = (int.from_bytes(padded[at : at + 8], "little") for at in range(0, len(padded), 8))
    return sum((2 * i + 1) * word for i, word in enumerate(words)) & MASK


def _blocks(source: Bytes, target: Bytes | None) -> Sums:
    import numpy as np

    data = source if target is None else target
    count, direct = data.nbytes // BLOCK_BYTES, _aligned(data)
    once, by_block = np.zeros(BLOCK_WORDS, np.uint64), np.zeros(count, np.uint64)
    total, done = np.add.reduce, 0
    for at in range(0, count * BLOCK_BYTES, TURN_BYTES):
        here = slice(at, min(at + TURN_BYTES, count * BLOCK_BYTES))
        if target is not None:
            np.copyto(target[here], source[here])
        blocks = (data[here] if direct else data[here].copy()).view(np.uint64).reshape(-1, BLOCK_WORDS)
        total(blocks, axis=1, out=by_block[done : done + len(blocks)])
        once += total(blocks, axis=0)
        done += len(blocks)
    steps = np.arange(count, dtype=np.uint64) * np.uint64(2 * BLOCK_WORDS)
    weighted = int(total(steps * by_block)) + int(total(_weights() * once))
    return Sums(weighted & MASK, int(total(by_block)))


@cache
def _weights() -> NDArray[np.uint64]:
    """Of the words of a block."""
    import numpy as np

    found = np.arange(1, 2 * BLOCK_WORDS + 1, 2, dtype=np.uint64)
    found.flags.writeable = False
    return found


def _rest(data: Bytes) -> Sums:
    """Of fewer bytes than a block."""
    import numpy as np

    whole = data.nbytes // 8 * 8
    head = data[:whole]
    words = (head if _aligned(head) else head.copy()).view(np.uint64)
    weights = _weights()[: words.size]
    last = int.from_bytes(data[whole:].tobytes(), "little")
    weighted = int(np.add.reduce(words * weights)) + (2 * words.size + 1) * last
    return Sums(weighted & MASK, (int(np.add.reduce(words)) + last) & MASK)


def _aligned(data: Any) -> bool:
    return bool(data.ctypes.data % 8 == 0)
