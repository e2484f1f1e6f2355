"""A member's lease of its devices: while a member holds it, no member of another role is awake on them."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any, Protocol, TypeAlias

from rlmesh.errors import LeaseTimeout, UsageError

__all__ = ["DeviceLease", "Hook", "LeaseLink", "SharedLease"]

Hook: TypeAlias = Callable[[], Awaitable[object] | object]


class LeaseLink(Protocol):
    """Connection of a lease to the agent that grants it. Usable from any thread; returns at once."""

    def lease_devices(self, timeout_s: float) -> Future[Any]:
        """Ask for this member's devices; the answer has ``granted``, ``devices``, ``waited_s``, ``why``."""

    def return_devices(self) -> Future[Any]:
        """Return the devices."""


class SharedLease:
    """The state of one member's lease: the number of blocks that use it. Thread-safe."""

    def __init__(self, name: str, link: LeaseLink) -> None:
        self._name, self._link = name, link
        self._lock = threading.RLock()
        self._users = 0
        self._answer: Future[Any] | None = None
        self._woken: Future[None] | None = None
        self._waker: object = None
        self._awake = False
        self._end: Future[None] | None = None
        self._sleeper: object = None

    def enter(self, timeout_s: float, me: object) -> Future[Any]:
        """Enter a block: return the answer to wait for; the first block asks for the devices. While the last block
        before it still puts the member to sleep, it waits for that first: that block returns the devices.

        Raises:
            UsageError: ``me``, a thread or task, puts the member to sleep right now.
        """
        with self._lock:
            if self._end is not None and self._sleeper == me:
                raise UsageError(f"{self._name}: its sleep hook enters device_lease(), which would wake it again")
            self._users += 1
            if self._answer is None:
                ask = partial(self._link.lease_devices, timeout_s)
                self._answer = ask() if self._end is None else _after(self._end, ask, timeout_s, self._lock)
            return self._answer

    def claim_wake(self, me: object) -> tuple[Future[None], bool]:
        """Return a future that is done once the member is awake, and whether the calling block is to wake it.

        A block inside the wake hook itself gets a done future.
        """
        with self._lock:
            if self._woken is None:
                self._woken, self._waker = Future(), me
                return self._woken, True
            if self._waker == me and not self._woken.done():
                done: Future[None] = Future()
                done.set_result(None)
                return done, False
            return self._woken, False

    def check(self, answer: Any, timeout_s: float) -> Any:
        """Return the answer if it grants the devices.

        Raises:
            LeaseTimeout: others had them; says which member.
        """
        if not answer.granted:
            self.forget()
            raise LeaseTimeout(
                f"{self._name} did not get {', '.join(answer.devices)} within {timeout_s:g} s: {answer.why}. Let the "
                "others leave their device_lease() blocks earlier, or wait longer with device_lease(timeout_s=...)"
            )
        return answer

    def forget(self) -> None:
        """Leave a block that did not get the lease or stopped waiting. A grant that still arrives is returned, and one
        whose answer may have been lost."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            answer, self._answer, self._woken = self._answer, None, None
            waits = answer is None or answer.cancel() or answer.cancelled() or answer.exception() is not None
            if not self._awake and (waits or (answer is not None and answer.result().granted)):
                self._link.return_devices()

    def leave(self, me: object) -> bool:
        """True if this was the last block, which puts the member to sleep, returns the devices, and calls `left`."""
        with self._lock:
            self._users -= 1
            if self._users:
                return False
            self._answer = self._woken = None
            self._awake, self._end, self._sleeper = True, Future(), me
            return True

    def give_back(self) -> Future[Any]:
        """Return the devices of a member that is asleep."""
        self._awake = False
        return self._link.return_devices()

    def left(self) -> None:
        """Let blocks begin that began to wait after `leave`."""
        with self._lock:
            ended, self._end, self._sleeper = self._end, None, None
        if ended is not None:
            ended.set_result(None)


class DeviceLease:
    """One block in which the member has its devices for itself; made by ``current_worker().device_lease()``.

    ``with`` is for ``def`` methods, ``async with`` for ``async def`` methods. Nested blocks, and blocks of methods that
    run
    at the same time, share one lease: the first wakes, the last puts to sleep.

    Attributes:
        devices: UUIDs of the devices; empty if the member has none, and then the block does not wait.
        waited_s: seconds that the block waited for the devices.
    """

    def __init__(self, lease: SharedLease, timeout_s: float, wake: Hook | None, sleep: Hook | None) -> None:
        self._lease, self._timeout_s = lease, timeout_s
        self._wake, self._sleep = wake, sleep
        self.devices: tuple[str, ...] = ()
        self.waited_s = 0.0

    def _take(self, answer: Any) -> None:
        found = self._lease.check(answer, self._timeout_s)
        self.devices, self.waited_s = tuple(found.devices), float(found.waited_s)

    def __enter__(self) -> DeviceLease:
        answer = self._lease.enter(self._timeout_s, threading.get_ident())
        try:
            found = answer.result()
        except BaseException:
            self._lease.forget()
            raise
        self._take(found)
        woken, mine = self._lease.claim_wake(threading.get_ident())
        try:
            if mine:
                with _finishing(woken):
                    _run(self._wake)
            woken.result()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        if self._lease.leave(threading.get_ident()):
            try:
                _run(self._sleep)  # If it raises, the memory is not free: then the member keeps the devices.
                self._lease.give_back().result()
            finally:
                self._lease.left()

    async def __aenter__(self) -> DeviceLease:
        answer = self._lease.enter(self._timeout_s, asyncio.current_task())
        try:
            found = await asyncio.shield(asyncio.wrap_future(answer))
        except BaseException:
            self._lease.forget()
            raise
        self._take(found)
        woken, mine = self._lease.claim_wake(asyncio.current_task())
        try:
            if mine:
                with _finishing(woken):
                    await _await(self._wake)
            await asyncio.shield(asyncio.wrap_future(woken))
        except BaseException:
            await self._aend()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._aend()

    async def _aend(self) -> None:
        if self._lease.leave(asyncio.current_task()):
            try:
                await _await(self._sleep)
                await asyncio.wrap_future(self._lease.give_back())
            finally:
                self._lease.left()


def _after(
    before: Future[None], ask: Callable[[], Future[Any]], timeout_s: float, lock: AbstractContextManager[object]
) -> Future[Any]:
    """The answer to a question that is asked once ``before`` is done, or a timeout. With ``lock``, whoever cancels the
    answer knows whether the question was asked before."""
    answer: Future[Any] = Future()

    def late() -> None:
        with suppress(InvalidStateError):
            answer.set_exception(LeaseTimeout(f"the member was still being put to sleep after {timeout_s:g} s"))

    def asked(_: Future[None]) -> None:
        timer.cancel()
        with lock, suppress(InvalidStateError):
            if answer.done():
                return
            try:
                ask().add_done_callback(found)
            except Exception as error:
                answer.set_exception(error)

    def found(done: Future[Any]) -> None:
        with suppress(InvalidStateError):
            if (error := done.exception()) is not None:
                answer.set_exception(error)
            else:
                answer.set_result(done.result())

    timer = threading.Timer(timeout_s, late)
    timer.daemon = True
    timer.start()
    before.add_done_callback(asked)
    return answer


@contextmanager
def _finishing(woken: Future[None]) -> Iterator[None]:
    """Complete ``woken``, the future that other blocks wait for."""
    try:
        yield
    except BaseException as error:
        woken.set_exception(error)
        raise
    woken.set_result(None)


def _run(hook: Hook | None) -> None:
    if hook is None:
        return
    if inspect.isawaitable(made := hook()):
        if inspect.iscoroutine(made):
            made.close()
        raise UsageError("device_lease(): wake and sleep that are async need  async with")


async def _await(hook: Hook | None) -> None:
    if hook is not None and inspect.isawaitable(made := hook()):
        await made
