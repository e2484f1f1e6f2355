"""A kernel for many tensors: copies 64-bit words, or sums them weighted by position, or both in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_WORDS = 4096
ALIGNMENT = 16
"""Alignment of addresses in bytes: two words are loaded at a time."""


@triton.jit  # type: ignore[untyped-decorator]
def _copy_and_sum(  # type: ignore[no-untyped-def]
    sources, targets, words, tensor_of, block_of, sums, COPY: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    tensor = tl.load(tensor_of + program)
    first = tl.load(block_of + program).to(tl.int64) * BLOCK
    source = tl.multiple_of(tl.load(sources + tensor).to(tl.pointer_type(tl.int64)), 16) + first
    count = tl.load(words + tensor) - first
    index = tl.arange(0, BLOCK)
    target = tl.multiple_of(tl.load(targets + tensor).to(tl.pointer_type(tl.int64)), 16) + first
    if count >= BLOCK:
        values = tl.load(source + index)
        if COPY:
            tl.store(target + index, values)
    else:
        inside = index < count
        values = tl.load(source + index, mask=inside, other=0)
        if COPY:
            tl.store(target + index, values, mask=inside)
    if SUM:
        here = tl.sum(values * (2 * index.to(tl.int64) + 1), axis=0)
        tl.atomic_add(sums + tensor, here + 2 * first * tl.sum(values, axis=0))


class Table:
    """Addresses, sizes and blocks of some tensors, on the device: made once, launched at every push.

    Args:
        sources, targets: addresses, multiples of `ALIGNMENT`; no targets: nothing is copied.
        sizes: in bytes, multiples of 8.
    """

    def __init__(
        self, sources: Sequence[int], targets: Sequence[int] | None, sizes: Sequence[int], device: torch.device
    ) -> None:
        counts = torch.tensor(sizes, dtype=torch.int64) // 8
        blocks = (counts + BLOCK_WORDS - 1) // BLOCK_WORDS
        tensor_of = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int64), blocks)
        first = torch.cumsum(blocks, 0) - blocks
        block_of = torch.arange(int(blocks.sum()), dtype=torch.int64) - first[tensor_of]
        addresses = torch.tensor(sources, dtype=torch.int64)
        to_addresses = torch.tensor(targets, dtype=torch.int64) if targets is not None else addresses
        self._copies, self._programs = targets is not None, tensor_of.numel()
        self._tables = [t.to(device) for t in (addresses, to_addresses, counts, tensor_of.int(), block_of.int())]

    def launch(self, sums: Tensor | None) -> None:
        """Launch on the current stream; adds the checksums to ``sums`` if given, ``[len(sizes)]`` of int64."""
        found = sums if sums is not None else self._tables[2]
        _copy_and_sum[(self._programs,)](
            *self._tables, found, COPY=self._copies, SUM=sums is not None, BLOCK=BLOCK_WORDS, num_warps=8
        )
