"""Calls that wait for their arguments, and the later calls to the same member that must not overtake them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from rlmesh.runtime.calling.pending import Cohort, PendingCall


class DependencyQueue:
    """Queues calls, per member, behind calls whose arguments are missing. Its methods run on the runtime's loop.

    Args:
        post: runs a function on the loop, from any thread.
        go: called with a call whose turn has come; a call with ``passed`` has all its arguments, or has ended.
        go_together: the same for the parts of a call to several ranks of an elastic role.
    """

    def __init__(
        self, post: Callable[..., None], go: Callable[[PendingCall], None], go_together: Callable[[Cohort], None]
    ) -> None:
        self._post, self._go, self._go_together = post, go, go_together
        self._queues: dict[str, deque[PendingCall]] = {}

    def add(self, call: PendingCall) -> None:
        """Queue a call with passed arguments."""
        assert call.passed is not None
        self._queues.setdefault(call.name, deque()).append(call)
        advance = partial(self._post, self._advance, call.name)
        call.passed.when_ready(advance)
        if call.future is not None:
            call.future.on_settled(lambda _: advance())

    def takes(self, call: PendingCall) -> bool:
        """Queue a call without passed arguments if it must wait behind others; False if it need not wait."""
        queue = self._queues.get(call.name)
        if queue is None:
            return False
        queue.append(call)
        return True

    def add_cohort(self, cohort: Cohort) -> None:
        """Queue the parts of a call to several ranks, some of which have passed arguments; the parts go together."""
        for part in cohort.parts:
            self._queues.setdefault(part.name, deque()).append(part)
        for part in cohort.parts:
            advance = partial(self._post, self._advance, part.name)
            if part.passed is not None:
                part.passed.when_ready(advance)
            if part.future is not None:
                part.future.on_settled(partial(_ignoring, advance))

    def takes_cohort(self, cohort: Cohort) -> bool:
        """Like `takes`; if one part must wait, all parts wait."""
        if not any(part.name in self._queues for part in cohort.parts):
            return False
        self.add_cohort(cohort)
        return True

    def __bool__(self) -> bool:
        return bool(self._queues)

    def all(self) -> list[PendingCall]:
        """The queued calls."""
        return [call for queue in list(self._queues.values()) for call in list(queue)]

    def _advance(self, name: str) -> None:
        queue = self._queues.get(name)
        while queue:
            call = queue[0]
            if call.cohort is not None:
                if not self._may_go(call.cohort):
                    return
                self._release(call.cohort, name)
                queue = self._queues.get(name)
                continue
            ended = call.future is not None and call.future.done()
            if call.passed is not None and not call.passed.ready and not ended:
                return
            queue.popleft()
            if not queue:
                # The queue is removed before the call goes, since the call may lead to calls of the same member.
                del self._queues[name]
            self._go(call)

    def _may_go(self, cohort: Cohort) -> bool:
        """True if each part is the first of its queue and has its arguments, or if a part has failed."""
        if cohort.ended() or any(p.passed is not None and p.passed.ready and p.passed.error() for p in cohort.parts):
            return True
        return all(
            self._queues[part.name][0] is part and (part.passed is None or part.passed.ready) for part in cohort.parts
        )

    def _release(self, cohort: Cohort, name: str) -> None:
        for part in cohort.parts:
            queue = self._queues.get(part.name)
            if queue is not None and part in queue:
                queue.remove(part)
                if not queue:
                    del self._queues[part.name]
            if part.name != name:
                self._post(self._advance, part.name)
        self._go_together(cohort)


def _ignoring(fn: Callable[[], None], _: object) -> None:
    fn()
