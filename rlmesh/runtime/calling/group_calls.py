"""How calls to several members of a role leave a process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rlmesh.runtime.calling.call_stats import CallGroup
from rlmesh.runtime.calling.generations import Cohort
from rlmesh.runtime.calling.pending import PendingCall
from rlmesh.runtime.connections.address_book import member_name
from rlmesh.runtime.future import Future
from rlmesh.runtime.handle import CallOptions
from rlmesh.runtime.serving.call_context import served_call
from rlmesh.wire.envelope import ANY_INCARNATION, WINDOW_SHIFT, Flag, Frames

if TYPE_CHECKING:
    from rlmesh.runtime.calling.calls import Calls
    from rlmesh.runtime.calling.future_arguments import PassedArguments
    from rlmesh.runtime.streams import Inbox, Stream


class GroupSubmission:
    """What a `Runtime` does for `RoleGroup`."""

    default_timeout_s: float
    post: Callable[..., None]
    _later: Callable[[float, Callable[[], None]], object]
    _calls: Calls

    if TYPE_CHECKING:

        def _encode(
            self, method: str, call: tuple[tuple[Any, ...], dict[str, Any]], *, keep: bool = True
        ) -> Frames | PassedArguments: ...

        def submit_encoded(
            self, name: str, method: str, frames: Frames | PassedArguments, options: CallOptions,
            endpoint: str | None = None, incarnation: int = ANY_INCARNATION, reply: bool = True,
            group: CallGroup | None = None, inbox: Inbox | None = None,
        ) -> Future[Any]: ...  # fmt: skip

    def go_together(self, role: str) -> bool:
        """Whether the members of a role are ranks of one group, as far as is known."""
        return self._calls.go_together(role)

    def submit_group(
        self, role: str, ranks: Sequence[int], method: str, frames: Sequence[Frames | PassedArguments],
        options: CallOptions, *, reply: bool = True, group: CallGroup | None = None, inbox: Inbox | None = None,
    ) -> list[Future[Any]]:  # fmt: skip
        """One call for each rank; those of an elastic role go to one generation of it, or nowhere."""
        names = [member_name(role, rank) for rank in ranks]
        if len(set(names)) < 2 or len(set(names)) < len(names) or not self._calls.go_together(role):
            return [
                self.submit_encoded(name, method, part, options, reply=reply, group=group, inbox=inbox)
                for name, part in zip(names, frames, strict=True)
            ]
        context = served_call()
        timeout_s = float(self.default_timeout_s if options.timeout_s is None else options.timeout_s)
        if context is not None:
            timeout_s = max(0.0, min(timeout_s, context.remaining_s()))
        chain = context.chain if context is not None else ()

        def launch(left_s: float, newer_than: int = -1, group: CallGroup | None = None) -> Cohort:
            parts = [
                PendingCall(
                    self._calls, name, method, left_s, chain, None, ANY_INCARNATION,
                    part if isinstance(part, list) else [], options.queue, group,
                )
                for name, part in zip(names, frames, strict=True)
            ]  # fmt: skip
            for call, part in zip(parts, frames, strict=True):
                if not isinstance(part, list):
                    call.passed = part
                if not reply:
                    call.flags = int(Flag.NO_REPLY)
                    continue
                call.future = Future(call)
                if inbox is not None:
                    call.flags = Flag.STREAM | inbox.window << WINDOW_SHIFT
                    call.source = inbox.add(call)
            cohort = Cohort(parts, newer_than)
            if any(call.passed is not None for call in parts):
                self._calls.start_cohort_later(cohort)
            else:
                self._calls.start_cohort(cohort)
            return cohort

        def gone() -> bool:
            # Of each rank, since this also forgets lost connections.
            return True in [self._calls.is_gone(name, None) for name in names]

        if options.idempotent and reply and inbox is None:
            from rlmesh.runtime.calling.group_retry import GroupRetries

            retries = GroupRetries(
                launch, lambda pause_s, fn: self.post(self._later, pause_s, fn),
                gone,
                lambda: self._calls.generation(role), timeout_s, len(names),
            )  # fmt: skip
            futures = retries.futures
            for future in futures:
                if context is not None:
                    context.add_child(future)
            retries.start()
            return futures
        futures = []
        for call in launch(timeout_s, group=group).parts:
            if call.future is not None:
                futures.append(call.future)
                if context is not None:
                    context.add_child(call.future)
        return futures

    def stream_group(
        self, role: str, ranks: Sequence[int], method: str, args: tuple[Any, ...], kwargs: dict[str, Any],
        options: CallOptions,
    ) -> Stream[Any]:  # fmt: skip
        """Ask members of a role for the items of a generator method."""
        from rlmesh.runtime.streams import Inbox, Stream

        frames = self._encode(method, (args, kwargs))
        inbox = Inbox(options.window)
        self.submit_group(role, ranks, method, [frames] * len(ranks), options, inbox=inbox)
        return Stream(inbox, self.post)

    def notify_group(
        self, role: str, ranks: Sequence[int], method: str, args: tuple[Any, ...], kwargs: dict[str, Any],
        options: CallOptions,
    ) -> None:  # fmt: skip
        """Call members of a role without waiting for an answer."""
        frames = self._encode(method, (args, kwargs), keep=False)
        self.submit_group(role, ranks, method, [frames] * len(ranks), options, reply=False)
