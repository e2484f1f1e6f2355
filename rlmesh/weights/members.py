"""The commands of weight sync: `ReceivesWeights` and `SendsWeights` export them, `MemberEndpoint` sends them.

::

    class Rollout(ReceivesWeights):
        def setup(self):
            self.receive_weights(ModuleSink(self.model))

        @rpc
        def generate(self, prompts):
            with self.weights.serving() as version:
                …

    class Actor(SendsWeights):
        def setup(self):
            step = self.load_checkpoint()               # None: there is none yet
            self.send_weights(ModuleSource(self.model), restored=step)

A role class inherits from `ReceivesWeights` or `SendsWeights`. The commands to a sink run one at a time on other
threads than the member's own, so that a bucket is staged while the member generates. A source gathers on the member's
main thread, in the order of calls: never at the same time as an optimizer step.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from rlmesh.errors import UsageError, WeightSyncError
from rlmesh.job.context import current_worker
from rlmesh.runtime.argument_types import require_number
from rlmesh.runtime.connections.address_book import AddressBook, member_name
from rlmesh.runtime.default_runtime import default_runtime
from rlmesh.runtime.future import Future
from rlmesh.runtime.group import RoleGroup
from rlmesh.runtime.handle import CallOptions
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime
from rlmesh.weights.planning.buckets import Bucket
from rlmesh.weights.planning.plan import Participant
from rlmesh.weights.protocols import WeightSink, WeightSource
from rlmesh.weights.transfer.delivery import Command, DeliveryFailure
from rlmesh.weights.transfer.receiver import Receiver, Tap
from rlmesh.weights.transfer.sender import OpenedRoute, RouteStart, Sender, SenderOrigin
from rlmesh.wire.envelope import ANY_INCARNATION

MOST_VERSION = (1 << 63) - 1
CONCURRENT = 8
"""Limit of running calls per command, on other threads than the member's own."""


Incarnations = Mapping[str, int]


def commander(runtime: Runtime) -> Command:
    """A `Command` that calls members through ``runtime``."""

    options = lru_cache(maxsize=64)(lambda timeout_s: CallOptions().changed(timeout_s=timeout_s))

    def command(
        member: str, method: str, *args: Any, timeout_s: float, incarnation: int = ANY_INCARNATION
    ) -> Future[Any]:
        return runtime.outbound.submit(member, method, args, {}, options(timeout_s), None, incarnation)

    return command


def origin_of(runtime: Runtime) -> SenderOrigin:
    """The job of this process; outside of a job, a random job id."""
    private, host = runtime.network.private, _host_of(runtime.endpoint)
    try:
        worker = current_worker()
    except UsageError:
        return SenderOrigin("w" + secrets.token_hex(6), private=private, host=host)
    return SenderOrigin(worker.job_info.job_id, worker.node_rank, private, host)


def _host_of(endpoint: str | None) -> str:
    """The address at which calls reach this process; loopback if calls do not leave the machine."""
    if endpoint is None or not endpoint.startswith("tcp://"):
        return "127.0.0.1"
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")


