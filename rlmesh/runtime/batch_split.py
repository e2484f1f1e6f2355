"""Splits the arguments of batch calls over the members of a group. No I/O."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rlmesh.errors import UsageError
from rlmesh.runtime.future import Future
from rlmesh.runtime.sequence import FutureSequence

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shared(Generic[T]):
    """Marks an argument that is given to every member whole."""

    value: T


def shared(value: T) -> T:
    """Give ``value`` to every member of a batch call although it could be split.

    For type checkers the result is the value itself, since the method gets that.
    """
    return Shared(value)  # type: ignore[return-value]


def balanced_sizes(size: int, world: int) -> list[int]:
    """Shard sizes that differ by at most one, larger ones first; members without items come last."""
    if size < 0 or world < 1:
        raise UsageError(f"cannot split {size} items over {world} members")
    base, extra = divmod(size, world)
    return [base + 1] * extra + [base] * (world - extra)


def is_splittable(value: object) -> bool:
    """True for lists, tuples, and arrays and tensors with at least one axis.

    Text, bytes, dicts and scalars are given to each member whole.
    """
    if isinstance(value, list | tuple):
        return True
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return bool(value.ndim > 0)
    if torch is not None and isinstance(value, torch.Tensor):
        return bool(value.dim() > 0)
    return isinstance(value, FutureSequence)


def named_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Pairs of an argument's name in messages and its value."""
    named = [(f"argument {i + 1}", value) for i, value in enumerate(args)]
    return named + [(f"argument {key!r}", value) for key, value in kwargs.items()]


def batch_size(what: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, tuple[Any, ...], str]:
    """The number of items of a batch call, the method's own arguments, and the argument that gave the number.

    An int directly after the method is the number of items. Otherwise the number is the length of the first argument
    that can be split.

    Args:
        what: the call, for messages.

    Raises:
        UsageError: no argument has items, or the first is a number of another kind.
    """
    first = args[0] if args else None
    if isinstance(first, int) and not isinstance(first, bool):
        rest = args[1:]
        if not any(_may_have_items(value) for value in (*rest, *kwargs.values())):
            raise UsageError(
                f"{what}: {first} counts as the number of items, but no argument after it has items. Pass them, as "
                "lists, tuples, arrays or tensors; to give every member the same arguments, use call()"
            )
        return first, rest, ""
    splittable = [(name, value) for name, value in named_arguments(args, kwargs) if is_splittable(value)]
    if hasattr(type(first), "__index__") and not isinstance(first, bool) and not is_splittable(first):
        raise UsageError(
            f"{what}: is {first!r:.80} ({type(first).__name__}) the number of items? Pass it as an int. If it is the "
            "method's own argument, pass the number of items before it"
        )
    if not splittable:
        raise UsageError(
            f"{what}: no argument has items to split. Pass a list, a tuple, an array or a tensor, or the number of "
            "items directly after the method"
        )
    name, value = splittable[0]
    return len(value), args, name


def _may_have_items(value: Any) -> bool:
    return is_splittable(value) or isinstance(value, Shared | Future)


def split_call(
    size: int, world: int, args: Sequence[Any], kwargs: Mapping[str, Any], source: str = ""
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments for each member that gets items of a batch of ``size`` items.

    Args:
        source: the argument that gave the size, for messages.

    Raises:
        UsageError: the length of an argument, which the error names, is not ``size``.
    """
    for name, value in named_arguments(args, kwargs):
        if is_splittable(value) and len(value) != size:
            raise UsageError(
                f"{name} of the batch call has {len(value)} items, but {source or 'the batch'} has {size}: pass {size} "
                "items, or wrap it as rlmesh.shared(…) to give it whole to every member"
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
        return value.part(part)  # The members fetch its items from their producers.
    return value[part] if is_splittable(value) else value


def scatter_call(
    world: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments for each member: item i of each splittable argument goes to member i.

    Raises:
        UsageError: an argument, which the error names, does not have one item per member.
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
