"""GPUs: their UUIDs, and the checksum that is computed on them.

The checksum of a tensor is a sum of its bytes as 64-bit integers, weighted by their position, modulo 2**64::

    checksum = Σ (2·i + 1) · w_i      over the little-endian 64-bit words w_i, the last one padded with zeros

The factors are odd, so each change of a single word changes the sum. They differ, so most exchanges of two words change
it too; but they differ by even numbers, so an exchange of two words that differ in their highest bit alone does not.
A sum of integers does not depend on the order, so that thousands of threads can compute it. With Triton (which torch
for CUDA includes) a kernel sums while it copies (`copies`); without it, torch sums rows and columns, which reads the
bytes two more times. Triton's kernels are tested on known data once per process before they are used.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

logger = logging.getLogger(__name__)

MASK = (1 << 64) - 1
COLUMNS = 4096


def describe_device(device: str) -> tuple[str, tuple[str, ...], tuple[str, ...], str]:
    """A GPU's UUID, the UUIDs of the visible and of the hidden GPUs that it can reach, and the reason why its memory
    cannot be shared with other processes (empty: it can)."""
    import torch

    index = torch.device(device).index or 0
    uuids = [uuid_of(i) for i in range(torch.cuda.device_count())]
    reachable = tuple(
        uuid for i, uuid in enumerate(uuids) if i != index and torch.cuda.can_device_access_peer(index, i)
    )
    from rlmesh.weights.cuda.memory import why_not_shared

    return uuids[index], reachable, _hidden_peers(uuids[index], uuids), why_not_shared()


def _hidden_peers(uuid: str, visible: Collection[str]) -> tuple[str, ...]:
    """The GPUs that a mask hides from this process (CUDA_VISIBLE_DEVICES), and whose memory this GPU can read."""
    from rlmesh.placement.machine.nvml import Nvml, NvmlFailed, library

    try:
        return tuple(each for each in Nvml(library()).reached_by(uuid) if each not in visible)
    except NvmlFailed as error:
        logger.debug("which hidden GPUs can be reached is not known: %s", error)
        return ()


@cache
def uuid_of(index: int) -> str:
    """A GPU's UUID, equal in all processes."""
    import torch

    properties: Any = torch.cuda.get_device_properties(index)
    text = str(properties.uuid)
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"


def index_of(uuid: str) -> int:
    """The index of a GPU in this process.

    Raises:
        LookupError: the GPU is not visible to this process.
    """
    import torch

    for index in range(torch.cuda.device_count()):
        if uuid_of(index) == uuid:
            return index
    visible = ", ".join(uuid_of(i) for i in range(torch.cuda.device_count()))
    raise LookupError(f"the GPU {uuid} is not visible to this process; visible are {visible}")


def reference(data: bytes) -> int:
    """The checksum computed word by word from its definition: slow, for tests."""
    padded = data + bytes(-len(data) % 8)
    words = (int.from_bytes(padded[at : at + 8], "little") for at in range(0, len(padded), 8))
    return sum((2 * i + 1) * word for i, word in enumerate(words)) & MASK


def sum_by_torch(piece: Tensor) -> int:
    """The checksum of ``[n]`` bytes from sums over rows and columns of a table; on any device."""
    import torch

    nbytes = piece.numel()
    row_bytes = 8 * COLUMNS
    whole = nbytes // row_bytes * row_bytes
    total = 0
    if whole:
        head = piece[:whole]
        table = (head if head.data_ptr() % 8 == 0 else head.clone()).view(torch.int64).view(-1, COLUMNS)
        total += _weighted(table.sum(1), 2 * COLUMNS, 1) + _weighted(table.sum(0), 2, 0)
    if whole < nbytes:
        rest = torch.zeros(row_bytes, dtype=torch.uint8, device=piece.device)
        rest[: nbytes - whole] = piece[whole:]
        total += _weighted(rest.view(torch.int64), 2, 2 * (whole // 8) + 1)
    return total & MASK


def _weighted(words: Tensor, step: int, first: int) -> int:
    """Σ (first + step·i) · words_i, modulo 2**64."""
    import torch

    weights = torch.arange(words.numel(), dtype=torch.int64, device=words.device) * step + first
    return int((words * weights).sum().item()) & MASK


@cache
def kernels() -> ModuleType | None:
    """The module of Triton kernels; None if it does not work here."""
    import torch

    try:
        from rlmesh.weights.cuda import triton_kernels

        data = torch.arange(100_003 * 8, device="cuda", dtype=torch.int64).mul_(0x9E3779B97F4A7C1).view(torch.uint8)
        pieces = [data[: 8 * 5000], data[8 * 5000 :]]
        copies = [torch.empty_like(piece) for piece in pieces]
        sums = torch.zeros(len(pieces), dtype=torch.int64, device="cuda")
        sources, targets = ([piece.data_ptr() for piece in each] for each in (pieces, copies))
        triton_kernels.Table(sources, targets, [piece.numel() for piece in pieces], data.device).launch(sums)
        right = [s & MASK for s in sums.tolist()] == [sum_by_torch(piece) for piece in pieces]
        if right and all(torch.equal(a, b) for a, b in zip(pieces, copies, strict=True)):
            return triton_kernels
        logger.warning("Triton's checksums are not right on this GPU: torch sums instead, which takes longer")
    except Exception as error:
        logger.warning("checksums are not fused into copies, since Triton does not work here: %s", error)
    return None
