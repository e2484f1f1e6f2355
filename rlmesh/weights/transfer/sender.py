"""`Sender`: one rank of the source. Gathers bucket after bucket and gives it to the routes that start at this rank.

The module has no RPC but the ``command`` function that it gets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rlmesh.errors import WeightSyncError
from rlmesh.weights.channels.base import ChannelSender, RouteSettings, open_sender
from rlmesh.weights.manifest import Manifest
from rlmesh.weights.planning.buckets import Bucket, join
from rlmesh.weights.planning.device_location import location_of
from rlmesh.weights.planning.plan import Channel, Participant
from rlmesh.weights.planning.source_state import RankState
from rlmesh.weights.protocols import SOURCE, ShardedSource, WeightSource, check_end
from rlmesh.weights.transfer.delivery import Command, Delivery, DeliveryFailure, Header


@dataclass(frozen=True, slots=True)
class RouteStart:
    """One route that starts at a rank: sink → incarnation, and fields of `RouteSettings`."""

    channel: Channel
    sinks: Mapping[str, int]
    on_gpu: bool
    same_device: bool
    shares_events: bool


@dataclass(frozen=True, slots=True)
class SenderOrigin:
    """The job and network of this process; see `RouteSettings`."""

    job_id: str
    node_rank: int = 0
    private: bool = False
    host: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class OpenedRoute:
    """The data with which a sink attaches to a route."""

    settings: RouteSettings
    channel: Channel
    info: Mapping[str, Any]


@dataclass(eq=False)
class _OutgoingRoute:
    """A route that starts at this rank.

    Attributes:
        durations: bucket → seconds until the sinks had it in the last push.
    """

    sinks: Mapping[str, int]
    channel: ChannelSender
    durations: dict[int, float] = field(default_factory=dict)


class _SourceForm(NamedTuple):
    """The properties of a source for which a plan is made."""

    manifest: Manifest
    parts: Mapping[str, tuple[int, int]] | None
    device: str
    lasting: bool

    @classmethod
    def of(cls, source: WeightSource, sharded: ShardedSource | None) -> _SourceForm:
        manifest = source.manifest()  # first: it refreshes the other properties
        return cls(manifest, sharded.parts() if sharded is not None else None, source.device, source.lasting)

    def changes(self, now: _SourceForm) -> list[str]:
        """Descriptions of the differences."""
        names = [spec.name for spec in (*self.manifest, *now.manifest)]
        other = [name for name in dict.fromkeys(names) if self.manifest.find(name) != now.manifest.find(name)]
        specs = [f"{now.manifest.find(name) or f'no {name}'}, not {self.manifest.find(name)}" for name in other[:3]]
        if self.device != now.device:
            specs.append(f"they are on {now.device}, not on {self.device}")
        return specs or ["they are tied, sharded or ordered otherwise"]


@dataclass(eq=False)
class _SendingSession:
    buckets: tuple[Bucket, ...]
    keep: bool
    sharded: bool
    routes: list[_OutgoingRoute]
    form: _SourceForm
    stale: bool = False
    deliveries: dict[int, list[Delivery]] = field(default_factory=dict)
    _joined: dict[tuple[int, int], list[Bucket]] = field(default_factory=dict)

    def to_put(self) -> list[Bucket]:
        """All buckets, joined as far as all routes allow. A rank without routes gathers for the other ranks, in the
        same buckets."""
        limits = [route.channel.joins_bytes for route in self.routes] or [(0, 0)]
        most = limits[0] if len(limits) == 1 else (min(a for a, _ in limits), min(b for _, b in limits))
        found = self._joined.get(most)
        if found is None:
            found = self._joined[most] = join(self.buckets, *most)
        return found


class Sender:
    """One source rank.

    Args:
        source: the weights.
        who: the member's name.
        command: sends commands to sinks.
        origin: its job.
        incarnation: the number of the member's restarts.
        node: the name of its node; None: this machine's.
        restored: the version of the checkpoint that the weights were restored from; None: not restored.

    Raises:
        UsageError: ``source`` lacks methods or attributes of a `WeightSource`.
    """

    def __init__(
        self, source: WeightSource, who: str, command: Command, origin: SenderOrigin, *, incarnation: int = 0,
        node: str | None = None, restored: int | None = None,
    ) -> None:  # fmt: skip
        check_end(source, SOURCE, "weight source", "ModuleSource(model) or ArraySource(arrays)")
        self.source, self.who, self.incarnation = source, who, incarnation
        self._sharded = source if isinstance(source, ShardedSource) else None
        self._command, self._origin, self._node = command, origin, node
        self.restored = restored
        self.sent_version: int | None = None
        """The version that was sent last."""
        self._sent_stamp: object = None
        """The source's stamp at that push."""
        self._sessions: dict[str, _SendingSession] = {}

    def describe(self) -> Participant:
        form = _SourceForm.of(self.source, self._sharded)
        return Participant(
            self.who, self.incarnation, location_of(form.device, self._node), form.manifest,
            parts=dict(form.parts) if form.parts else None,
            rank_state=RankState(self.incarnation, self.restored, self.sent_version),
        )  # fmt: skip

    def open(
        self, session: str, buckets: tuple[Bucket, ...], routes: Sequence[RouteStart], keep: bool, timeout_s: float,
        verify: bool, sharded: bool,
    ) -> dict[str, OpenedRoute]:  # fmt: skip
        """Open the routes that start here; returns the data with which each sink connects.

        Args:
            sharded: ``buckets`` are this rank's shards: send these, and gather nothing.
        """
        made: list[_OutgoingRoute] = []
        form = _SourceForm.of(self.source, self._sharded)
        self._sessions[session] = _SendingSession(buckets, keep, sharded, made, form)
        opened: dict[str, OpenedRoute] = {}
        job = self._origin
        for start in routes:
            settings = RouteSettings(
                session=session, job_id=job.job_id, node_rank=job.node_rank, source=self.who, sinks=tuple(start.sinks),
                keep=keep, timeout_s=timeout_s, private=job.private, host=job.host, on_gpu=start.on_gpu, verify=verify,
                lasting=self.source.lasting or sharded, same_device=start.same_device,
                shares_events=start.shares_events,
            )  # fmt: skip
            channel = open_sender(start.channel, settings)
            made.append(_OutgoingRoute(start.sinks, channel))
            opened.update({sink: OpenedRoute(settings, start.channel, channel.info(sink)) for sink in start.sinks})
        return opened

    def connect(self, session: str) -> None:
        """Wait until the sinks are connected."""
        for route in self._find(session).routes:
            route.channel.connect()

    def capture(
        self, session: str, push: int, version: int, flip_s: float, bucket_s: float, again: bool = False
    ) -> DeliveryFailure | None:
        """Give all buckets to the routes; returns the first failure. Returns when the weights may change: with a
        fenced source when all sinks have everything, with a snapshot when everything is copied; `sent` then waits for
        the sinks.

        All ranks run it at the same time, since gathering may be a collective step: a rank whose sinks failed goes on
        gathering for the others.

        Args:
            again: send ``version`` once more; the weights must not have changed since.
        """
        found = self._find(session)
        self._check_form(found)
        header = Header(session, push, version, flip_s, bucket_s)
        buckets = found.to_put()
        threaded = found.keep or len(buckets) > 1 or len(found.routes) > 1
        deliveries = [
            Delivery(
                route.channel, route.sinks, self._command, header, self.who, threaded=threaded,
                durations=route.durations,
            )
            for route in found.routes
        ]  # fmt: skip
        for route, delivery in zip(found.routes, deliveries, strict=True):
            route.channel.while_full = delivery.settle_answered
        before = self.source.stamp()
        if again and self.sent_version is not None and (self.sent_version, self._sent_stamp) != (version, before):
            raise WeightSyncError(
                f"{self.who} has other weights than those that it sent as version {version}: they were trained on "
                "since. Push them under a number of their own, by push(version)"
            )
        try:
            for bucket in buckets:
                self._gather(bucket, found, deliveries)
        finally:
            for delivery in deliveries:
                delivery.end()
            found.deliveries[push] = deliveries
            if found.keep:
                for route in found.routes:
                    route.channel.captured()
        failure = None if found.keep else self.sent(session, push)
        if failure is None and self.source.stamp() != before:
            text = (
                "the weights were changed while their snapshot was taken: change them between two pushes only"
                if found.keep
                else "the weights were changed before all sinks had them: wait for the push, or push with snapshot"
            )
            failure = DeliveryFailure(self.who, -1, "WeightSyncError", text)
        if failure is None:
            self.sent_version, self._sent_stamp = version, before
        return failure

    def _check_form(self, found: _SendingSession) -> None:
        """Raises:
        WeightSyncError: the source's tensors have changed since the plan was made.
        """
        now = _SourceForm.of(self.source, self._sharded)
        if found.form == now:  # mostly the same objects, which are fast to compare
            return
        found.stale = True
        changes = "; ".join(found.form.changes(now))
        raise WeightSyncError(
            f"the weights of {self.who} are not those that the plan was made for: {changes}. The next push makes a "
            "new plan"
        )

    def _gather(self, bucket: Bucket, found: _SendingSession, deliveries: Sequence[Delivery]) -> None:
        if not found.keep:
            for delivery in deliveries:
                delivery.wait_for_room()
        with self._tensors(bucket, found) as tensors:
            for delivery, route in zip(deliveries, found.routes, strict=True):
                if delivery.failed:
                    delivery.skip()
                    continue
                try:
                    delivery.send(route.channel.put(bucket, tensors))
                except Exception as error:
                    delivery.put_failed(bucket.index, error)
                    delivery.skip()

    def _tensors(self, bucket: Bucket, found: _SendingSession) -> AbstractContextManager[Mapping[str, Any]]:
        if found.sharded:
            assert self._sharded is not None
            return self._sharded.shards(bucket.names)
        return self.source.gather(bucket.names)

    def sent(self, session: str, push: int) -> DeliveryFailure | None:
        """Wait for the sinks' last answers; returns the first failure."""
        deliveries = self._find(session).deliveries.pop(push, [])
        results = [delivery.result() for delivery in deliveries]
        return next((failure for failure in results if failure is not None), None)

    def has(self, session: str) -> bool:
        """True if this session is open and its plan fits; false after a restart, a new ``send_weights()``, or a change
        of names, shapes or types."""
        found = self._sessions.get(session)
        return found is not None and not found.stale

    def close_session(self, session: str) -> None:
        """Wait for the deliveries of a session, and close its channels."""
        gone = self._sessions.pop(session, None)
        if gone is None:
            return
        for deliveries in gone.deliveries.values():
            for delivery in deliveries:
                delivery.result()
        for route in gone.routes:
            route.channel.close()

    def close(self) -> None:
        """Close all sessions."""
        for session in list(self._sessions):
            self.close_session(session)

    def _find(self, session: str) -> _SendingSession:
        found = self._sessions.get(session)
        if found is None:
            raise WeightSyncError(
                f"{self.who} does not take part in this weight sync: it has restarted or called send_weights() since. "
                "The next push makes a new plan"
            )
        return found
