"""Rehearsed kills at calls: a wrapped method reports its next call to the master, which sends the signal.

The call waits until the signal was sent, and goes on if it was for another process.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from rlmesh.errors import MethodNotFound, RLMeshError
from rlmesh.runtime.handle import MemberHandle
from rlmesh.runtime.runtime import Runtime

__all__ = ["ChaosHooks"]

logger = logging.getLogger(__name__)

REACHED_S = 2.0


class ChaosHooks:
    """The hooks of the members of one process.

    Args:
        runtime: the runtime that serves the members.
        master: gets a call when a hook is reached.
    """

    def __init__(self, runtime: Runtime, master: MemberHandle) -> None:
        self._runtime = runtime
        self._master = master.options(timeout_s=REACHED_S)
        self._waiting: list[tuple[str, str, str]] = []
        self._is_served = False

    def arm(self, member: str, method: str, kill: str) -> None:
        """Wrap a method of a member, now or as soon as the member is served."""
        if self._is_served:
            self._wrap(member, method, kill)
        else:
            self._waiting.append((member, method, kill))

    def served(self) -> None:
        """Wrap the methods that were named before the members were served. Call it once they are."""
        self._is_served = True
        waiting, self._waiting = self._waiting, []
        for member, method, kill in waiting:
            self._wrap(member, method, kill)

    def _wrap(self, member: str, method: str, kill: str) -> None:
        try:
            self._runtime.wrap_method(member, method, lambda function: self._wrapped(function, kill))
        except MethodNotFound as error:
            self._master.notify("cannot_reach", kill, str(error))

    def _wrapped(self, function: Callable[..., Any], kill: str) -> Callable[..., Any]:
        unreached = [kill]
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def run_async(*args: Any, **kwargs: Any) -> Any:
                if unreached:
                    try:
                        await self._master.call("reached", unreached.pop())
                    except RLMeshError as error:
                        logger.info("rehearsal %s: %s", kill, error)
                return await function(*args, **kwargs)

            return run_async

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if unreached:
                try:
                    self._master.call("reached", unreached.pop()).result()
                except RLMeshError as error:
                    logger.info("rehearsal %s: %s", kill, error)
            return function(*args, **kwargs)

        return run
