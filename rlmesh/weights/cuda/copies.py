"""Copies between pieces of GPU memory, with their checksums: how they are made is worked out once per set of addresses.

In the steady state of a weight sync the same addresses come in every push, so that all of its tensors are one launch.
On one GPU a kernel copies and sums in one pass (`triton_kernels`), which takes no longer than the copy alone. From
another GPU the copy engines bring the bytes in groups, and a kernel sums a group where it arrived while the next is on
its way. What does not fit (odd sizes, no Triton, an older driver) is copied and summed by torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from rlmesh.weights.cuda.devices import MASK, kernels, sum_by_torch
from rlmesh.weights.transfer.tensor_bytes import Placed

if TYPE_CHECKING:
    import torch
    from torch import Tensor

GROUP_BYTES = 1 << 30
MAX_PREPARED = 64

_prepared: dict[Any, _Work] = {}


def copy(
    sources: Sequence[Tensor], targets: Sequence[Tensor] | None, sizes: Sequence[int], at: Sequence[int] | None = None,
    *, summed: bool, before: Callable[[], object] | None = None, meanwhile: Callable[[], object] | None = None,
) -> list[int]:  # fmt: skip
    """Copy pieces, and wait for the end. Gives the checksums of what was copied; nothing unless ``summed``.

    Args:
        sources: contiguous tensors of any type and shape, all on one GPU; it may be another one than that of the
            targets, if that can reach it.
        targets: contiguous tensors of any type and shape, on one GPU; None: sum only, on the current GPU.
        sizes: of the sources, in bytes.
        at: the byte of each target at which its piece begins; None: the first.
        before: called when all is prepared, before the sources are read.
        meanwhile: what this thread does while a GPU works.
    """
    import torch

    before, meanwhile = before or _nothing, meanwhile or _nothing
    if not sources:
        meanwhile()
        return []
    device = targets[0].device if targets else torch.device("cuda", torch.cuda.current_device())
    with torch.cuda.device(device):
        work = _work(sources, targets, sizes, at, device)
        return work.run(sources, targets, at, summed, before, meanwhile)


def start(sources: Sequence[Tensor], targets: Sequence[Tensor], sizes: Sequence[int], sums: Tensor | None) -> bool:
    """Start to copy pieces on one GPU, on the current stream, and do not wait for the end.

    Args:
        sums: ``[len(sizes)]`` of int64 there, into which their checksums are written; None: nothing is summed.

    Returns:
        Whether that could be done; otherwise nothing was started, and `copy` does it.
    """
    import torch

    with torch.cuda.device(targets[0].device):
        return _work(sources, targets, sizes, None, targets[0].device).start(sources, targets, sums)


def _work(
    sources: Sequence[Tensor], targets: Sequence[Tensor] | None, sizes: Sequence[int], at: Sequence[int] | None,
    device: torch.device,
) -> _Work:  # fmt: skip
    """Of these addresses, prepared now or before."""
    froms = _addresses(sources)
    tos = _addresses(targets) if targets is not None else None
    if tos is not None and at is not None:
        tos = tuple([to + start for to, start in zip(tos, at, strict=True)])
    key = (device, sources[0].device, froms, tos, tuple(sizes))
    work = _prepared.get(key)
    if work is None:
        if len(_prepared) >= MAX_PREPARED:
            _prepared.clear()
        work = _prepared[key] = _Work(froms, tos, sizes, sources[0].device, device)
    return work


def _addresses(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tensors.addresses if isinstance(tensors, Placed) else tuple([tensor.data_ptr() for tensor in tensors])


def _nothing() -> None:
    return


class _Work:
    """All that is known of a set of copies from its addresses. Holds no memory but its own tables."""

    def __init__(
        self, froms: Sequence[int], tos: Sequence[int] | None, sizes: Sequence[int], source: torch.device,
        device: torch.device,
    ) -> None:  # fmt: skip
        from rlmesh.memory.cuda_driver import driver

        self._device, self._count = device, len(sizes)
        self._batches: list[tuple[Any, Any, list[int]]] = []
        self._table: tuple[Any, list[int]] | None = None
        by_kernel = kernels()
        fit = [i for i, size in enumerate(sizes) if by_kernel and size and _fits(by_kernel, froms[i], tos, i, size)]
        if by_kernel is None or not fit:
            fit = []
        elif tos is None or source == device:
            goals = [tos[i] for i in fit] if tos is not None else None
            self._table = by_kernel.Table([froms[i] for i in fit], goals, [sizes[i] for i in fit], device), fit
        elif driver().has_batches:
            for group in _groups(fit, sizes):
                batch = driver().batch([(tos[i], froms[i], sizes[i]) for i in group], source.index, device.index)
                arrived = by_kernel.Table([tos[i] for i in group], None, [sizes[i] for i in group], device)
                self._batches.append((batch, arrived, group))
        else:
            fit = []
        self._by_torch = sorted(set(range(self._count)) - set(fit))

    def start(self, sources: Sequence[Tensor], targets: Sequence[Tensor], sums: Tensor | None) -> bool:
        """See the function."""
        if self._table is None or self._batches or (sums is not None and self._by_torch):
            return False
        if sums is not None:
            sums.zero_()
        self._table[0].launch(sums)
        _plainly(*_only(self._by_torch, sources, targets, None), summed=False)
        return True

    def run(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor] | None, at: Sequence[int] | None, summed: bool,
        before: Callable[[], object], meanwhile: Callable[[], object],
    ) -> list[int]:  # fmt: skip
        """These must be what the addresses are of."""
        import torch

        stream = torch.cuda.current_stream(self._device)
        sums = torch.zeros(self._count, dtype=torch.int64, device=self._device) if summed else None
        order: list[int] = []
        before()
        if self._table is not None:
            table, order = self._table
            table.launch(sums)
        if self._batches:
            side = _side_stream(self._device)
            side.wait_stream(stream)
            for batch, arrived, group in self._batches:
                batch.start(side.cuda_stream)
                if sums is not None:
                    stream.wait_stream(side)
                    arrived.launch(sums[len(order) : len(order) + len(group)])
                order = order + group
            stream.wait_stream(side)
        rest = _plainly(*_only(self._by_torch, sources, targets, at), summed) if self._by_torch else []
        try:
            meanwhile()
        finally:
            stream.synchronize()  # whatever fails: nobody may think that the memory is at rest before it is
        if sums is None:
            return []
        found = dict(zip(order, sums[: len(order)].tolist(), strict=True))
        found.update(zip(self._by_torch, rest, strict=True))
        return [found[i] & MASK for i in range(self._count)]


def _fits(by_kernel: Any, start: int, tos: Sequence[int] | None, i: int, size: int) -> bool:
    """Whole words at aligned addresses."""
    unit = by_kernel.ALIGNMENT
    return size % 8 == 0 and start % unit == 0 and (tos is None or tos[i] % unit == 0)


def _groups(chosen: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Runs of at most `GROUP_BYTES`, or of one."""
    groups: list[list[int]] = []
    filled = GROUP_BYTES
    for i in chosen:
        if filled + sizes[i] > GROUP_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(i)
        filled += sizes[i]
    return groups


