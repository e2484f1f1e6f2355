"""Releases rlmesh's sockets, locks and handlers in forked children.

``os.fork`` copies everything but the other threads: the sockets of the parent's connections, locks held by threads
that the child does not have, exit handlers and signal handlers. Owners of such things register here. In the child
their ``forked`` is called before any code of the user runs there, and releases the copies. The parent notices nothing.

A child's later use of inherited objects raises `UsageError` at once (`refusal`). A child may open its own runtime.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn, Protocol

from rlmesh.errors import UsageError

__all__ = ["Inherited", "Owner", "end_child", "forget_in_children", "handle", "refusal", "reset_in_children"]

logger = logging.getLogger(__name__)

Handler = Callable[[int, FrameType | None], Any]

count = 0
"""The number of forks between the process that first imported rlmesh and this process; an object that was made at
another count belongs to a parent."""


class Owner(Protocol):
    """An object that a forked child must release."""

    def forked(self) -> None:
        """In the child, release the inherited parts, without locks (their holders are gone) and without any message."""
        ...


class Inherited:
    """Stands in a child for a part of the parent's runtime; any use of it raises `UsageError`."""

    def __init__(self, whose: str) -> None:
        self._error_text = refusal(whose)

    def __getattr__(self, name: str) -> NoReturn:
        raise UsageError(self._error_text)


_owners: weakref.WeakSet[Any] = weakref.WeakSet()
_resets: list[Callable[[], object]] = []
_handlers: list[tuple[int, Handler, Any]] = []


def refusal(whose: str) -> str:
    """The error text for a child that uses an inherited object."""
    return (
        f"this process (pid {os.getpid()}) was forked from {whose}, whose connections, threads and reports stay with "
        "the parent: make the call in the parent and hand the value to the child, or open a connection of the child's "
        "own with Runtime.join(address, key_file)"
    )


def forget_in_children(owner: Owner) -> None:
    """Call ``owner.forked()`` in each child that is forked while the owner exists."""
    _owners.add(owner)


def reset_in_children(reset: Callable[[], object]) -> None:
    """Call ``reset``, which resets a module's state, in each child."""
    _resets.append(reset)


def handle(number: int, handler: Handler) -> Any:
    """Like `signal.signal`, for a handler that children must not inherit: in them the earlier handler is restored.

    Returns the earlier handler.
    """
    # A handler that was not installed by Python cannot be restored: children get the system's default.
    before = signal.getsignal(number) or signal.SIG_DFL
    signal.signal(number, handler)
    _handlers[:] = [entry for entry in _handlers if entry[0] != number or entry[1] == before]
    _handlers.append((number, handler, before))
    return before


def _restore_handlers() -> None:
    for number, ours, before in reversed(_handlers):
        if signal.getsignal(number) == ours:
            signal.signal(number, before)
    _handlers.clear()


def end_child(error: BaseException | None) -> NoReturn:
    """End a forked child as the interpreter would: the user's code in it has returned to rlmesh, which has no work for
    it."""
    code: Any = 0
    if isinstance(error, SystemExit):
        code = error.code
        if code is not None and not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
            code = 1
    elif error is not None:
        traceback.print_exception(error)
        code = 1
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit((code or 0) & 0xFF)


class _Forking(threading.local):
    """The signal mask that a forking thread had before the fork."""

    mask: set[int | signal.Signals] | None = None


_forking = _Forking()


def _before_fork() -> None:
    # A signal to the child waits until it has its own handlers: the interpreter drops signals that came before.
    if _handlers:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {number for number, _, _ in _handlers})


def _after_fork() -> None:
    if _forking.mask is not None:
        mask, _forking.mask = _forking.mask, None
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _in_child() -> None:
    global count
    count += 1
    try:
        _restore_handlers()
    except Exception:
        logger.exception("a forked child keeps its parent's signal handlers")
    _after_fork()
    for reset in _resets:
        reset()
    owners = list(_owners)
    _owners.clear()
    for owner in owners:
        try:
            owner.forked()
        except Exception:
            logger.exception("a forked child could not release its parent's %r", owner)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
