"""`RoleGroup`: calls to all members of a role, to some, or to one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, Generic, TypeVar, overload

from rlmesh.errors import RoleNotFound, UsageError
from rlmesh.runtime.address import member_name
from rlmesh.runtime.future import Future, gather
from rlmesh.runtime.handle import CallOptions
from rlmesh.runtime.handle import MemberHandle as MemberHandle
from rlmesh.runtime.rpc import method_name
from rlmesh.runtime.runtime import Runtime, default_runtime
from rlmesh.runtime.sequence import FutureSequence
from rlmesh.runtime.split import balanced_sizes, scatter_call, split_call
from rlmesh.runtime.split import shared as shared
from rlmesh.runtime.timing import CallGroup

R = TypeVar("R")
A = TypeVar("A")


def role_name(role: object) -> str:
    """A role's name from its name, an enum member such as ``RLRoleType.ACTOR``, or a class (upper case)."""
    if isinstance(role, str):
        return role
    if isinstance(role, Enum):
        return role.name
    if isinstance(role, type):
        return role.__name__.upper()
    raise UsageError(f"RoleGroup({role!r}): pass the role's name or RLRoleType member")


class RoleGroup(Generic[A]):
    """All members of a role, or a slice of them.

    Usable in any process of the job. Calls go straight to the members' processes. Waits fail fast: the first
    failure of any member raises, as that member's own error.
    """

    def __init__(
        self, role: str | Enum | type[A], *, runtime: Runtime | None = None, ranks: tuple[int, ...] | None = None,
        options: CallOptions | None = None,
    ) -> None:  # fmt: skip
        self.role = role_name(role)
        self._runtime = runtime
        self._ranks = ranks
        self._options = options or CallOptions()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the members that calls go to."""
        if self._ranks is not None:
            return self._ranks
        return tuple(member.rank for member in self._caller().address_book().role(self.role))

    def __len__(self) -> int:
        return len(self.ranks)

    @overload
    def __getitem__(self, index: int) -> MemberHandle: ...
    @overload
    def __getitem__(self, index: slice) -> RoleGroup[A]: ...
    def __getitem__(self, index: int | slice) -> MemberHandle | RoleGroup[A]:
        ranks = self.ranks
        if isinstance(index, slice):
            return RoleGroup(self.role, runtime=self._runtime, ranks=ranks[index], options=self._options)
        try:
            rank = ranks[index]
        except IndexError:
            raise RoleNotFound(f"{self.role} has {len(ranks)} members; there is no member {index}") from None
        return MemberHandle(self._caller(), member_name(self.role, rank), options=self._options)

    def __iter__(self) -> Iterator[MemberHandle]:
        return (self[i] for i in range(len(self)))

    def options(self, *, timeout_s: float | None = None) -> RoleGroup[A]:
        """The same members with other options for their calls."""
        changed = self._options.changed(timeout_s=timeout_s)
        return RoleGroup(self.role, runtime=self._runtime, ranks=self._ranks, options=changed)

    @overload
    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Future[list[Any]]: ...
    @overload
    def call(self, method: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[list[R]]: ...
    def call(
        self, method: Any, /, *args: Any, _scatter: bool = False, return_exceptions: bool = False, **kwargs: Any
    ) -> Future[Any]:
        """Call every member; the future gives their results by rank.

        Args:
            method: the function, the method, its stub, or its name.
            _scatter: give item i of each list, tuple, array or tensor to member i.
            return_exceptions: give errors in the places of results instead of raising the first.
        """
        ranks = self.ranks
        calls = scatter_call(len(ranks), args, kwargs) if _scatter else [(args, kwargs)] * len(ranks)
        return gather(self._submit(method, ranks, calls), return_exceptions=return_exceptions)

    @overload
    def call_rank0(self, method: str, /, *args: Any, **kwargs: Any) -> Future[Any]: ...
    @overload
    def call_rank0(self, method: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]: ...
    def call_rank0(self, method: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call the first member only."""
        return self[0].call(method, *args, **kwargs)

    @overload
    def call_batch(self, method: str, size: int, /, *args: Any, **kwargs: Any) -> FutureSequence[Any]: ...
    @overload
    def call_batch(
        self, method: Callable[..., Any], size: int, /, *args: Any, **kwargs: Any
    ) -> FutureSequence[Any]: ...
    def call_batch(self, method: Any, size: int, /, *args: Any, **kwargs: Any) -> FutureSequence[Any]:
        """Split a batch over the members, balanced to within one item.

        Lists, tuples, arrays and tensors (along dim 0) are split; text, bytes, dicts and scalars are copied, and
        so is what is wrapped in ``rlmesh.shared``. Members that would get no item are not called.

        Args:
            size: number of items; each splittable argument has this length.

        Returns:
            One result per item; the method returns one per item that it was given.
        """
        ranks = self.ranks
        calls = split_call(size, len(ranks), args, kwargs)
        futures = self._submit(method, ranks[: len(calls)], calls)
        return FutureSequence(futures, balanced_sizes(size, len(ranks))[: len(calls)], method_name(method))

    def notify(self, method: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> None:
        """Call every member without waiting for ends or errors (the members log them)."""
        for member in self:
            member.notify(method, *args, **kwargs)

    def _submit(
        self, method: Any, ranks: tuple[int, ...], calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    ) -> list[Future[Any]]:
        if not ranks:
            return []
        caller, remote = self._caller(), method_name(method)
        group = CallGroup(len(ranks)) if len(ranks) > 1 else None
        frames = caller.encode_calls(remote, calls)
        return [
            caller.submit_encoded(member_name(self.role, rank), remote, encoded, self._options, group=group)
            for rank, encoded in zip(ranks, frames, strict=True)
        ]

    def _caller(self) -> Runtime:
        return self._runtime or default_runtime()

    def __repr__(self) -> str:
        ranks = "" if self._ranks is None else f" ranks {list(self._ranks)}"
        return f"<RoleGroup {self.role}{ranks}>"
