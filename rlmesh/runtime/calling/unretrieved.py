"""Failed calls whose results nobody asked for: told once, when the future is collected, as asyncio does."""

from __future__ import annotations

import logging
import sys

from rlmesh.errors import CallCancelled, CallError, RemoteError, ShuttingDown
from rlmesh.runtime.process import clock, forked

logger = logging.getLogger(__name__)

AGAIN_S = 10.0
_KINDS = 1000
_OWN = ("@", "weights_")
"""Targets and methods of rlmesh's own calls begin so."""


class ErrorRetrieved:
    """Shared by futures of which one error is enough: ``told`` once somebody knows of it."""

    __slots__ = ("told",)

    def __init__(self) -> None:
        self.told = False


class Unheard:
    """A future's error until somebody asks for it. It is collected with the future."""

    __slots__ = ("_error", "_fork", "together")

    def __init__(self, error: BaseException, together: ErrorRetrieved | None) -> None:
        self._error: BaseException | None = error
        self.together = together
        self._fork = forked.count

    def heard(self) -> None:
        self._error = None

    def __del__(self) -> None:
        error, together = self._error, self.together
        if error is None or (together is not None and together.told) or sys.is_finalizing():
            return
        if self._fork != forked.count:  # the parent of this forked child tells it
            return
        if together is not None:
            together.told = True
        try:
            tell(error)
        except Exception:
            pass  # The collector runs this anywhere; nobody could take an error of it.


class Alike:
    """Of many failures of one kind within `AGAIN_S` the first is told, and later how many there were."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, str], tuple[float, int]] = {}

    def skip(self, kind: tuple[str, str], now: float) -> int | None:
        """None if this one is not told; else how many were not since the last one that was."""
        at, silent = self._told.get(kind, (-AGAIN_S, 0))
        if now - at < AGAIN_S:
            self._told[kind] = (at, silent + 1)
            return None
        if len(self._told) > _KINDS:
            self._told.clear()
        self._told[kind] = (now, 0)
        return silent


_alike = Alike()


def tell(error: BaseException) -> None:
    """Log an error that nobody will be given."""
    if isinstance(error, CallCancelled | ShuttingDown):
        return  # Whoever cancelled, or ends, knows.
    if not isinstance(error, CallError):
        logger.error("a call failed, and its result was never asked for: %s: %s", type(error).__name__, error)
        return
    details = CallError.details(error)
    member = str(details.role) if details.rank is None else f"{details.role}:{details.rank}"
    own = member.startswith(_OWN) or str(details.method).startswith(_OWN)
    what = f"{member}.{details.method}()" if details.method else "a call"
    if (alike := _alike.skip((what, type(error).__name__), clock.now())) is None:
        return
    if alike:
        what = f"{what} (and {alike} such calls before it)"
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, RemoteError):
        text = f"{error}\n{details.remote_traceback.rstrip()}"
    logger.log(logging.DEBUG if own else logging.ERROR, "%s failed, and its result was never asked for: %s", what, text)
