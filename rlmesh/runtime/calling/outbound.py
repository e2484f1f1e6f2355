"""`Outbound`: the calls that leave a process.

Arguments are captured. Then a call is made of them and sent, or kept until it can be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rlmesh.errors import Unserializable, UsageError
from rlmesh.runtime.calling.call_stats import CallGroup
from rlmesh.runtime.calling.calls import Calls
from rlmesh.runtime.calling.pending import Cohort, PendingCall
from rlmesh.runtime.connections.address_book import AddressBook, member_name
from rlmesh.runtime.connections.network import NetworkOptions
from rlmesh.runtime.connections.shm_transfer import ShmTransfer
from rlmesh.runtime.future import Future
from rlmesh.runtime.handle import CallOptions
from rlmesh.runtime.serving.incoming import CallContext, current_call, served_call
from rlmesh.runtime.serving.result_store import FETCH, ResultStore
from rlmesh.wire import codec
from rlmesh.wire.envelope import ANY_INCARNATION, WINDOW_SHIFT, Buffer, Flag

if TYPE_CHECKING:
    from rlmesh.runtime.calling.future_arguments import Payload
    from rlmesh.runtime.calling.retry import GroupRetries
    from rlmesh.runtime.streams import Inbox, Stream
    from rlmesh.wire.passed import RemoteRef

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Outbound:
    """The calls that one runtime makes.

    Args:
        name: of the runtime.
        calls: the pending calls.
        shm: captures large buffers in shared memory.
        network: limits.
        default_timeout_s: the deadline of calls without an own one.
        post: runs a function on the runtime's loop.
        later: runs a function after a pause; on the loop.

    Attributes:
        peers: addresses, connections and deaths.
        own_endpoints: the addresses at which this process listens.
        results: the results that this process stores for its callers; set by the runtime.
    """

    results: ResultStore

    def __init__(
        self, name: str, calls: Calls, shm: ShmTransfer, network: NetworkOptions, default_timeout_s: float,
        post: Callable[..., None], later: Callable[[float, Callable[[], None]], object],
    ) -> None:  # fmt: skip
        self.name, self.default_timeout_s = name, default_timeout_s
        self.own_endpoints: set[str] = set()
        self.peers, self._calls, self._shm, self.network = calls.peers, calls, shm, network
        self._post, self._later = post, later

    def forked(self, inherited: Any) -> None:
        """In a forked child: replace the parent's parts by an object that raises on any use (`Inherited`)."""
        self._calls = self.peers = self._shm = self.results = inherited

    def address_book(self) -> AddressBook:
        book = self.peers.book
        if book is None:
            raise UsageError(
                f"{self.name} does not know the job's members yet: roles can be called from run(), from methods, and "
                "from setup() once all members are up"
            )
        return book

    # Arguments.

    def capture(self, buffers: Sequence[memoryview], rest_bytes: int = 0) -> Sequence[Buffer]:
        """Frames of large buffers, which later changes of the buffers do not affect: in shared memory if there is room.

        Args:
            rest_bytes: the size of the rest of the message.

        Raises:
            PayloadTooLarge: the message is above the cap.
        """
        self.network.check_payload(sum(buffer.nbytes for buffer in buffers) + rest_bytes)
        return self._shm.capture(buffers) if buffers else ()

    def encode_calls(self, method: str, calls: list[Arguments]) -> list[Payload]:
        """The frames for each member; members that get the same arguments share them, encoded once."""
        if len(calls) == 1:
            return [self._encode(method, calls[0])]
        encoded: dict[int, Payload] = {}
        for call in calls:
            if id(call) not in encoded:
                encoded[id(call)] = self._encode(method, call)
        return [encoded[id(call)] for call in calls]

    def _encode(self, method: str, call: Arguments, *, store: bool = True) -> Payload:
        """Capture arguments. If they hold futures, the call goes out once all of them have ended.

        Args:
            store: large results of those futures may stay at their producers.
        """
        try:
            return codec.encode(call, self.capture)
        except codec.Deferred:
            from rlmesh.runtime.calling.future_arguments import PassedArguments

            passed = PassedArguments(call, self.capture)
            passed.gather(store=store)
            return passed
        except Unserializable as error:
            raise _naming_the_argument(method, call, error) from error.__cause__

    # Calls to one member.

    def submit(
        self, name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions,
        endpoint: str | None = None, incarnation: int = ANY_INCARNATION, reply: bool = True,
    ) -> Future[Any]:  # fmt: skip
        """Send one call. Its arguments are captured before this returns."""
        frames = self._encode(method, (args, kwargs), store=reply)
        return self.submit_encoded(name, method, frames, options, endpoint, incarnation, reply)

    def submit_encoded(
        self, name: str, method: str, frames: Payload, options: CallOptions,
        endpoint: str | None = None, incarnation: int = ANY_INCARNATION, reply: bool = True,
        group: CallGroup | None = None, inbox: Inbox | None = None,
    ) -> Future[Any]:  # fmt: skip
        """Send one call with captured arguments, on behalf of the call that this thread or task serves."""
        context = current_call.get()
        timeout_s = float(self.default_timeout_s if options.timeout_s is None else options.timeout_s)
        chain: tuple[str, ...] = ()
        if context is not None:
            if context.over:
                context = None
            else:
                chain = context.chain
                timeout_s = max(0.0, min(timeout_s, context.remaining_s()))
        if options.idempotent and reply and inbox is None:
            return self._retried(name, method, frames, timeout_s, chain, endpoint, incarnation, options.queue, context)
        call = PendingCall(
            self._calls, name, method, timeout_s, chain, endpoint, incarnation, frames, options.queue, group
        )
        if options.rank_loop is not None:
            call.rank_loop = options.rank_loop
            call.rank_loop.add(call)
        future: Future[Any] = Future(call)
        if reply:
            call.future = future
            if context is not None:
                context.add_child(future)
            if inbox is not None:
                call.flags = Flag.STREAM | inbox.window << WINDOW_SHIFT
                call.source = inbox.add(call)
        else:
            call.flags = int(Flag.NO_REPLY)
        self._calls.start(call)
        return future

    def fetch(self, ref: RemoteRef, timeout_s: float | None) -> Future[Any]:
        """Get a result that a process stores; on behalf of no particular call."""
        if ref.endpoint in self.own_endpoints:
            future: Future[Any] = Future()
            try:
                future.end(self.results.value(ref, self.capture), None)
            except Exception as error:
                future.end(None, error)
            return future
        # The caller, perhaps on another node, named the producer by the address that the caller itself uses.
        book = self.peers.book
        member = book.by_name.get(ref.name) if book is not None else None
        if member is not None and member.endpoint and member.incarnation == ref.incarnation:
            ref = ref._replace(endpoint=member.endpoint)
        limit_s = self.default_timeout_s if timeout_s is None else timeout_s
        frames = codec.encode(((ref.token, *ref.part), {}))
        return self._launch(ref.name, FETCH, frames, float(limit_s), (), ref.endpoint, ref.incarnation, True)

    def _launch(
        self, name: str, method: str, frames: Payload, timeout_s: float, chain: tuple[str, ...],
        endpoint: str | None, incarnation: int, queue: bool,
    ) -> Future[Any]:  # fmt: skip
        """Make a call on behalf of no particular call, from any thread."""
        call = PendingCall(self._calls, name, method, timeout_s, chain, endpoint, incarnation, frames, queue, None)
        call.future = future = Future[Any](call)
        self._calls.start(call)
        return future

    def _retried(
        self, name: str, method: str, frames: Payload, timeout_s: float, chain: tuple[str, ...],
        endpoint: str | None, incarnation: int, queue: bool, context: CallContext | None,
    ) -> Future[Any]:  # fmt: skip
        """Make a call that is repeated where `pause_before_retry` allows it."""
        from rlmesh.runtime.calling.retry import Retries

        retries = Retries(
            lambda left_s: self._launch(name, method, frames, left_s, chain, endpoint, incarnation, queue),
            self._on_loop_later,
            lambda: self.peers.is_gone(name, endpoint),
            timeout_s,
        )
        if context is not None:
            context.add_child(retries.future)
        retries.start()
        return retries.future

    def _on_loop_later(self, pause_s: float, fn: Callable[[], None]) -> None:
        self._post(self._later, pause_s, fn)

    def stream(
        self, targets: Sequence[tuple[str, str | None, int]], method: str, args: tuple[Any, ...],
        kwargs: dict[str, Any], options: CallOptions,
    ) -> Stream[Any]:  # fmt: skip
        """Ask members, each by name, endpoint (or None) and incarnation, for the items of a generator method."""
        from rlmesh.runtime.streams import Inbox, Stream

        frames = self._encode(method, (args, kwargs))
        inbox = Inbox(options.window)
        for name, endpoint, incarnation in targets:
            self.submit_encoded(name, method, frames, options, endpoint, incarnation, inbox=inbox)
        return Stream(inbox, self._post)

    # Calls to several members of a role.

    def submit_group(
        self, role: str, ranks: Sequence[int], method: str, frames: Sequence[Payload],
        options: CallOptions, *, reply: bool = True, group: CallGroup | None = None, inbox: Inbox | None = None,
    ) -> list[Future[Any]]:  # fmt: skip
        """Make one call for each rank. The calls to an elastic role go to one generation of its group, or to none."""
        if len(ranks) == 1:
            name = f"{role}:{ranks[0]}"  # As `member_name`, once per call.
            return [self.submit_encoded(name, method, frames[0], options, None, ANY_INCARNATION, reply, group, inbox)]
        names = [member_name(role, rank) for rank in ranks]
        if len(set(names)) < len(names) or not names or not self.peers.go_together(role):
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
                PendingCall(self._calls, name, method, left_s, chain, None, ANY_INCARNATION, part, options.queue, group)
                for name, part in zip(names, frames, strict=True)
            ]
            for call in parts:
                if not reply:
                    call.flags = int(Flag.NO_REPLY)
                    continue
                call.future = Future(call)
                if inbox is not None:
                    call.flags = Flag.STREAM | inbox.window << WINDOW_SHIFT
                    call.source = inbox.add(call)
            cohort = Cohort(parts, newer_than)
            self._calls.cohorts.start(cohort)
            return cohort

        def is_gone() -> bool:
            # A list, so that every rank is checked: `PeerTable.is_gone` also forgets the rank's lost connection.
            return True in [self.peers.is_gone(name, None) for name in names]

        retries: GroupRetries | None = None
        if options.idempotent and reply and inbox is None:
            from rlmesh.runtime.calling.retry import GroupRetries

            retries = GroupRetries(
                launch, self._on_loop_later, is_gone, lambda: self.peers.generation(role), timeout_s, len(names)
            )
            futures = retries.futures
        else:
            parts = launch(timeout_s, group=group).parts
            futures = [call.future for call in parts if call.future is not None]
        if context is not None:
            for future in futures:
                context.add_child(future)
        if retries is not None:
            retries.start()
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
        return Stream(inbox, self._post)

    def notify_group(
        self, role: str, ranks: Sequence[int], method: str, args: tuple[Any, ...], kwargs: dict[str, Any],
        options: CallOptions,
    ) -> None:  # fmt: skip
        """Call members of a role without waiting for an answer."""
        frames = self._encode(method, (args, kwargs), store=False)
        self.submit_group(role, ranks, method, [frames] * len(ranks), options, reply=False)


def _not_captured(buffers: Sequence[memoryview], rest_bytes: int = 0) -> Sequence[Buffer]:
    """The buffers themselves, for values that are encoded only to see whether that works."""
    return buffers


def _naming_the_argument(method: str, call: Arguments, error: Unserializable) -> Unserializable:
    """The same error, with the name of the argument that cannot be sent."""
    from rlmesh.runtime.batch_split import named_arguments

    for name, value in named_arguments(*call):
        try:
            codec.encode(value, _not_captured)
        except Unserializable as own:
            return Unserializable(f"{name} of {method}(): {own}")
    return error
