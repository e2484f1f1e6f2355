"""`RoleGroup`: calls to all members of a role, to some of them, or to one."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import replace
from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, overload

from rlmesh.errors import RoleNotFound, UsageError
from rlmesh.runtime.argument_types import require
from rlmesh.runtime.batch_split import balanced_sizes, batch_size, scatter_call, split_call
from rlmesh.runtime.batch_split import shared as shared
from rlmesh.runtime.calling.call_stats import CallGroup
from rlmesh.runtime.calling.gathering import GroupOutcomes, gather
from rlmesh.runtime.calling.outbound import Outbound
from rlmesh.runtime.calling.pending import RankLoop
from rlmesh.runtime.connections.address_book import member_name, role_name
from rlmesh.runtime.default_runtime import default_runtime
from rlmesh.runtime.future import Future
from rlmesh.runtime.handle import A, CallOptions, Items, NoSuchAttribute, P, R, X
from rlmesh.runtime.handle import MemberHandle as MemberHandle
from rlmesh.runtime.rpc import has_parameter, method_name
from rlmesh.runtime.runtime import Runtime
from rlmesh.runtime.sequence import FutureSequence

if TYPE_CHECKING:
    from rlmesh.runtime.group_views import CollectedGroup, ScatteredGroup
    from rlmesh.runtime.streams import Stream

_rank_of = attrgetter("rank")


class RoleGroup(Generic[A]):
    """All members of a role, or some of them.

    Usable in any process of the job. Calls go straight to the members' processes. Waits fail fast: the first
    failure of any member raises, as that member's own error.

    ``RoleGroup(Actor)`` and ``RoleGroup[Actor]("ACTOR")`` are typed: type checkers know the results of
    ``group.call(Actor.forward, x)`` and find wrong methods and arguments. ``group[1:3]``, ``group.along("dp")`` and
    ``group.options(…)`` are views of the same members. ``RoleGroup("ROLLOUT/prefill")``, or
    ``RoleGroup("ROLLOUT", group="prefill")``, has the members of one of the groups that
    ``.with_groups(prefill=…, decode=…)`` made of a role. ``RoleGroup("REFERENCE", optional=True)`` is empty, and false,
    if the job has no such role.
    """

    def __init__(
        self, role: str | Enum | type[A], *, group: str = "", runtime: Runtime | None = None,
        ranks: tuple[int, ...] | None = None, options: CallOptions | None = None, optional: bool = False,
    ) -> None:  # fmt: skip
        require("RoleGroup(optional=…)", optional, bool, "True or False")
        if runtime is not None:
            require("RoleGroup(runtime=…)", runtime, Runtime, "a Runtime")
        if options is not None:
            require("RoleGroup(options=…)", options, CallOptions, "CallOptions: use group.options(timeout_s=…)")
        require("RoleGroup(ranks=…)", ranks, tuple | None, "a tuple of numbers")
        if ranks is not None and not all(type(rank) is int for rank in ranks):
            raise UsageError(f"RoleGroup(ranks=…): they are a tuple of numbers, not {ranks!r:.80}")
        require("RoleGroup(group=…)", group, str, "the name of a group")
        self.role, _, named = role_name(role).partition("/")
        self.group = group or named
        self._runtime = runtime
        self._ranks = ranks
        self._options = options or CallOptions()
        self._rank_loop = RankLoop()
        self._optional = optional

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the members that calls go to."""
        if self._ranks is not None:
            return self._ranks
        book = (self._runtime or default_runtime()).outbound.address_book()
        if self._optional and self.role not in book.roles():
            return ()
        if self.group:
            members = book.group(self.role, self.group)
        else:
            members = book.by_role.get(self.role) or book.role(self.role)
        return tuple(map(_rank_of, members))

    def __len__(self) -> int:
        return len(self.ranks)

    @overload
    def __getitem__(self, index: int) -> MemberHandle[A]: ...
    @overload
    def __getitem__(self, index: slice) -> RoleGroup[A]: ...
    def __getitem__(self, index: int | slice) -> MemberHandle[A] | RoleGroup[A]:
        ranks = self.ranks
        if isinstance(index, slice):
            return self._view(ranks[index])
        try:
            rank = ranks[index]
        except IndexError:
            raise RoleNotFound(f"{self._name} has {len(ranks)} members; there is no member {index}") from None
        return self._member(rank)

    def __iter__(self) -> Iterator[MemberHandle[A]]:
        return (self[i] for i in range(len(self)))

    @overload
    def options(
        self, *, timeout_s: float | None = None, idempotent: bool | None = None, queue: bool | None = None,
        window: int | None = None, return_exceptions: Literal[True], scatter: Literal[True],
    ) -> Any: ...  # fmt: skip
    @overload
    def options(
        self, *, timeout_s: float | None = None, idempotent: bool | None = None, queue: bool | None = None,
        window: int | None = None, return_exceptions: Literal[True], scatter: Literal[False] | None = None,
    ) -> CollectedGroup[A]: ...  # fmt: skip
    @overload
    def options(
        self, *, timeout_s: float | None = None, idempotent: bool | None = None, queue: bool | None = None,
        window: int | None = None, return_exceptions: Literal[False] | None = None, scatter: Literal[True],
    ) -> ScatteredGroup[A]: ...  # fmt: skip
    @overload
    def options(
        self, *, timeout_s: float | None = None, idempotent: bool | None = None, queue: bool | None = None,
        window: int | None = None, return_exceptions: bool | None = None, scatter: bool | None = None,
    ) -> RoleGroup[A]: ...  # fmt: skip
    def options(
        self, *, timeout_s: float | None = None, idempotent: bool | None = None, queue: bool | None = None,
        window: int | None = None, return_exceptions: bool | None = None, scatter: bool | None = None,
    ) -> RoleGroup[A]:  # fmt: skip
        """The same members with other options for their calls; see `CallOptions`."""
        changed = self._options.changed(
            timeout_s=timeout_s, idempotent=idempotent, queue=queue, window=window,
            return_exceptions=return_exceptions, scatter=scatter,
        )  # fmt: skip
        return self._view(self._ranks, changed)

    def along(self, *axes: str, **at: int) -> RoleGroup[A]:
        """The members along one or more named axes, by rank: those at coordinate 0 of the other axes.

        For a role with ``.mesh(dp=2, tp=4)``, ``along("dp")`` is ranks 0 and 4, ``along("dp", tp=1)`` ranks 1 and 5.

        Args:
            axes: names of the axes to go along.
            at: coordinates on other axes, instead of 0.

        Raises:
            UsageError: the role has no axes, or no axis of that name.
        """
        known = self.ranks
        ranks = self._outbound().address_book().axes(self.role).along(axes, at)
        return self._view(tuple(rank for rank in ranks if rank in known))

    @overload
    def call(
        self, method: Callable[[A, X], Coroutine[Any, Any, R]], one: X | Items[X], /, *, _scatter: Literal[True],
        **kwargs: Any,
    ) -> Future[list[R]]: ...  # fmt: skip
    @overload
    def call(
        self, method: Callable[[A, X], R], one: X | Items[X], /, *, _scatter: Literal[True], **kwargs: Any
    ) -> Future[list[R]]: ...
    @overload
    def call(
        self, method: Callable[[X], Coroutine[Any, Any, R]], one: X | Items[X], /, *, _scatter: Literal[True],
        **kwargs: Any,
    ) -> Future[list[R]]: ...  # fmt: skip
    @overload
    def call(
        self, method: Callable[[X], R], one: X | Items[X], /, *, _scatter: Literal[True], **kwargs: Any
    ) -> Future[list[R]]: ...
    @overload
    def call(
        self, method: Callable[..., Coroutine[Any, Any, R]], one: Any, two: Any, /, *more: Any,
        _scatter: Literal[True], **kwargs: Any,
    ) -> Future[list[R]]: ...  # fmt: skip
    @overload
    def call(
        self, method: Callable[..., R], one: Any, two: Any, /, *more: Any, _scatter: Literal[True], **kwargs: Any
    ) -> Future[list[R]]: ...
    @overload
    def call(
        self, method: Callable[..., Coroutine[Any, Any, R]], /, *, _scatter: Literal[True], **kwargs: Any
    ) -> Future[list[R]]: ...
    @overload
    def call(self, method: Callable[..., R], /, *, _scatter: Literal[True], **kwargs: Any) -> Future[list[R]]: ...
    @overload
    def call(
        self, method: Callable[Concatenate[A, P], Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[list[R]]: ...
    @overload
    def call(  # type: ignore[overload-overlap]
        self, method: Callable[Concatenate[A, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[list[R]]: ...
    @overload
    def call(
        self, method: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[list[R]]: ...
    @overload
    def call(  # type: ignore[overload-overlap]
        self, method: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[list[R]]: ...
    @overload
    def call(
        self, method: Callable[..., Coroutine[Any, Any, Any]] | Callable[..., Any] | str, /, *args: Any,
        return_exceptions: Literal[True], _scatter: bool = False, **kwargs: Any,
    ) -> Future[GroupOutcomes]: ...  # fmt: skip
    @overload
    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Future[list[Any]]: ...
    def call(self, method: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call every member; the future gives their results by rank.

        With ``options(scatter=True)``, item i of each list, tuple, array or tensor goes to member i. With
        ``options(return_exceptions=True)``, errors are in the places of results, and ``.raise_all()`` of the result
        raises them together; otherwise the first error is raised. The keywords ``_scatter=`` and ``return_exceptions=``
        do the same for one call, unless the method has a parameter of that name.

        Args:
            method: the function, the method, its stub, or its name.
        """
        ranks, options = self.ranks, self._options
        scatter, collect = options.scatter, options.return_exceptions
        if "_scatter" in kwargs and not has_parameter(method, "_scatter"):
            scatter = kwargs.pop("_scatter")
            require("call(_scatter=…)", scatter, bool, "True or False")
        if "return_exceptions" in kwargs and not (has := has_parameter(method, "return_exceptions")):
            collect = kwargs.pop("return_exceptions")
            require("call(return_exceptions=…)", collect, bool, "True or False")
            if has is None:
                _warn_of_keyword(method_name(method))
        calls = scatter_call(len(ranks), args, kwargs) if scatter else [(args, kwargs)] * len(ranks)
        return gather(self._submit(method, ranks, calls), return_exceptions=collect, ranks=ranks)

    @overload
    def call_rank0(
        self, method: Callable[Concatenate[A, P], Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]: ...
    @overload
    def call_rank0(self, method: Callable[Concatenate[A, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]: ...
    @overload
    def call_rank0(
        self, method: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]: ...
    @overload
    def call_rank0(self, method: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]: ...
    @overload
    def call_rank0(self, method: str, /, *args: Any, **kwargs: Any) -> Future[Any]: ...
    def call_rank0(self, method: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call the first member only."""
        return self[0].call(method, *args, **kwargs)

    @overload
    def call_any(
        self, method: Callable[Concatenate[A, P], Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]: ...
    @overload
    def call_any(self, method: Callable[Concatenate[A, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]: ...
    @overload
    def call_any(
        self, method: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]: ...
    @overload
    def call_any(self, method: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]: ...
    @overload
    def call_any(self, method: str, /, *args: Any, **kwargs: Any) -> Future[Any]: ...
    def call_any(self, method: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call the least busy member: alive, fewest calls of this process in flight, then the shortest queue."""
        ranks = self.ranks
        if not ranks:
            raise RoleNotFound(f"{self!r} has no member to call")
        names = [member_name(self.role, rank) for rank in ranks]
        chosen = names.index(self._outbound().peers.least_busy(names)) if len(names) > 1 else 0
        return self._member(ranks[chosen]).call(method, *args, **kwargs)

    @overload
    def call_batch(
        self, method: Callable[Concatenate[A, P], Coroutine[Any, Any, Items[R]]], size: int, /, *args: P.args,
        **kwargs: P.kwargs,
    ) -> FutureSequence[R]: ...  # fmt: skip
    @overload
    def call_batch(
        self, method: Callable[Concatenate[A, P], Items[R]], size: int, /, *args: P.args, **kwargs: P.kwargs
    ) -> FutureSequence[R]: ...
    @overload
    def call_batch(
        self, method: Callable[P, Coroutine[Any, Any, Items[R]]], size: int, /, *args: P.args, **kwargs: P.kwargs
    ) -> FutureSequence[R]: ...
    @overload
    def call_batch(
        self, method: Callable[P, Items[R]], size: int, /, *args: P.args, **kwargs: P.kwargs
    ) -> FutureSequence[R]: ...
    @overload
    def call_batch(
        self, method: Callable[Concatenate[A, P], Coroutine[Any, Any, Items[R]]], /, *args: P.args, **kwargs: P.kwargs
    ) -> FutureSequence[R]: ...
    @overload
    def call_batch(
        self, method: Callable[Concatenate[A, P], Items[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> FutureSequence[R]: ...
    @overload
    def call_batch(
        self, method: Callable[P, Coroutine[Any, Any, Items[R]]], /, *args: P.args, **kwargs: P.kwargs
    ) -> FutureSequence[R]: ...
    @overload
    def call_batch(self, method: Callable[P, Items[R]], /, *args: P.args, **kwargs: P.kwargs) -> FutureSequence[R]: ...
    @overload
    def call_batch(self, method: str, /, *args: Any, **kwargs: Any) -> FutureSequence[Any]: ...
    def call_batch(self, method: Any, /, *args: Any, **kwargs: Any) -> FutureSequence[Any]:
        """Split a batch over the members, balanced to within one item.

        Lists, tuples, arrays and tensors (along dim 0) are split. Text, bytes, dicts, scalars, and values that are
        wrapped in ``rlmesh.shared`` are given to each member whole. Members that would get no item are not called.

        Args:
            method: the function, the method, its stub, or its name.
            args: the arguments of the method. The number of items may come before them: an int directly after the
                method is always that number.

        Returns:
            The results, one per item. The method returns one result per item of its share.

        Raises:
            UsageError: no argument has items, or arguments that would be split differ in length.
        """
        futures, sizes, ranks = self._split("call_batch", method, args, kwargs)
        return FutureSequence(futures, sizes, method_name(method), ranks)

    @overload
    def call_shards(
        self, method: Callable[Concatenate[A, P], Coroutine[Any, Any, R]], size: int, /, *args: P.args,
        **kwargs: P.kwargs,
    ) -> Future[list[R]]: ...  # fmt: skip
    @overload
    def call_shards(
        self, method: Callable[Concatenate[A, P], R], size: int, /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[list[R]]: ...
    @overload
    def call_shards(
        self, method: Callable[P, Coroutine[Any, Any, R]], size: int, /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[list[R]]: ...
    @overload
    def call_shards(
        self, method: Callable[P, R], size: int, /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[list[R]]: ...
    @overload
    def call_shards(
        self, method: Callable[Concatenate[A, P], Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[list[R]]: ...
    @overload
    def call_shards(
        self, method: Callable[Concatenate[A, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[list[R]]: ...
    @overload
    def call_shards(
        self, method: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[list[R]]: ...
    @overload
    def call_shards(self, method: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[list[R]]: ...
    @overload
    def call_shards(self, method: str, /, *args: Any, **kwargs: Any) -> Future[list[Any]]: ...
    def call_shards(self, method: Any, /, *args: Any, **kwargs: Any) -> Future[list[Any]]:
        """Split a batch over the members as `call_batch` does, for methods that return one value for their share.

        Returns:
            One result per member that got items, by rank, such as the losses of the parts of a batch.
        """
        futures, _, ranks = self._split("call_shards", method, args, kwargs, collects=True)
        return gather(futures, return_exceptions=self._options.return_exceptions, ranks=ranks)

    @overload
    def stream(
        self, method: Callable[Concatenate[A, P], AsyncIterator[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Stream[R]: ...
    @overload
    def stream(
        self, method: Callable[Concatenate[A, P], Iterator[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Stream[R]: ...
    @overload
    def stream(self, method: Callable[P, AsyncIterator[R]], /, *args: P.args, **kwargs: P.kwargs) -> Stream[R]: ...
    @overload
    def stream(self, method: Callable[P, Iterator[R]], /, *args: P.args, **kwargs: P.kwargs) -> Stream[R]: ...
    @overload
    def stream(self, method: str, /, *args: Any, **kwargs: Any) -> Stream[Any]: ...
    def stream(self, method: Any, /, *args: Any, **kwargs: Any) -> Stream[Any]:
        """Call a generator method of every member; items come as they arrive, with ``for`` or ``async for``."""
        self._check_options("stream")
        ranks = self.ranks
        self._check_present(ranks)
        return self._outbound().stream_group(self.role, ranks, method_name(method), args, kwargs, self._options)

    @overload
    def notify(self, method: Callable[Concatenate[A, P], Any], /, *args: P.args, **kwargs: P.kwargs) -> None: ...
    @overload
    def notify(self, method: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> None: ...
    @overload
    def notify(self, method: str, /, *args: Any, **kwargs: Any) -> None: ...
    def notify(self, method: Any, /, *args: Any, **kwargs: Any) -> None:
        """Call every member without waiting for the end of the calls. The members log errors."""
        self._check_options("notify")
        ranks = self.ranks
        self._check_present(ranks)
        self._outbound().notify_group(self.role, ranks, method_name(method), args, kwargs, self._options)

    def _split(
        self, name: str, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, collects: bool = False
    ) -> tuple[list[Future[Any]], list[int], tuple[int, ...]]:
        """The calls of a batch, one per member that gets items, with the numbers of items and the ranks."""
        self._check_options(name, collects=collects)
        ranks = self.ranks
        self._check_present(ranks)
        size, args, source = batch_size(f"{name}({method_name(method)!r}, …)", args, kwargs)
        calls = split_call(size, len(ranks), args, kwargs, source)
        sizes, ranks = balanced_sizes(size, len(ranks))[: len(calls)], ranks[: len(calls)]
        return self._submit(method, ranks, calls), sizes, ranks

    def _check_options(self, what: str, *, collects: bool = False) -> None:
        """Refuse options that ``what`` would ignore.

        Raises:
            UsageError: such an option is set.
        """
        options = self._options
        if options.scatter or (options.return_exceptions and not collects):
            which = (
                "scatter=True) is for call()"
                if options.scatter
                else "return_exceptions=True) is for call() and call_shards()"
            )
            raise UsageError(f"options({which} to a group, not for {what}")

    def _submit(
        self, method: Any, ranks: tuple[int, ...], calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    ) -> list[Future[Any]]:
        if not ranks:
            self._check_present(ranks)
            return []
        outbound = (self._runtime or default_runtime()).outbound
        remote = method if type(method) is str else method_name(method)
        group = CallGroup(len(ranks)) if len(ranks) > 1 else None
        frames = outbound.encode_calls(remote, calls)
        return outbound.submit_group(self.role, ranks, remote, frames, self._options, group=group)

    def _check_present(self, ranks: tuple[int, ...]) -> None:
        """Refuse a call to an optional role that is absent, which would give no result.

        Raises:
            RoleNotFound: the role is absent.
        """
        if self._optional and not ranks:
            raise RoleNotFound(f"the job has no role {self._name}, which is optional here: call it only `if group:`")

    def _view(self, ranks: tuple[int, ...] | None, options: CallOptions | None = None) -> RoleGroup[A]:
        view: RoleGroup[A] = RoleGroup(
            self.role, group=self.group, runtime=self._runtime, ranks=ranks, options=options or self._options,
            optional=self._optional,
        )  # fmt: skip
        view._rank_loop = self._rank_loop
        return view

    def _member(self, rank: int) -> MemberHandle[A]:
        self._check_options("a single member")
        outbound = self._outbound()
        if not outbound.peers.go_together(self.role):
            return MemberHandle(outbound, member_name(self.role, rank), options=self._options)
        options = replace(self._options, rank_loop=self._rank_loop)
        return MemberHandle(outbound, member_name(self.role, rank), options=options)

    @property
    def _name(self) -> str:
        return f"{self.role}/{self.group}" if self.group else self.role

    def _outbound(self) -> Outbound:
        return (self._runtime or default_runtime()).outbound

    if not TYPE_CHECKING:  # hidden, so that type checkers know which attributes there are

        def __getattr__(self, name: str) -> Any:
            raise NoSuchAttribute.of(type(self), name)

    def __reduce__(self) -> tuple[Any, ...]:
        # A group that was sent as an argument or a result uses the runtime of the process that received it.
        return _arrived, (self.role, self.group, self._ranks, self._options, self._optional)

    def __repr__(self) -> str:
        ranks = "" if self._ranks is None else f" ranks {list(self._ranks)}"
        return f"<RoleGroup {self._name}{ranks}>"


def _warn_of_keyword(method: str) -> None:
    warnings.warn(
        f"call({method!r}, return_exceptions=…) takes return_exceptions as an option of the call, although the method "
        f"may have a parameter of that name: its parameters are not known here. Use "
        f"options(return_exceptions=True).call({method!r}, …), or pass the method itself instead of its name",
        FutureWarning, stacklevel=3,
    )  # fmt: skip


def _arrived(
    role: str, group: str, ranks: tuple[int, ...] | None, options: CallOptions, optional: bool
) -> RoleGroup[Any]:
    return RoleGroup(role, group=group, ranks=ranks, options=options, optional=optional)
