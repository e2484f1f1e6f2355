"""What a forked child must not have of rlmesh, and how it loses it.

``os.fork`` copies everything but the other threads: the sockets on which the parent talks, locks that are held by
threads that the child does not have, exit handlers and signal handlers. Whatever owns such things registers here. In
the child its ``forked`` is called before any code of the user runs there, and lets go of the copies. The parent
notices nothing.

What a child asks of rlmesh afterwards raises `UsageError` at once (`refusal`). A child may open a runtime of its own.
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
"""How many forks lie between this process and the one that imported rlmesh first: what was made at another count is
the parent's."""


class Owner(Protocol):
    """Something of which a forked child must let go."""

    def forked(self) -> None:
        """In the child: let go, without locks (whoever held them is gone) and without a word to anybody else."""
        ...


class Inherited:
    """In a child, in the place of a part of the parent's: whatever is asked of it raises `UsageError`."""

    def __init__(self, whose: str) -> None:
        self._error_text = refusal(whose)

    def __getattr__(self, name: str) -> NoReturn:
        raise UsageError(self._error_text)


_owners: weakref.WeakSet[Any] = weakref.WeakSet()
_resets: list[Callable[[], object]] = []
_handlers: list[tuple[int, Handler, Any]] = []


def refusal(whose: str) -> str:
    """What a child is told that uses what is its parent's."""
    return (
        f"this process (pid {os.getpid()}) was forked from {whose}, whose connections, threads and reports stay with "
        "the parent: make the call in the parent and hand the value to the child, or open a connection of the child's "
        "own with Runtime.join(address, key_file)"
    )


def forget_in_children(owner: Owner) -> None:
    """Call ``owner.forked()`` in each child that is forked while the owner exists."""
    _owners.add(owner)


def reset_in_children(reset: Callable[[], object]) -> None:
    """Call ``reset`` in each child: for the state of a module."""
    _resets.append(reset)


def handle(number: int, handler: Handler) -> Any:
    """As `signal.signal`, for a handler that children must not have: they get back the one before. Gives that one."""
    # A handler that was not installed by Python cannot be put back: its place takes what the system does.
    before = signal.getsignal(number) or signal.SIG_DFL
    signal.signal(number, handler)
    _handlers[:] = [entry for entry in _handlers if entry[0] != number or entry[1] == before]
    _handlers.append((number, handler, before))
    return before


def _put_handlers_back() -> None:
    for number, ours, before in reversed(_handlers):
        if signal.getsignal(number) == ours:
            signal.signal(number, before)
    _handlers.clear()


def end_child(error: BaseException | None) -> NoReturn:
    """End a child whose code has come back into rlmesh's, as the interpreter would have ended it: there is nothing
    here for it to go on with."""
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
    """What a thread that forks had blocked before."""

    mask: set[int | signal.Signals] | None = None


_forking = _Forking()


def _before_fork() -> None:
    # A signal to the child waits until it has its own handlers: the interpreter forgets those that came before.
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
        _put_handlers_back()
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
            logger.exception("a forked child keeps what is its parent's: %r", owner)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
