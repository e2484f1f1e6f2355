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
            self.send_weights(ModuleSource(self.model))

The commands to a sink run one after the other on a thread of their own, so that a bucket is staged while the member
generates. What a source gathers runs on the member's main thread, in its turn: never beside an optimizer step.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from rlmesh.errors import UsageError, WeightSyncError
from rlmesh.job.context import current_worker
from rlmesh.runtime.executors import SerialExecutor
from rlmesh.runtime.future import Future
from rlmesh.runtime.handle import MemberHandle
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime, default_runtime
from rlmesh.weights.channels.base import RouteSettings
from rlmesh.weights.delivery import Command
from rlmesh.weights.plan import Channel
from rlmesh.weights.protocols import WeightSink, WeightSource
from rlmesh.weights.receiving import Receiver, Tap
from rlmesh.weights.sending import Opened, Origin, Sender
from rlmesh.wire.envelope import ANY_INCARNATION

T = TypeVar("T")


def commander(runtime: Runtime) -> Command:
    """Commands to members by ordinary calls of ``runtime``."""

    def command(
        sink: str, method: str, *args: Any, timeout_s: float, incarnation: int = ANY_INCARNATION
    ) -> Future[Any]:
        handle = MemberHandle[Any](runtime, sink, incarnation=incarnation)
        return handle.options(timeout_s=timeout_s).call(method, *args)

    return command


def origin_of(runtime: Runtime) -> Origin:
    """The job of this process; outside of a job, one of its own."""
    private, host = runtime.network.private, _host_of(runtime.endpoint)
    try:
        worker = current_worker()
    except UsageError:
        return Origin("w" + secrets.token_hex(6), private=private, host=host)
    return Origin(worker.job_info.job_id, worker.node_rank, private, host)


def _host_of(endpoint: str | None) -> str:
    """Where this process can be reached: as its calls are, or by the loopback if these never leave the machine."""
    if endpoint is None or not endpoint.startswith("tcp://"):
        return "127.0.0.1"
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def _set_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_error(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


class _Turns:
    """Runs functions one after the other on a thread of its own, for coroutines."""

    def __init__(self, name: str) -> None:
        self._executor = SerialExecutor(name)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def job() -> None:
            try:
                answer: Callable[[], None] = partial(_set_result, done, function(*args))
            except Exception as error:
                answer = partial(_set_error, done, error)
            try:
                loop.call_soon_threadsafe(answer)
            except RuntimeError:
                return  # the process is ending, and nobody waits any more

        self._executor.submit(job)
        return await done

    def close(self) -> None:
        self._executor.close()


class ReceivesWeights:
    """A member whose weights come from a `WeightSync`. Call `receive_weights` before the first push."""

    __receiver: Receiver | None = None
    __turns: _Turns | None = None

    def receive_weights(
        self, sink: WeightSink, *, name: str | None = None, incarnation: int | None = None, node: str | None = None,
        tap: Tap | None = None,
    ) -> Receiver:  # fmt: skip
        """Say where weights go. Name, incarnation and node are those of the worker unless they are given."""
        if name is None:
            worker = current_worker()
            name, incarnation, node = worker.name, worker.incarnation, node or worker.node_name or None
        self.__receiver = Receiver(sink, name, incarnation=incarnation or 0, node=node, tap=tap)
        self.__turns = self.__turns or _Turns(f"weights-{name}")
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
        if self.__turns is not None:
            self.__turns.close()
        if self.__receiver is not None:
            self.__receiver.close()

    async def __run(self, function: Callable[..., T], *args: Any) -> T:
        assert self.__turns is not None
        return await self.__turns.run(function, *args)

    @rpc
    async def weights_sink_describe(self) -> dict[str, Any]:
        return await self.__run(self.weights.describe)

    @rpc
    async def weights_attach(self, opened: Opened, buckets: Sequence[Any]) -> None:
        settings: RouteSettings = opened.settings
        await self.__run(self.weights.attach, settings, opened.channel, buckets, opened.info)

    @rpc
    async def weights_detach(self, session: str) -> None:
        await self.__run(self.weights.detach, session)

    @rpc(concurrent=64)
    async def weights_stage(
        self, session: str, push: int, version: int, index: int, payload: Any, checksums: Sequence[int], flip_s: float
    ) -> None:
        await self.__run(self.weights.stage, session, push, version, index, payload, checksums, flip_s)

    @rpc
    async def weights_flip(self, push: int, version: int, flip_s: float) -> None:
        await self.__run(self.weights.flip, push, version, flip_s)

    @rpc
    async def weights_conclude(self, push: int) -> None:
        await self.__run(self.weights.conclude, push)

    @rpc(concurrent=8)
    async def weights_abort(self, session: str, push: int) -> int | None:
        await self.__run(self.weights.abort, push)
        await self.__run(self.weights.detach, session)
        return self.weights.version

    @rpc
    async def weights_rollback(self, flip_s: float) -> int | None:
        return await self.__run(self.weights.rollback, flip_s)


class SendsWeights:
    """A member that trains the weights of a `WeightSync`. Call `send_weights` before the first push."""

    __sender: Sender | None = None

    def send_weights(
        self, source: WeightSource, *, name: str | None = None, incarnation: int | None = None,
        node: str | None = None, runtime: Runtime | None = None,
    ) -> Sender:  # fmt: skip
        """Say where weights come from. Name, incarnation and node are those of the worker unless they are given."""
        if name is None:
            worker = current_worker()
            name, incarnation, node = worker.name, worker.incarnation, node or worker.node_name or None
        runtime = runtime or default_runtime()
        self.__sender = Sender(
            source, name, commander(runtime), origin_of(runtime), incarnation=incarnation or 0, node=node
        )
        return self.__sender

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

    @rpc
    def weights_open(
        self, session: str, buckets: Sequence[Any], routes: Sequence[tuple[Channel, Mapping[str, int], bool]],
        keep: bool, timeout_s: float, verify: bool,
    ) -> Mapping[str, Opened]:  # fmt: skip
        return self.weights_source.open(session, buckets, routes, keep, timeout_s, verify)

    @rpc
    def weights_connect(self, session: str) -> None:
        self.weights_source.connect(session)

    @rpc
    def weights_capture(
        self, session: str, push: int, version: int, flip_s: float, bucket_s: float
    ) -> list[Any] | None:
        failure = self.weights_source.capture(session, push, version, flip_s, bucket_s)
        return failure.to_wire() if failure is not None else None

    @rpc(concurrent=2)
    def weights_sent(self, session: str, push: int) -> list[Any] | None:
        failure = self.weights_source.sent(session, push)
        return failure.to_wire() if failure is not None else None

    @rpc
    def weights_close(self, session: str) -> None:
        self.weights_source.close_session(session)