def _only(
    chosen: Sequence[int], sources: Sequence[Tensor], targets: Sequence[Tensor] | None, at: Sequence[int] | None
) -> tuple[list[Tensor], list[Tensor] | None, list[int] | None]:
    return (
        [sources[i] for i in chosen],
        [targets[i] for i in chosen] if targets is not None else None,
        [at[i] for i in chosen] if at is not None else None,
    )


def _plainly(
    sources: Sequence[Tensor], targets: Sequence[Tensor] | None, at: Sequence[int] | None, summed: bool
) -> list[int]:
    """By torch, one after the other."""
    import torch

    sums = []
    for i, source in enumerate(sources):
        piece = bytes_of(source)
        if targets is not None:
            start = at[i] if at is not None else 0
            place = bytes_of(targets[i])[start : start + piece.numel()]
            place.copy_(piece, non_blocking=True)
        elif piece.is_cuda:
            # Kernels of the other GPU do not reach memory that was opened for this one's.
            place = piece.to(torch.device("cuda", torch.cuda.current_device()), non_blocking=True)
        else:
            place = piece
        if summed:
            sums.append(sum_by_torch(place))
    return sums


def bytes_of(tensor: Tensor) -> Tensor:
    """``[n]`` of uint8 over a contiguous tensor's memory."""
    import torch

    flat = tensor.detach().view(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8, device=flat.device)


@cache
def _side_stream(device: torch.device) -> Any:
    """For the copy engines: they refuse the default stream."""
    import torch

    return torch.cuda.Stream(device)
