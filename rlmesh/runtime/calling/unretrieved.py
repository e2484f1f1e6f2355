"""Logs the errors of failed calls whose results were never asked for, when their futures are collected, as asyncio
does."""

from __future__ import annotations

import logging
import sys

from rlmesh.errors import CallCancelled, CallError, RemoteError, ShuttingDown
from rlmesh.runtime.process import clock, forked

logger = logging.getLogger(__name__)

REPEAT_S = 10.0
_MOST_KINDS = 1000
TERMINATED = "rlmesh.agent.worker.control.Terminated"
"""The exception in a member's main thread when the member is told to end."""
_OWN = ("@", "weights_")
"""Prefixes of the targets and methods of rlmesh's own calls."""


class SharedReport:
    """Shared by futures whose errors are logged as one. ``done`` is True once an error was logged or retrieved."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done = False


class UnretrievedError:
    """A future's error until it is retrieved. Logs the error if the future is collected before that."""

    __slots__ = ("_error", "_fork", "report")

    def __init__(self, error: BaseException, report: SharedReport | None) -> None:
        self._error: BaseException | None = error
        self.report = report
        self._fork = forked.count

    def retrieved(self) -> None:
        self._error = None

    def __del__(self) -> None:
        error, report = self._error, self.report
        if error is None or (report is not None and report.done) or sys.is_finalizing():
            return
        if self._fork != forked.count:  # The parent of this forked child logs the error.
            return
        if report is not None:
            report.done = True
        try:
            log_error(error)
        except Exception:
            pass  # The garbage collector calls this: there is no caller who could handle an error.


class RepeatLimiter:
    """Limits the log to one of many alike failures within `REPEAT_S`, and counts the others."""

    def __init__(self) -> None:
        self._logged: dict[tuple[str, str], tuple[float, int]] = {}

    def skipped(self, kind: tuple[str, str], now: float) -> int | None:
        """The number of failures of this kind that were skipped since the last logged one; None if this failure is to
        be skipped too."""
        at, skipped = self._logged.get(kind, (-REPEAT_S, 0))
        if now - at < REPEAT_S:
            self._logged[kind] = (at, skipped + 1)
            return None
        if len(self._logged) > _MOST_KINDS:
            self._logged.clear()
        self._logged[kind] = (now, 0)
        return skipped


_limiter = RepeatLimiter()


def log_error(error: BaseException) -> None:
    """Log an error that no caller will be given."""
    if isinstance(error, CallCancelled | ShuttingDown):
        return  # Expected: the caller cancelled, or is ending.
    if isinstance(error, RemoteError) and error.remote_type == TERMINATED:
        return  # Expected: the member was told to end while the method ran.
    if not isinstance(error, CallError):
        logger.error("a call failed, and its result was never asked for: %s: %s", type(error).__name__, error)
        return
    details = CallError.details(error)
    member = str(details.role) if details.rank is None else f"{details.role}:{details.rank}"
    own = member.startswith(_OWN) or str(details.method).startswith(_OWN)
    what = f"{member}.{details.method}()" if details.method else "a call"
    if (skipped := _limiter.skipped((what, type(error).__name__), clock.now())) is None:
        return
    if skipped:
        what = f"{what} (and {skipped} such calls before it)"
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, RemoteError):
        text = f"{error}\n{details.remote_traceback.rstrip()}"
    logger.log(logging.DEBUG if own else logging.ERROR, "%s failed, and its result was never asked for: %s", what, text)