class ReceivesWeights:
    """A member that gets its weights from a `WeightSync`. Call `receive_weights` before the first push."""

    __receiver: Receiver | None = None

    def receive_weights(
        self, sink: WeightSink, *, name: str | None = None, incarnation: int | None = None, node: str | None = None,
        tap: Tap | None = None,
    ) -> Receiver:  # fmt: skip
        """Set the sink of this member. Name, incarnation and node default to those of the worker.

        A second call leaves the weight syncs of the previous sink; the next push finds the new one.
        """
        if name is None:
            worker = current_worker()
            name, incarnation, node = worker.name, worker.incarnation, node or worker.node_name or None
        self.close_weights()
        last_commit = self.__receiver.last_commit if self.__receiver is not None else None
        self.__receiver = Receiver(sink, name, incarnation=incarnation or 0, node=node, tap=tap)
        self.__receiver.last_commit = last_commit
        return self.__receiver

    @property
    def weights(self) -> Receiver:
        """The receiver: ``weights.serving()``, ``weights.version``."""
        if self.__receiver is None:
            raise WeightSyncError(
                f"{type(self).__qualname__} takes no weights yet: call receive_weights(sink) in setup()"
            )
        return self.__receiver

    def close_weights(self) -> None:
        """Leave all weight syncs; the member serves its version on."""
        if self.__receiver is not None:
            self.__receiver.close()

    # Commands; the receiver runs one at a time, in order.

    @rpc(concurrent=CONCURRENT)
    def weights_sink_describe(self) -> Participant:
        return self.weights.describe()

    @rpc(concurrent=CONCURRENT)
    def weights_sink_has(self, session: str) -> bool:
        return self.weights.has(session)

    @rpc(concurrent=CONCURRENT)
    def weights_attach(self, opened: OpenedRoute, buckets: tuple[Bucket, ...]) -> None:
        self.weights.attach(opened.settings, opened.channel, buckets, opened.info)

    @rpc(concurrent=CONCURRENT)
    def weights_detach(self, session: str) -> None:
        self.weights.detach(session)

    @rpc(concurrent=64)
    def weights_stage(
        self, session: str, push: int, version: int, source: str, turn: int, buckets: tuple[int, int], payload: Any,
        checksums: Sequence[int], flip_s: float,
    ) -> None:  # fmt: skip
        self.weights.stage(session, push, version, source, turn, buckets, payload, checksums, flip_s)

    @rpc(concurrent=CONCURRENT)
    def weights_flip(self, push: int, version: int, flip_s: float, alone: bool, left: Sequence[Any]) -> None:
        self.weights.flip(push, version, flip_s, alone, left)

    @rpc(concurrent=CONCURRENT)
    def weights_conclude(self, push: int) -> None:
        self.weights.conclude(push)

    @rpc(concurrent=CONCURRENT)
    def weights_abort(self, session: str, push: int) -> int | None:
        self.weights.abort(push)
        self.weights.detach(session)
        return self.weights.version

    @rpc(concurrent=CONCURRENT)
    def weights_rollback(self, flip_s: float) -> int | None:
        return self.weights.rollback(flip_s)


class SendsWeights:
    """A member that trains the weights of a `WeightSync`. Call `send_weights` before the first push."""

    __sender: Sender | None = None

    def send_weights(
        self, source: WeightSource, *, restored: int | None = None, name: str | None = None,
        incarnation: int | None = None, node: str | None = None, runtime: Runtime | None = None,
    ) -> Sender:  # fmt: skip
        """Set the source of this member. Name, incarnation and node default to those of the worker.

        A second call leaves the weight syncs of the previous source; the next push finds the new one. Without
        ``restored`` the new source's weights are assumed to continue those of the previous one.

        Args:
            source: the weights.
            restored: the version that these weights were restored from, as the checkpoint says; None: not restored. A
                push refuses a source that restarted and lost versions (`SourceRestarted`).
        """
        if restored is not None:
            require_number("send_weights(restored=…)", restored, 0, MOST_VERSION)
        if name is None:
            worker = current_worker()
            name, incarnation, node = worker.name, worker.incarnation, node or worker.node_name or None
            worker.restored = restored if restored is not None else worker.restored
        runtime = runtime or default_runtime()
        made = Sender(
            source, name, commander(runtime), origin_of(runtime), incarnation=incarnation or 0, node=node,
            restored=restored,
        )  # fmt: skip
        before = self.__sender
        self.close_weights_source()
        if before is not None and restored is None and before.incarnation == made.incarnation:
            made.restored, made.sent_version = before.restored, before.sent_version
        self.__sender = made
        return made

    def close_weights_source(self) -> None:
        """Leave all weight syncs."""
        if self.__sender is not None:
            self.__sender.close()

    @property
    def weights_source(self) -> Sender:
        """The sender."""
        if self.__sender is None:
            raise WeightSyncError(
                f"{type(self).__qualname__} has no weights to send yet: call send_weights(source) in setup()"
            )
        return self.__sender

    @rpc
    def weights_source_describe(self) -> Participant:
        return self.weights_source.describe()

    @rpc(concurrent=CONCURRENT)
    def weights_source_has(self, session: str) -> bool:
        return self.weights_source.has(session)

    @rpc
    def weights_open(
        self, session: str, buckets: tuple[Bucket, ...], routes: Sequence[RouteStart], keep: bool, timeout_s: float,
        verify: bool, sharded: bool,
    ) -> Mapping[str, OpenedRoute]:  # fmt: skip
        return self.weights_source.open(session, buckets, routes, keep, timeout_s, verify, sharded)

    @rpc
    def weights_connect(self, session: str) -> None:
        self.weights_source.connect(session)

    @rpc
    def weights_capture(
        self, session: str, push: int, version: int, flip_s: float, bucket_s: float, again: bool
    ) -> DeliveryFailure | None:
        return self.weights_source.capture(session, push, version, flip_s, bucket_s, again)

    @rpc(concurrent=2)
    def weights_sent(self, session: str, push: int) -> DeliveryFailure | None:
        return self.weights_source.sent(session, push)

    @rpc
    def weights_close(self, session: str) -> None:
        self.weights_source.close_session(session)


