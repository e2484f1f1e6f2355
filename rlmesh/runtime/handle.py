"""`MemberHandle`: calls to one served object."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, overload

from rlmesh.errors import UsageError
from rlmesh.runtime.argument_types import require, require_number, require_seconds
from rlmesh.runtime.connections.address_book import split_name
from rlmesh.runtime.future import Future
from rlmesh.runtime.rpc import method_name
from rlmesh.wire.envelope import ANY_INCARNATION

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from rlmesh.runtime.calling.pending import RankLoop
    from rlmesh.runtime.streams import Stream

    A = TypeVar("A", default=Any)
else:
    from typing import TypeVar

    A = TypeVar("A")

NO_JOB = (
    "this process is not part of a job, so it cannot call roles: RoleGroup works in role classes and entry points that "
    "a job started. In a program of your own, pass RoleGroup(…, runtime=…)"
)
"""The error of a process without a default runtime."""

P = ParamSpec("P")
R = TypeVar("R")
X = TypeVar("X")
Item = TypeVar("Item", covariant=True)


class Items(Protocol[Item]):
    """A list, a tuple, an array or a tensor, for type checkers: an argument that is split over members, or the result
    of a batch method."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Item: ...


MAX_WINDOW = 1 << 20


@dataclass(frozen=True, slots=True)
class CallOptions:
    """The options of calls.

    Attributes:
        timeout_s: seconds until a call fails; None is the job's default. A call that is made while another call is
            served gets at most the time which that call has left.
        idempotent: the method may run twice. A call that did not run, or may not have run, because the connection
            or the member was lost is made again within its deadline. A call to several ranks of an elastic role is made
            again by all of them, in the next incarnation of the group.
        queue: wait for room when a member's window is full; otherwise the call fails with `MailboxFull`.
        window: the number of items of a stream that a member may be ahead of its consumer.
        return_exceptions: a call to a group gives errors in the places of results instead of raising the first error.
        scatter: a call to a group gives item i of each list, tuple, array or tensor to member i.
        rank_loop: the calls that a program makes to the ranks of the same group one by one; set by `RoleGroup`.
    """

    timeout_s: float | None = None
    idempotent: bool = False
    queue: bool = True
    window: int = 16
    return_exceptions: bool = False
    scatter: bool = False
    rank_loop: RankLoop | None = field(default=None, repr=False, compare=False)

    def changed(self, **changes: Any) -> CallOptions:
        """A copy of the options with new values; names whose value is None keep the old one.

        Raises:
            UsageError: a value is invalid.
        """
        given = {key: value for key, value in changes.items() if value is not None}
        if "timeout_s" in given:
            require_seconds(f"options(timeout_s={given['timeout_s']!r:.80})", given["timeout_s"])
        if "window" in given:
            require_number(
                f"options(window={given['window']!r:.80}), items of a stream", given["window"], 1, MAX_WINDOW
            )
        for key in given.keys() & {"idempotent", "queue", "return_exceptions", "scatter"}:
            require(f"options({key}=…)", given[key], bool, "True or False")
        return replace(self, **given)


class Caller(Protocol):
    """The methods of `Outbound` that a handle uses."""

    def submit(
        self, name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions,
        endpoint: str | None = None, incarnation: int = ANY_INCARNATION, reply: bool = True,
    ) -> Future[Any]: ...  # fmt: skip

    def stream(
        self, targets: Sequence[tuple[str, str | None, int]], method: str, args: tuple[Any, ...],
        kwargs: dict[str, Any], options: CallOptions,
    ) -> Stream[Any]: ...  # fmt: skip


class NoSuchAttribute(UsageError, AttributeError):
    """Raised for an unknown attribute of a handle or a group: methods of members are named in ``call``."""

    @classmethod
    def of(cls, owner: type[object], name: str) -> NoSuchAttribute:
        plain = f"{owner.__name__!r} object has no attribute {name!r}"
        if name.startswith("_"):
            return cls(plain)  # Python itself asks for these.
        named = '"method"' if name in ("remote", "rpc", "invoke") else f'"{name}"'
        return cls(f"{plain}: a method of a role is called by call({named}, …), which gives a future")


