"""Tensors as bytes and back, for NumPy and for torch alike.

A *piece* is the memory of one tensor of a bucket: ``[n]`` of uint8, contiguous, a NumPy array on a CPU and a torch
tensor on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from rlmesh.errors import WeightSyncError
from rlmesh.weights.transfer.checksum import checksums, units

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Piece: TypeAlias = Bytes | torch.Tensor

NUMPY_TYPES = frozenset(
    {"bool", "uint8", "int8", "int16", "uint16", "float16", "int32", "uint32", "float32", "int64", "uint64", "float64",
     "complex64"}
)  # fmt: skip


class Placed(list[Any]):
    """Tensors that stay where they are for as long as the list is used, and their addresses: to ask hundreds of tensors
    at every push takes longer than to launch their copy."""

    def __init__(self, tensors: Iterable[Any], addresses: Sequence[int] | None = None) -> None:
        super().__init__(tensors)
        self.addresses = tuple([t.data_ptr() for t in self] if addresses is None else addresses)


def is_torch(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def dtype_name(tensor: Any) -> str:
    """The element type's name, as torch calls it."""
    return str(tensor.dtype).removeprefix("torch.")


def host_bytes(tensor: Any, dtype: str) -> Bytes:
    """A tensor's elements as ``dtype``, in C order, in this machine's memory: the tensor's own memory where it is that
    already, else a copy."""
    import numpy as np

    if is_torch(tensor):
        import torch

        flat = tensor.detach().to(device="cpu", dtype=getattr(torch, dtype)).contiguous().reshape(-1)
        array: Bytes = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
        return array
    if dtype not in NUMPY_TYPES:
        raise WeightSyncError(f"NumPy has no {dtype}: sync to a sink of another type, or from tensors of torch")
    values: Bytes = np.ascontiguousarray(tensor, dtype=dtype).reshape(-1).view(np.uint8)
    return values


def tensor_of(piece: Any, dtype: str, shape: Sequence[int], framework: str) -> Any:
    """The tensor that a piece is the memory of; no copy."""
    if is_torch(piece):
        import torch

        return piece.view(getattr(torch, dtype)).view(tuple(shape))
    if framework == "torch":
        import torch

        if not piece.nbytes:
            return torch.empty(tuple(shape), dtype=getattr(torch, dtype))
        return torch.from_numpy(piece).view(getattr(torch, dtype)).view(tuple(shape))
    if dtype not in NUMPY_TYPES:
        raise WeightSyncError(f"NumPy has no {dtype}: let the sink take float32, or use a sink of torch")
    return piece.view(dtype).reshape(tuple(shape))


def in_memory(piece: Any) -> Bytes:
    """A piece of this machine's memory as an array; no copy."""
    array: Bytes = piece.numpy() if is_torch(piece) else piece
    return array


def how_many_checksums(piece: Any) -> int:
    """On a GPU one, else one for each unit."""
    return 1 if is_torch(piece) and piece.is_cuda else units(piece.nbytes)


def checksums_of(pieces: Sequence[Any]) -> list[list[int]]:
    """Of each piece, wherever it lies."""
    if any(is_torch(piece) and piece.is_cuda for piece in pieces):
        from rlmesh.weights.cuda.copies import copy

        return [[one] for one in copy(pieces, None, [piece.nbytes for piece in pieces], summed=True)]
    return [checksums(in_memory(piece)) for piece in pieces]
