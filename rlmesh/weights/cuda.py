"""GPUs: who they are, and checksums and copies on them.

The checksum is that of `rlmesh.weights.checksum`, to the bit. With Triton (which torch for CUDA brings along) one
kernel takes all tensors of a bucket and sums while it copies; without it, torch sums rows and columns, which reads the
bytes twice more. Triton's kernels are tried on known data once per process before anybody relies on them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from rlmesh.weights.checksum import MASK

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

logger = logging.getLogger(__name__)

COLUMNS = 4096


def describe_device(device: str) -> tuple[str, tuple[str, ...], str]:
    """UUID of a GPU, UUIDs of those that this process sees and that can be reached from it, and why memory on it cannot
    be shared with other processes (empty: it can)."""
    import torch

    index = torch.device(device).index or 0
    uuids = [_uuid(i) for i in range(torch.cuda.device_count())]
    reachable = tuple(
        uuid for i, uuid in enumerate(uuids) if i != index and torch.cuda.can_device_access_peer(index, i)
    )
    from rlmesh.weights.cuda_memory import why_not_shared

    return uuids[index], reachable, why_not_shared()


@cache
def _uuid(index: int) -> str:
    import torch

    properties: Any = torch.cuda.get_device_properties(index)
    text = str(properties.uuid)
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"


def index_of(uuid: str) -> int:
    """The number of a GPU in this process.

    Raises:
        LookupError: this process does not see it.
    """
    import torch

    for index in range(torch.cuda.device_count()):
        if _uuid(index) == uuid:
            return index
    seen = ", ".join(_uuid(i) for i in range(torch.cuda.device_count()))
    raise LookupError(f"this process does not see the GPU {uuid}; it sees {seen}")


def checksums(pieces: Sequence[Tensor]) -> list[int]:
    """Of tensors of bytes ``[n]``, each contiguous, all on one device."""
    return copy_with_checksums(pieces, None)


def copy_with_checksums(sources: Sequence[Tensor], targets: Sequence[Tensor] | None) -> list[int]:
    """Copy tensors of bytes (or not, without targets), and give the checksums of what was copied. Waits for the end.

    ``sources`` may be on another GPU that ``targets``' one can reach.
    """
    import torch

    if not sources:
        return []
    device = (targets or sources)[0].device
    with torch.cuda.device(device) if device.type == "cuda" else _nothing():
        kernels = _kernels() if device.type == "cuda" else None
        results: dict[int, Any] = {}
        fit = [i for i in range(len(sources)) if kernels and _fits(sources[i], targets[i] if targets else None)]
        if kernels is not None and fit:
            chosen = [targets[i] for i in fit] if targets is not None else None
            sums = kernels.sum_words([sources[i] for i in fit], chosen, device)
            results.update(zip(fit, sums.tolist(), strict=True))
        for i in set(range(len(sources))) - results.keys():
            if targets is not None:
                targets[i].copy_(sources[i])
            results[i] = sum_by_torch(sources[i])
        return [int(results[i]) & MASK for i in range(len(sources))]


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def sum_by_torch(piece: Tensor) -> int:
    """The checksum of bytes ``[n]`` by sums over rows and columns of a table; on any device."""
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


def _fits(source: Tensor, target: Tensor | None) -> bool:
    """Whole, aligned words only; the rest goes by torch."""
    return (
        source.numel() > 0
        and source.numel() % 8 == 0
        and source.data_ptr() % 8 == 0
        and (target is None or (target.is_contiguous() and target.data_ptr() % 8 == 0))
    )


@cache
def _kernels() -> ModuleType | None:
    """The module of Triton kernels, if it works here."""
    import torch

    try:
        from rlmesh.weights import triton_kernels

        data = torch.arange(100_003 * 8, device="cuda", dtype=torch.int64).mul_(0x9E3779B97F4A7C1).view(torch.uint8)
        pieces = [data[: 8 * 5000], data[8 * 5000 :]]
        copies = [torch.empty_like(piece) for piece in pieces]
        sums = triton_kernels.sum_words(pieces, copies, data.device).tolist()
        right = [s & MASK for s in sums] == [sum_by_torch(piece) for piece in pieces]
        if right and all(torch.equal(a, b) for a, b in zip(pieces, copies, strict=True)):
            return triton_kernels
        logger.warning("Triton's checksums are not right on this GPU: torch sums instead, which takes longer")
    except Exception as error:
        logger.warning("checksums are not fused into copies, since Triton does not work here: %s", error)
    return None