class MemberHandle(Generic[A]):
    """One member of a role (``group[i]``), or any served object by its address (``Runtime.peer``).

    Args:
        caller: makes the calls; None for the runtime that this process has when it calls.
    """

    def __init__(
        self, caller: Caller | None, name: str, *, endpoint: str | None = None, incarnation: int = ANY_INCARNATION,
        options: CallOptions | None = None,
    ) -> None:  # fmt: skip
        self.name, self.endpoint, self.incarnation = name, endpoint, incarnation
        self._caller = caller
        self._options = options or CallOptions()

    @property
    def role(self) -> str:
        """The member's role; the whole name of an object that is no member."""
        return split_name(self.name)[0]

    @property
    def rank(self) -> int | None:
        """The member's rank; None for an object that is no member."""
        return split_name(self.name)[1]

    def __reduce__(self) -> tuple[Any, ...]:
        # A handle that was sent as an argument or a result uses the runtime of the process that received it.
        return _arrived, (self.name, self.endpoint, self.incarnation, replace(self._options, rank_loop=None))

    @overload
    def call(
        self, method: Callable[Concatenate[A, P], Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]: ...
    @overload
    def call(self, method: Callable[Concatenate[A, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]: ...
    @overload
    def call(self, method: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]: ...
    @overload
    def call(self, method: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]: ...
    @overload
    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Future[Any]: ...
    def call(self, method: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method; ``await`` the future or take its ``.result()``.

        Args:
            method: the function, the method, its stub, or its name.
        """
        return (self._caller or _default_caller()).submit(
            self.name, method_name(method), args, kwargs, self._options, self.endpoint, self.incarnation
        )

    @overload
    def notify(self, method: Callable[Concatenate[A, P], Any], /, *args: P.args, **kwargs: P.kwargs) -> None: ...
    @overload
    def notify(self, method: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> None: ...
    @overload
    def notify(self, method: str, /, *args: Any, **kwargs: Any) -> None: ...
    def notify(self, method: Any, /, *args: Any, **kwargs: Any) -> None:
        """Call a method without waiting for its end. The member logs errors."""
        (self._caller or _default_caller()).submit(
            self.name, method_name(method), args, kwargs, self._options, self.endpoint, self.incarnation, False
        )

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
        """Call a generator method and take its items with ``for`` or ``async for``."""
        target = (self.name, self.endpoint, self.incarnation)
        return (self._caller or _default_caller()).stream([target], method_name(method), args, kwargs, self._options)

    def options(
        self, *, timeout_s: float | None = None, idempotent: bool | None = None, queue: bool | None = None,
        window: int | None = None,
    ) -> MemberHandle[A]:  # fmt: skip
        """The same member with other options for its calls; see `CallOptions`."""
        changed = self._options.changed(timeout_s=timeout_s, idempotent=idempotent, queue=queue, window=window)
        return MemberHandle(
            self._caller, self.name, endpoint=self.endpoint, incarnation=self.incarnation, options=changed
        )

    if not TYPE_CHECKING:  # hidden, so that type checkers know which attributes there are

        def __getattr__(self, name: str) -> Any:
            raise NoSuchAttribute.of(type(self), name)

    def __repr__(self) -> str:
        return f"<MemberHandle {self.name}{' at ' + self.endpoint if self.endpoint else ''}>"


_default: Caller | None = None


def set_default_caller(caller: Caller | None) -> None:
    """Set what makes the calls of handles that came as arguments or results; see `set_default_runtime`."""
    global _default
    _default = caller


def _default_caller() -> Caller:
    """The calls of the runtime that this process has at this moment.

    Raises:
        UsageError: this process is not part of a job.
    """
    if _default is None:
        raise UsageError(NO_JOB)
    return _default


def _arrived(name: str, endpoint: str | None, incarnation: int, options: CallOptions) -> MemberHandle[Any]:
    return MemberHandle(None, name, endpoint=endpoint, incarnation=incarnation, options=options)
