"""Which part of a batch goes to which member. Pure."""

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


def batch_size(what: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, tuple[Any, ...], str]:
    """The number of items of a batch call, the method's own arguments, and the argument that gave the number.

    An int directly after the method is the number of items. Otherwise it is the length of the first argument that can
    be split.

    Args:
        what: names the call in messages.

    Raises:
        UsageError: no argument has items, or the first is a number of another kind.
    """
    first = args[0] if args else None
    if isinstance(first, int) and not isinstance(first, bool):
        rest = args[1:]
        if not any(_may_have_items(value) for value in (*rest, *kwargs.values())):
            raise UsageError(
                f"{what}: {first} is taken for the number of items, but no argument after it has items. Pass them, as "
                "lists, tuples, arrays or tensors; if every member is to get the same arguments, use call()"
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
    """Arguments per member for a batch of ``size`` items; only the members that get items.

    Args:
        source: names the argument that gave the size.

    Raises:
        UsageError: naming the argument whose length is not ``size``.
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
