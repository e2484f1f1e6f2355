"""The ranks of an engine's role, and reductions over them. A process without a process group counts as one rank.

One rank alone asks nothing of its process group: at its first collective on a GPU, NCCL would take half a GiB there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def here() -> tuple[int, int]:
    """This rank, and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def several() -> bool:
    """True if there is more than one rank."""
    return dist.is_initialized() and dist.get_world_size() > 1


def summed(values: Tensor) -> Tensor:
    """The sum over all ranks, on every rank; ``values`` itself is changed."""
    if several():
        dist.all_reduce(values)
    return values


def largest(value: int, group: dist.ProcessGroup | None) -> int:
    """The largest of all ranks' numbers, on every rank; ``group`` comes from `side_group`, whose collectives run on the
    CPU."""
    if group is None or not several():
        return value
    found = torch.tensor(value)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return int(found)


def from_first(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Broadcast rank 0's value to all ranks."""
    if not several():
        return value
    held = [value]
    dist.broadcast_object_list(held, src=0, group=group, device=torch.device("cpu") if group is not None else None)
    return held[0]


def gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The values of all ranks, on every rank; ``group`` comes from `side_group`."""
    if group is None or not several():
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def side_group() -> dist.ProcessGroup | None:
    """Make a process group of all ranks on the CPU, whose collectives may run beside those of training. Collective."""
    return dist.new_group(backend="gloo") if dist.is_initialized() else None


def end_group(group: dist.ProcessGroup | None) -> None:
    """Destroy a group, unless the default group has ended already."""
    if group is not None and dist.is_initialized():
        dist.destroy_process_group(group)
