"""Copies between pieces of GPU memory, with checksums. A set of addresses is prepared once.

In the steady state of a weight sync every push has the same addresses, so that one launch copies all tensors. On one
GPU a kernel copies and sums in one pass (`triton_kernels`), which takes no longer than the copy alone. From another GPU
the copy engines transfer groups of tensors, and a kernel sums each group at its target while the next is transferred.
Torch copies and sums the rest (odd sizes, no Triton, an older driver).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from rlmesh.weights.cuda.devices import MASK, kernels, sum_by_torch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

GROUP_BYTES = 1 << 30
MAX_PREPARED = 64

_prepared: dict[Any, _PreparedCopy] = {}


class AddressedTensors(list[Any]):
    """Tensors that keep their addresses for the life of the list, with these addresses.

    Asking hundreds of tensors for their addresses at every push would take longer than launching their copy.
    """

    def __init__(self, tensors: Iterable[Any], addresses: Sequence[int] | None = None) -> None:
        super().__init__(tensors)
        self.addresses = tuple([t.data_ptr() for t in self] if addresses is None else addresses)


def copy(
    sources: Sequence[Tensor], targets: Sequence[Tensor] | None, sizes: Sequence[int], at: Sequence[int] | None = None,
    *, summed: bool, before: Callable[[], object] | None = None, meanwhile: Callable[[], object] | None = None,
) -> list[int]:  # fmt: skip
    """Copy pieces, and wait for the end; returns the checksums of the copies, nothing unless ``summed``.

    Args:
        sources: contiguous tensors of any type and shape, all on one GPU; it may be another GPU than that of the
            targets, if that GPU can reach it.
        targets: contiguous tensors of any type and shape, on one GPU; None: sum only, on the current GPU.
        sizes: of the sources, in bytes.
        at: the byte of each target at which its piece begins; None: the first.
        before: called when the copy is prepared, before the sources are read.
        meanwhile: called while the GPU works.
    """
    import torch

    before, meanwhile = before or _nothing, meanwhile or _nothing
    if not sources:
        meanwhile()
        return []
    device = targets[0].device if targets else torch.device("cuda", torch.cuda.current_device())
    with torch.cuda.device(device):
        prepared = _prepare(sources, targets, sizes, at, device)
        return prepared.run(sources, targets, at, summed, before, meanwhile)


def start(sources: Sequence[Tensor], targets: Sequence[Tensor], sizes: Sequence[int], sums: Tensor | None) -> bool:
    """Start to copy pieces on one GPU, on the current stream, without waiting for the end.

    Args:
        sums: ``[len(sizes)]`` of int64 on that GPU, for the checksums; None: nothing is summed.

    Returns:
        False if nothing was started, since this copy needs `copy`.
    """
    import torch

    with torch.cuda.device(targets[0].device):
        return _prepare(sources, targets, sizes, None, targets[0].device).start(sources, targets, sums)


def _prepare(
    sources: Sequence[Tensor], targets: Sequence[Tensor] | None, sizes: Sequence[int], at: Sequence[int] | None,
    device: torch.device,
) -> _PreparedCopy:  # fmt: skip
    """The copy between these addresses, prepared now or by an earlier call."""
    froms = _addresses(sources)
    tos = _addresses(targets) if targets is not None else None
    if tos is not None and at is not None:
        tos = tuple([to + start for to, start in zip(tos, at, strict=True)])
    key = (device, sources[0].device, froms, tos, tuple(sizes))
    prepared = _prepared.get(key)
    if prepared is None:
        if len(_prepared) >= MAX_PREPARED:
            _prepared.clear()
        prepared = _prepared[key] = _PreparedCopy(froms, tos, sizes, sources[0].device, device)
    return prepared


def _addresses(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tensors.addresses if isinstance(tensors, AddressedTensors) else tuple([t.data_ptr() for t in tensors])


def _nothing() -> None:
    return


class _PreparedCopy:
    """The kernels' tables and the batches for a set of addresses. Keeps no tensor alive."""

    def __init__(
        self, froms: Sequence[int], tos: Sequence[int] | None, sizes: Sequence[int], source: torch.device,
        device: torch.device,
    ) -> None:  # fmt: skip
        from rlmesh.memory.cuda_driver import driver

        self._device, self._count = device, len(sizes)
        self._batches: list[tuple[Any, Any, list[int]]] = []
        self._table: tuple[Any, list[int]] | None = None
        triton = kernels()
        fit = [i for i, size in enumerate(sizes) if triton and size and _fits(triton, froms[i], tos, i, size)]
        if triton is None or not fit:
            fit = []
        elif tos is None or source == device:
            to_addresses = [tos[i] for i in fit] if tos is not None else None
            self._table = triton.Table([froms[i] for i in fit], to_addresses, [sizes[i] for i in fit], device), fit
        elif driver().has_batches:
            for group in _groups(fit, sizes):
                batch = driver().batch([(tos[i], froms[i], sizes[i]) for i in group], source.index, device.index)
                arrived = triton.Table([tos[i] for i in group], None, [sizes[i] for i in group], device)
                self._batches.append((batch, arrived, group))
        else:
            fit = []
        self._by_torch = sorted(set(range(self._count)) - set(fit))

    def start(self, sources: Sequence[Tensor], targets: Sequence[Tensor], sums: Tensor | None) -> bool:
        """See the function `start`."""
        if self._table is None or self._batches or (sums is not None and self._by_torch):
            return False
        if sums is not None:
            sums.zero_()
        self._table[0].launch(sums)
        _copy_by_torch(*_only(self._by_torch, sources, targets, None), summed=False)
        return True

    def run(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor] | None, at: Sequence[int] | None, summed: bool,
        before: Callable[[], object], meanwhile: Callable[[], object],
    ) -> list[int]:  # fmt: skip
        """Copy and wait; ``sources`` and ``targets`` must be the tensors at the prepared addresses."""
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
        rest = _copy_by_torch(*_only(self._by_torch, sources, targets, at), summed) if self._by_torch else []
        try:
            meanwhile()
        finally:
            stream.synchronize()  # also after an error: the caller may reuse the memory
        if sums is None:
            return []
        found = dict(zip(order, sums[: len(order)].tolist(), strict=True))
        found.update(zip(self._by_torch, rest, strict=True))
        return [found[i] & MASK for i in range(self._count)]


def _fits(triton: Any, start: int, tos: Sequence[int] | None, i: int, size: int) -> bool:
    """True for whole words at aligned addresses."""
    unit = triton.ALIGNMENT
    return size % 8 == 0 and start % unit == 0 and (tos is None or tos[i] % unit == 0)


def _groups(chosen: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Groups of at most `GROUP_BYTES`, or of one piece."""
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


def _copy_by_torch(
    sources: Sequence[Tensor], targets: Sequence[Tensor] | None, at: Sequence[int] | None, summed: bool
) -> list[int]:
    """Copy and sum with torch, one piece after the other."""
    import torch

    sums = []
    for i, source in enumerate(sources):
        piece = bytes_of(source)
        if targets is not None:
            start = at[i] if at is not None else 0
            place = bytes_of(targets[i])[start : start + piece.numel()]
            place.copy_(piece, non_blocking=True)
        elif piece.is_cuda:
            # Kernels of the other GPU cannot read memory that was opened for this GPU.
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
    """A stream for the copy engines, which refuse the default stream."""
    import torch

    return torch.cuda.Stream(device)
