"""Futures as arguments of further calls: the callee takes the values straight from their producers.

A future that is passed on while its call is still running asks the producer to store the result. When all arguments of
a call have ended, the call goes out with references to the stored results, and the callee fetches them. Values that are
small, or were at the caller already, travel with the call. The caller releases a stored result when its last future and
the last call that needs it are gone.

`PassedArguments` and `StoredResult` are the caller's side, `ArgumentResolver` is the callee's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rlmesh.errors import CallCancelled, CallError, RemoteError
from rlmesh.runtime.future import Future, StoredValue, reducers, refuse_to_pickle
from rlmesh.runtime.serving.result_store import items_of
from rlmesh.wire import codec
from rlmesh.wire.envelope import Frames
from rlmesh.wire.passed import WHOLE, ItemRange, RemoteRef, Value, pack_passed

_WHOLE_RANGE = ItemRange()


class StoredResult:
    """A result that its producer stores for this process. Released when no object refers to it any more.

    Args:
        ref: names the result and its producer.
        what: the call, for messages.
        release: tells the producer; it may be called on any thread, inside any lock.
        fetch: gets the value.
    """

    __slots__ = ("_fetch", "_fetching", "_release", "ref", "what")

    def __init__(
        self, ref: RemoteRef, what: str, release: Callable[[], object],
        fetch: Callable[[RemoteRef, float | None], Future[Any]],
    ) -> None:  # fmt: skip
        self.ref, self.what = ref, what
        self._release, self._fetch = release, fetch
        self._fetching = False

    def fetch_for(self, future: Future[Any]) -> None:
        """Fetch the value into this process, because the caller itself wants it now; later calls do nothing."""
        if self._fetching:
            return
        self._fetching = True
        what = self.what

        def arrived(answer: Future[Any]) -> None:
            error = answer.exception()
            if error is None:
                future.end(answer.result(), None)
            else:
                future.end(None, not_fetched(error, what, "yes"))

        self._fetch(self.ref, None).add_done_callback(arrived)

    def __del__(self) -> None:
        self._release()  # The collector may run this on any thread.


def not_fetched(error: BaseException, what: str, executed: str) -> BaseException:
    """The error of a call that needed a result which could not be fetched from its producer."""
    if isinstance(error, CallError) and not isinstance(error, RemoteError):
        text = f"the result of {what}, which is kept there until it is needed, could not be fetched: {error}"
        wrapped = type(error).__new__(type(error), text)
        wrapped.args = (text,)
        wrapped.__dict__.update(error.__dict__, executed=executed)
        wrapped.__cause__ = error
        return wrapped
    return error


class _Collecting(threading.local):
    """The futures that were met while this thread pickles the arguments of a call."""

    found: dict[tuple[int, ItemRange], int] | None = None
    futures: list[tuple[Future[Any], ItemRange]]


class _Resolving(threading.local):
    """The values that this thread puts in the places of passed futures."""

    values: list[Any] | None = None


_collecting, _resolving = _Collecting(), _Resolving()


def reduce_future(future: Future[Any], part: ItemRange = _WHOLE_RANGE) -> tuple[Any, ...]:
    """Pickle a future as an argument: the value itself if this process has it, else a placeholder.

    Raises:
        Deferred: this thread does not encode the arguments of a call.
    """
    found = _collecting.found
    if found is None:
        refuse_to_pickle()
    if future.has_value and future.stored is None:
        value = future.result()
        return _itself, (value if part.start == WHOLE else items_of(value, part, future.what),)
    members = future.members()
    if members is not None:
        return _as_list, tuple(members)
    key = (id(future), part)
    if key not in found:
        found[key] = len(_collecting.futures)
        _collecting.futures.append((future, part))
    return _take, (found[key],)


reducers.append(reduce_future)


# Other processes find these three functions by name: pickles hold them.


def _itself(value: Any) -> Any:
    return value


def _as_list(*values: Any) -> list[Any]:
    return list(values)


def _take(index: int) -> Any:
    values = _resolving.values
    if values is None:
        raise CallError("a passed future was decoded outside of a call", executed="no")
    return values[index]


@contextmanager
def _resolved(values: list[Any]) -> Iterator[None]:
    _resolving.values = values
    try:
        yield
    finally:
        _resolving.values = None


class PassedArguments:
    """The arguments of one call, or of several calls with the same arguments, and the futures in them."""

    def __init__(self, call: object, capture: codec.Capture | None) -> None:
        """Captures the arguments.

        Raises:
            Unserializable: an argument other than a future cannot be sent.
        """
        self._capture = capture
        outer = _collecting.found, getattr(_collecting, "futures", [])
        _collecting.found, _collecting.futures = {}, []
        try:
            self._frames = codec.encode(call, capture)
            self._needs = _collecting.futures
        finally:
            _collecting.found, _collecting.futures = outer
        self._payload: tuple[Frames, list[StoredValue]] | None = None
        self._store = True
        self._left = len(self._needs)
        self._waiting: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def gather(self, *, store: bool) -> None:
        """Start to wait for the futures.

        Args:
            store: let large results stay at their producers; otherwise they come here and travel with the call.
        """
        self._store = store
        for future, _ in self._needs:
            if store:
                future.leave_at_producer()
                future.on_settled(self._on_settled)
            else:
                future.add_done_callback(self._on_settled)

    @property
    def ready(self) -> bool:
        return self._left == 0

    def when_ready(self, fn: Callable[[], None]) -> None:
        """Call ``fn`` once all futures have ended, here or at their producers; at once if they have."""
        with self._lock:
            if self._left:
                self._waiting.append(fn)
                return
        fn()

    def _on_settled(self, _: Future[Any]) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
            waiting, self._waiting = self._waiting, []
        for fn in waiting:
            fn()

    def awaited(self) -> list[Future[Any]]:
        """The futures that have not ended."""
        return [future for future, _ in self._needs if not future.done()]

    def describe(self) -> str:
        """The calls whose futures have not ended, for messages."""
        waiting = [future._described() for future in self.awaited()]
        return "; ".join(filter(None, waiting)) or "calls that have just ended"

    def error(self) -> BaseException | None:
        """The first failure among the futures that have ended."""
        for future, _ in self._needs:
            if future.stored is None and future.done():
                error = future.exception()
                if error is not None:
                    return error
        return None

    def payload(self) -> tuple[Frames, list[StoredValue]]:
        """The frames that travel, and the results that must be stored until the call is over.

        Call it only when all futures have ended (`ready`) and `error` is None.

        Raises:
            Unserializable, CallError: a value that is here cannot be sent, or has not the expected length.
        """
        if self._payload is not None:
            return self._payload
        values: list[Value] = []
        stored: list[StoredValue] = []
        for future, part in self._needs:
            if future.stored is not None and (self._store or not future.has_value):
                stored.append(future.stored)
                values.append(future.stored.ref._replace(**part._asdict()))
            else:
                value = future.result()
                if part.start != WHOLE:
                    value = items_of(value, part, future.what)
                values.append(codec.encode(value, self._capture))
        self._payload = pack_passed(self._frames, values), stored
        return self._payload


Payload = Frames | PassedArguments
"""The arguments of a call: captured, or waiting for futures among them."""


class ArgumentResolver:
    """The passed values of a call, at its callee: some came with the call, the others are fetched."""

    def __init__(
        self, values: Sequence[Value], timeout_s: float, fetch: Callable[[RemoteRef, float | None], Future[Any]]
    ) -> None:
        self._values = [fetch(value, timeout_s) if isinstance(value, RemoteRef) else value for value in values]
        self._names = [value.name if isinstance(value, RemoteRef) else "" for value in values]

    def cancel(self) -> None:
        for value in self._values:
            if not isinstance(value, list):
                value.cancel()

    async def there(self) -> None:
        """Wait until the values have been fetched; failures are left to `decode`."""
        for value in self._values:
            if not isinstance(value, list) and not value.done():
                try:
                    await value
                except CallError:
                    pass

    def decode(self, frames: Frames) -> Any:
        """Decode the arguments, with the values in their places; waits for them, at most until the call's deadline.

        Raises:
            CallError: a value could not be fetched.
        """
        values = []
        for name, value in zip(self._names, self._values, strict=True):
            if isinstance(value, list):
                values.append(codec.decode(value))
                continue
            try:
                values.append(value.result())
            except CallCancelled:
                raise
            except CallError as error:
                raise not_fetched(error, f"a method of {name}", "no") from None
        with _resolved(values):
            return codec.decode(frames)
