"""Which part of a batch goes to which member. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rlmesh.errors import UsageError
from rlmesh.runtime.sequence import FutureSequence

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shared(Generic[T]):
    """Marks an argument that every member gets whole."""

    value: T


def shared(value: T) -> T:
    """Give ``value`` to every member of a batch call although it could be split.

    To type checkers it is the value itself, since that is what the method gets.
    """
    return Shared(value)  # type: ignore[return-value]


def balanced_sizes(size: int, world: int) -> list[int]:
    """Shard sizes that differ by at most one, larger ones first; members without items come last."""
    if size < 0 or world < 1:
        raise UsageError(f"cannot split {size} items over {world} members")
    base, extra = divmod(size, world)
    return [base + 1] * extra + [base] * (world - extra)


def is_splittable(value: object) -> bool:
    """Lists, tuples, arrays and tensors with at least one axis; text, bytes, dicts and scalars are copied."""
    if isinstance(value, list | tuple):
        return True
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return bool(value.ndim > 0)
    if torch is not None and isinstance(value, torch.Tensor):
        return bool(value.dim() > 0)
    return isinstance(value, FutureSequence)


def named_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Each with what messages call it."""
    named = [(f"argument {i + 1}", value) for i, value in enumerate(args)]
    return named + [(f"argument {key!r}", value) for key, value in kwargs.items()]


def split_call(
    size: int, world: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments per member for a batch of ``size`` items; only the members that get items.

    Raises:
        UsageError: naming the argument whose length is not ``size``.
    """
    if isinstance(size, bool) or not isinstance(size, int):
        raise UsageError(f"call_batch's second argument is the number of items, an int, not {type(size).__name__}")
    for name, value in named_arguments(args, kwargs):
        if is_splittable(value) and len(value) != size:
            raise UsageError(
                f"{name} of the batch call has {len(value)} items, but the batch has {size}: pass {size} items, "
                "or wrap it as rlmesh.shared(…) to give it whole to every member"
            )
    calls = []
    start = 0
    for count in balanced_sizes(size, world):
        if count == 0:
            break
        part = slice(start, start + count)
        start += count
        calls.append((tuple(_part(v, part) for v in args), {k: _part(v, part) for k, v in kwargs.items()}))
    return calls


def _part(value: Any, part: slice) -> Any:
    if isinstance(value, Shared):
        return value.value
    if isinstance(value, FutureSequence):
        return value.part(part)  # The members get its items from where they are.
    return value[part] if is_splittable(value) else value


def scatter_call(
    world: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Item i of each splittable argument to member i.

    Raises:
        UsageError: naming the argument that has not one item per member.
    """
    for name, value in named_arguments(args, kwargs):
        if is_splittable(value) and len(value) != world:
            raise UsageError(f"{name} has {len(value)} items for a scatter over {world} members")

    def item(value: Any, rank: int) -> Any:
        if isinstance(value, Shared):
            return value.value
        if isinstance(value, FutureSequence):
            return value.item(rank)
        return value[rank] if is_splittable(value) else value

    return [
        (tuple(item(v, rank) for v in args), {k: item(v, rank) for k, v in kwargs.items()}) for rank in range(world)
    ]
