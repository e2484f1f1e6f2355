"""`MemberHandle`: calls to one served object."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, overload

from rlmesh.errors import UsageError
from rlmesh.runtime.future import Future
from rlmesh.runtime.rpc import method_name
from rlmesh.wire.envelope import ANY_INCARNATION

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    A = TypeVar("A", default=Any)
else:
    from typing import TypeVar

    A = TypeVar("A")

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class CallOptions:
    """How calls are made.

    Attributes:
        timeout_s: seconds until a call fails; None is the job's default, at most what the caller has left.
        idempotent: the method may run twice: a call that did not run, or may not have run, because the connection
            or the member was lost is made again within its deadline.
        queue: wait for room when a member's window is full; otherwise the call fails with `MailboxFull`.
    """

    timeout_s: float | None = None
    idempotent: bool = False
    queue: bool = True

    def changed(self, **changes: Any) -> CallOptions:
        if (timeout := changes.get("timeout_s")) is not None and not timeout > 0:
            raise UsageError(f"options(timeout_s={timeout!r}): it is a number of seconds above 0")
        return replace(self, **{key: value for key, value in changes.items() if value is not None})


class Caller(Protocol):
    """What a handle needs of its runtime."""

    def submit(
        self, name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions,
        endpoint: str | None = None, incarnation: int = ANY_INCARNATION, reply: bool = True,
    ) -> Future[Any]: ...  # fmt: skip


class MemberHandle(Generic[A]):
    """One member of a role (``group[i]``), or any served object by its address (``Runtime.peer``)."""

    def __init__(
        self, caller: Caller, name: str, *, endpoint: str | None = None, incarnation: int = ANY_INCARNATION,
        options: CallOptions | None = None,
    ) -> None:  # fmt: skip
        self.name, self.endpoint, self.incarnation = name, endpoint, incarnation
        self._caller = caller
        self._options = options or CallOptions()

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
        """Call a method: ``await`` it or take ``.result()``.

        Args:
            method: the function, the method, its stub, or its name.
        """
        return self._caller.submit(
            self.name, method_name(method), args, kwargs, self._options, self.endpoint, self.incarnation
        )

    def notify(self, method: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> None:
        """Call a method without waiting for its end or its errors (the member logs them)."""
        self._caller.submit(
            self.name, method_name(method), args, kwargs, self._options, self.endpoint, self.incarnation, False
        )

    def options(
        self, *, timeout_s: float | None = None, idempotent: bool | None = None, queue: bool | None = None
    ) -> MemberHandle[A]:
        """The same member with other options for its calls; see `CallOptions`."""
        changed = self._options.changed(timeout_s=timeout_s, idempotent=idempotent, queue=queue)
        return MemberHandle(
            self._caller, self.name, endpoint=self.endpoint, incarnation=self.incarnation, options=changed
        )

    def __repr__(self) -> str:
        return f"<MemberHandle {self.name}{' at ' + self.endpoint if self.endpoint else ''}>"