class MemberEndpoint:
    """All members of some roles. `command` sends a command to a member; if an incarnation is given, to no other."""

    is_local = False

    def __init__(self, groups: Sequence[RoleGroup[Any]], runtime: Runtime) -> None:
        self._groups, self._runtime = groups, runtime
        self.command = commander(runtime)
        self._known: tuple[AddressBook, Incarnations] | None = None

    def incarnations(self) -> Incarnations:
        """The current members, and the number of restarts of each."""
        book = self._runtime.address_book()
        if self._known is not None and self._known[0] is book:
            return self._known[1]
        found: dict[str, int] = {}
        for group in self._groups:
            for rank in group.ranks:
                member = book.find(group.role, rank)
                found[member_name(group.role, rank)] = member.incarnation if member is not None else -1
        self._known = book, found
        return found

    def present(self) -> Incarnations:
        """The members without those whose process has ended, or starts again after an end; what `incarnations` gives
        of each."""
        book, dead = self._runtime.address_book(), self._runtime.outbound.peers.dead

        def is_there(name: str, incarnation: int) -> bool:
            member = book.by_name.get(name)
            # A member that restarts alone has no address before it serves. One that starts for the first time counts.
            restarts = member is not None and member.incarnation > 0 and member.endpoint is None
            return not restarts and (name, incarnation) not in dead

        return {name: incarnation for name, incarnation in self.incarnations().items() if is_there(name, incarnation)}

    def behind(self, members: Iterable[str], version: int, timeout_s: float) -> frozenset[str]:
        """The sinks among ``members`` that do not serve ``version``.

        Raises:
            WeightSyncError: a sink does not answer.
        """
        asked = {m: self.command(m, "weights_sink_describe", timeout_s=timeout_s) for m in members}
        served: dict[str, int | None] = {}
        for member, answer in asked.items():
            try:
                served[member] = answer.result().version
            except Exception as error:
                text = f"{member} could not say what it serves: {type(error).__name__}: {error}"
                raise WeightSyncError(text) from error
        return frozenset(member for member, now in served.items() if now != version)

    def rollback(self, flip_s: float, timeout_s: float) -> int:
        """Let all sinks go back to the version before; returns it.

        Raises:
            WeightSyncError: a sink could not.
        """
        asked = {m: self.command(m, "weights_rollback", flip_s, timeout_s=timeout_s) for m in self.incarnations()}
        served: dict[str, int | None] = {}
        faults = []
        for member, answer in asked.items():
            try:
                served[member] = answer.result()
            except Exception as error:
                faults.append(f"{member}: {error}")
        versions = set(served.values())
        if faults or len(versions) != 1 or None in versions:
            now = ", ".join(f"{member} serves {version}" for member, version in served.items()) or "none did"
            raise WeightSyncError(f"not all sinks could go back: {'; '.join(faults)}. {now}. Push a version to all")
        return next(version for version in versions if version is not None)


class LocalSource(SendsWeights):
    """A source in this process; its commands are method calls, which have ended when `command` returns."""

    is_local = True

    def __init__(self, source: WeightSource, runtime: Runtime) -> None:
        try:
            worker = current_worker()
            self.name, incarnation, node = worker.name, worker.incarnation, worker.node_name or None
        except UsageError:
            self.name, incarnation, node = f"process {os.getpid()}", 0, None
        self.send_weights(source, name=self.name, incarnation=incarnation, node=node, runtime=runtime)

    def incarnations(self) -> Incarnations:
        return {self.name: self.weights_source.incarnation}

    def command(
        self, member: str, method: str, *args: Any, timeout_s: float, incarnation: int = ANY_INCARNATION
    ) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.end(getattr(self, method)(*args), None)
        except Exception as error:
            future.end(None, error)
        return future


Endpoint: TypeAlias = MemberEndpoint | LocalSource
"""One side of a `WeightSync`: its source or its sinks."""
