"""Calls that wait for their arguments, and the later calls to the same member that must not overtake them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from rlmesh.runtime.pending import PendingCall


class HeldCalls:
    """Everything happens on the runtime's loop.

    Args:
        post: runs a function on the loop, from any thread.
        go: takes a call whose turn has come; those with ``passed`` have all their arguments, or have ended.
    """

    def __init__(self, post: Callable[..., None], go: Callable[[PendingCall], None]) -> None:
        self._post, self._go = post, go
        self._queues: dict[str, deque[PendingCall]] = {}

    def add(self, call: PendingCall) -> None:
        """A call with passed arguments."""
        assert call.passed is not None
        self._queues.setdefault(call.name, deque()).append(call)
        advance = partial(self._post, self._advance, call.name)
        call.passed.when_ready(advance)
        if call.future is not None:
            call.future.on_settled(lambda _: advance())

    def takes(self, call: PendingCall) -> bool:
        """Whether an ordinary call has to wait behind others, in which case it does from now on."""
        queue = self._queues.get(call.name)
        if queue is None:
            return False
        queue.append(call)
        return True

    def __bool__(self) -> bool:
        return bool(self._queues)

    def all(self) -> list[PendingCall]:
        """Those that wait."""
        return [call for queue in list(self._queues.values()) for call in list(queue)]

    def _advance(self, name: str) -> None:
        queue = self._queues.get(name)
        while queue:
            call = queue[0]
            ended = call.future is not None and call.future.done()
            if call.passed is not None and not call.passed.ready and not ended:
                return
            queue.popleft()
            if not queue:
                # Before the call goes: what it leads to may call the same member again.
                del self._queues[name]
            self._go(call)
