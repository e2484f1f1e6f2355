"""`ReceivesWeights` and `SendsWeights`: what a role class inherits so that a `WeightSync` can command it.

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

The commands to a sink run one after the other beside the member's own thread, so that a bucket is staged while the
member generates. What a source gathers runs on the member's main thread, in its turn: never beside an optimizer step.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from rlmesh.errors import UsageError, WeightSyncError
from rlmesh.job.context import current_worker
from rlmesh.runtime.argument_types import require_number
from rlmesh.runtime.default_runtime import default_runtime
from rlmesh.runtime.future import Future
from rlmesh.runtime.handle import MemberHandle
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime
from rlmesh.weights.protocols import WeightSink, WeightSource
from rlmesh.weights.transfer.delivery import Command
from rlmesh.weights.transfer.receiver import Receiver, Tap
from rlmesh.weights.transfer.sender import OpenedRoute, RouteStart, Sender, SenderOrigin
from rlmesh.wire.envelope import ANY_INCARNATION

MOST_VERSION = (1 << 63) - 1
BESIDE = 8
"""Calls of a method that may wait for each other beside the member's own thread."""


def commander(runtime: Runtime) -> Command:
    """Commands to members by ordinary calls of ``runtime``."""

    @lru_cache(maxsize=1024)
    def handle(sink: str, incarnation: int, timeout_s: float) -> MemberHandle[Any]:
        return MemberHandle[Any](runtime.outbound, sink, incarnation=incarnation).options(timeout_s=timeout_s)

    def command(
        sink: str, method: str, *args: Any, timeout_s: float, incarnation: int = ANY_INCARNATION
    ) -> Future[Any]:
        return handle(sink, incarnation, timeout_s).call(method, *args)

    return command


def origin_of(runtime: Runtime) -> SenderOrigin:
    """The job of this process; outside of a job, one of its own."""
    private, host = runtime.network.private, _host_of(runtime.endpoint)
    try:
        worker = current_worker()
    except UsageError:
        return SenderOrigin("w" + secrets.token_hex(6), private=private, host=host)
    return SenderOrigin(worker.job_info.job_id, worker.node_rank, private, host)


def _host_of(endpoint: str | None) -> str:
    """Where this process can be reached: as its calls are, or by the loopback if these never leave the machine."""
    if endpoint is None or not endpoint.startswith("tcp://"):
        return "127.0.0.1"
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")


class ReceivesWeights:
    """A member whose weights come from a `WeightSync`. Call `receive_weights` before the first push."""

    __receiver: Receiver | None = None

    def receive_weights(
        self, sink: WeightSink, *, name: str | None = None, incarnation: int | None = None, node: str | None = None,
        tap: Tap | None = None,
    ) -> Receiver:  # fmt: skip
        """Say where weights go. Name, incarnation and node are those of the worker unless they are given.

        Called again, it leaves the weight syncs of the sink before; the next push finds the new one.
        """
        if name is None:
            worker = current_worker()
            name, incarnation, node = worker.name, worker.incarnation, node or worker.node_name or None
        self.close_weights()
        left = self.__receiver.left if self.__receiver is not None else None
        self.__receiver = Receiver(sink, name, incarnation=incarnation or 0, node=node, tap=tap)
        self.__receiver.left = left
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
        """Leave all weight syncs; what is served stays."""
        if self.__receiver is not None:
            self.__receiver.close()

    # Of these only `Receiver` knows the order; it lets one in at a time.

    @rpc(concurrent=BESIDE)
    def weights_sink_describe(self) -> dict[str, Any]:
        return self.weights.describe()

    @rpc(concurrent=BESIDE)
    def weights_sink_has(self, session: str) -> bool:
        return self.weights.has(session)

    @rpc(concurrent=BESIDE)
    def weights_attach(self, opened: OpenedRoute, buckets: Sequence[Any]) -> None:
        self.weights.attach(opened.settings, opened.channel, buckets, opened.info)

    @rpc(concurrent=BESIDE)
    def weights_detach(self, session: str) -> None:
        self.weights.detach(session)

    @rpc(concurrent=64)
    def weights_stage(
        self, session: str, push: int, version: int, source: str, turn: int, buckets: tuple[int, int], payload: Any,
        checksums: Sequence[int], flip_s: float,
    ) -> None:  # fmt: skip
        self.weights.stage(session, push, version, source, turn, buckets, payload, checksums, flip_s)

    @rpc(concurrent=BESIDE)
    def weights_flip(self, push: int, version: int, flip_s: float, alone: bool, left: Sequence[Any]) -> None:
        self.weights.flip(push, version, flip_s, alone, left)

    @rpc(concurrent=BESIDE)
    def weights_conclude(self, push: int) -> None:
        self.weights.conclude(push)

    @rpc(concurrent=BESIDE)
    def weights_abort(self, session: str, push: int) -> int | None:
        self.weights.abort(push)
        self.weights.detach(session)
        return self.weights.version

    @rpc(concurrent=BESIDE)
    def weights_rollback(self, flip_s: float) -> int | None:
        return self.weights.rollback(flip_s)


class SendsWeights:
    """A member that trains the weights of a `WeightSync`. Call `send_weights` before the first push."""

    __sender: Sender | None = None

    def send_weights(
        self, source: WeightSource, *, restored: int | None = None, name: str | None = None,
        incarnation: int | None = None, node: str | None = None, runtime: Runtime | None = None,
    ) -> Sender:  # fmt: skip
        """Say where weights come from. Name, incarnation and node are those of the worker unless they are given.

        Called again, it leaves the weight syncs of the source before; the next push finds the new one. Without
        ``restored`` the weights are then taken to be those that were trained here so far.

        Args:
            source: the weights.
            restored: the version that these weights were restored from, as a checkpoint says; None: they were not
                restored. A push refuses a source that restarted and lost versions (`SourceRestarted`).
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
    def weights_source_describe(self) -> dict[str, Any]:
        return self.weights_source.describe()

    @rpc(concurrent=BESIDE)
    def weights_source_has(self, session: str) -> bool:
        return self.weights_source.has(session)

    @rpc
    def weights_open(
        self, session: str, buckets: Sequence[Any], routes: Sequence[RouteStart], keep: bool, timeout_s: float,
        verify: bool, sharded: bool,
    ) -> Mapping[str, OpenedRoute]:  # fmt: skip
        return self.weights_source.open(session, buckets, routes, keep, timeout_s, verify, sharded)

    @rpc
    def weights_connect(self, session: str) -> None:
        self.weights_source.connect(session)

    @rpc
    def weights_capture(
        self, session: str, push: int, version: int, flip_s: float, bucket_s: float, again: bool
    ) -> list[Any] | None:
        failure = self.weights_source.capture(session, push, version, flip_s, bucket_s, again)
        return failure.to_wire() if failure is not None else None

    @rpc(concurrent=2)
    def weights_sent(self, session: str, push: int) -> list[Any] | None:
        failure = self.weights_source.sent(session, push)
        return failure.to_wire() if failure is not None else None

    @rpc
    def weights_close(self, session: str) -> None:
        self.weights_source.close_session(session)
