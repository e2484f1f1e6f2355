"""`Sender`: one rank of the source. Gathers bucket after bucket and hands it to the routes that start at this rank.

Nothing here knows of RPC but the ``command`` that it was given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rlmesh.errors import WeightSyncError
from rlmesh.weights.channels.base import ChannelSender, RouteSettings
from rlmesh.weights.channels.registry import open_outlet
from rlmesh.weights.manifest import Manifest
from rlmesh.weights.planning.buckets import Bucket, join
from rlmesh.weights.planning.device_location import place_of
from rlmesh.weights.planning.plan import Channel
from rlmesh.weights.planning.source_state import Standing
from rlmesh.weights.protocols import SOURCE, ShardedSource, WeightSource, check_end
from rlmesh.weights.transfer.delivery import Command, Delivery, DeliveryFailure, Header


@dataclass(frozen=True, slots=True)
class RouteStart:
    """One route that starts at a rank: its sinks with their incarnations, and what `RouteSettings` says of them."""

    channel: Channel
    sinks: Mapping[str, int]
    on_gpu: bool
    same_device: bool
    shares_events: bool


@dataclass(frozen=True, slots=True)
class SenderOrigin:
    """What this process knows of its job; see `RouteSettings`."""

    job_id: str
    node_rank: int = 0
    private: bool = False
    host: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class OpenedRoute:
    """What a sink needs to attach to a route."""

    settings: RouteSettings
    channel: Channel
    info: Mapping[str, Any]


@dataclass(eq=False)
class _OutgoingRoute:
    """One that starts here.

    Attributes:
        took: seconds until the sinks had a bucket in the last push, by its number.
    """

    sinks: Mapping[str, int]
    outlet: ChannelSender
    took: dict[int, float] = field(default_factory=dict)


class _Form(NamedTuple):
    """What a plan is made for."""

    manifest: Manifest
    parts: Mapping[str, tuple[int, int]] | None
    device: str
    lasting: bool

    @classmethod
    def of(cls, source: WeightSource) -> _Form:
        manifest = source.manifest()  # first: a source looks what it has when it is asked for it
        parts = source.parts() if isinstance(source, ShardedSource) else None
        return cls(manifest, parts, source.device, source.lasting)

    def changes(self, now: _Form) -> list[str]:
        """How another one differs; nothing if it does not."""
        if self == now:  # mostly the same objects, which takes no time to compare
            return []
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
    form: _Form
    stale: bool = False
    deliveries: dict[int, list[Delivery]] = field(default_factory=dict)
    _joined: dict[tuple[int, int], list[Bucket]] = field(default_factory=dict)

    def to_put(self) -> list[Bucket]:
        """All buckets, as many in one as all routes allow. Without routes a rank gathers for the others, in the buckets
        that they gather in."""
        each = [route.outlet.joins_bytes for route in self.routes] or [(0, 0)]
        most = min(first for first, _ in each), min(other for _, other in each)
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
        incarnation: how often the member was restarted.
        node: its node's name, if it is not this machine's.
        restored: the version of the checkpoint that the weights were restored from; None: from none.
    """

    def __init__(
        self, source: WeightSource, who: str, command: Command, origin: SenderOrigin, *, incarnation: int = 0,
        node: str | None = None, restored: int | None = None,
    ) -> None:  # fmt: skip
        check_end(source, SOURCE, "weight source", "ModuleSource(model) or ArraySource(arrays)")
        self.source, self.who, self.incarnation = source, who, incarnation
        self._command, self._origin, self._node = command, origin, node
        self.restored = restored
        self.sent_version: int | None = None
        """The version that it gave last."""
        self._given: object = None
        """The source's stamp then."""
        self._sessions: dict[str, _SendingSession] = {}

    def describe(self) -> dict[str, Any]:
        place = place_of(self.source.device, self._node)
        return {
            "name": self.who,
            "incarnation": self.incarnation,
            "mode": "double_buffer",
            "version": None,
            "place": [place.node, place.shm, place.device, list(place.peers), place.cuda_ipc, place.why_no_ipc],
            "manifest": self.source.manifest().to_wire(),
            "parts": self.source.parts() if isinstance(self.source, ShardedSource) else None,
            "standing": Standing(self.incarnation, self.restored, self.sent_version).to_wire(),
        }

    def open(
        self, session: str, buckets: Sequence[Any], routes: Sequence[RouteStart], keep: bool, timeout_s: float,
        verify: bool, sharded: bool,
    ) -> dict[str, OpenedRoute]:  # fmt: skip
        """Open the routes that start here; gives what each sink needs to connect. ``sharded``: give the shards of this
        rank, which ``buckets`` are of, and gather nothing."""
        made: list[_OutgoingRoute] = []
        cut = tuple(Bucket.from_wire(bucket) for bucket in buckets)
        self._sessions[session] = _SendingSession(cut, keep, sharded, made, _Form.of(self.source))
        opened: dict[str, OpenedRoute] = {}
        job = self._origin
        for start in routes:
            settings = RouteSettings(
                session=session, job_id=job.job_id, node_rank=job.node_rank, source=self.who, sinks=tuple(start.sinks),
                keep=keep, timeout_s=timeout_s, private=job.private, host=job.host, on_gpu=start.on_gpu, verify=verify,
                lasting=self.source.lasting or sharded, same_device=start.same_device,
                shares_events=start.shares_events,
            )  # fmt: skip
            outlet = open_outlet(start.channel, settings)
            made.append(_OutgoingRoute(start.sinks, outlet))
            opened.update({sink: OpenedRoute(settings, start.channel, outlet.info(sink)) for sink in start.sinks})
        return opened

    def connect(self, session: str) -> None:
        """Wait until the sinks are connected."""
        for route in self._find(session).routes:
            route.outlet.connect()

    def capture(
        self, session: str, push: int, version: int, flip_s: float, bucket_s: float, again: bool = False
    ) -> DeliveryFailure | None:
        """Give all buckets to the routes. Returns when the weights may change: with a fenced source when all sinks
        have all of it, with a snapshot when all of it is copied; `sent` then waits for the sinks.

        All ranks run it side by side, since gathering may be a collective step: a rank whose sinks failed goes on
        gathering for the others. ``again``: give the weights of that version once more, which they must be still.
        """
        found = self._find(session)
        self._check_form(found)
        header = Header(session, push, version, flip_s, bucket_s)
        buckets = found.to_put()
        beside = found.keep or len(buckets) > 1 or len(found.routes) > 1
        deliveries = [
            Delivery(route.outlet, route.sinks, self._command, header, self.who, beside=beside, took=route.took)
            for route in found.routes
        ]
        for route, delivery in zip(found.routes, deliveries, strict=True):
            route.outlet.while_full = delivery.settle_answered
        before = self.source.stamp()
        if again and self.sent_version is not None and (self.sent_version, self._given) != (version, before):
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
                    route.outlet.captured()
        failure = None if found.keep else self.sent(session, push)
        if failure is None and self.source.stamp() != before:
            text = (
                "the weights were changed while their snapshot was taken: change them between two pushes only"
                if found.keep
                else "the weights were changed before all sinks had them: wait for the push, or push with snapshot"
            )
            failure = DeliveryFailure(self.who, -1, "WeightSyncError", text)
        if failure is None:
            self.sent_version, self._given = version, before
        return failure

    def _check_form(self, found: _SendingSession) -> None:
        """The plan's buckets are of what the source had when it was made."""
        changes = found.form.changes(_Form.of(self.source))
        if changes:
            found.stale = True
            raise WeightSyncError(
                f"the weights of {self.who} are not those that the plan was made for: {'; '.join(changes)}. "
                "The next push makes a new plan"
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
                    delivery.send(route.outlet.put(bucket, tensors))
                except Exception as error:
                    delivery.put_failed(bucket.index, error)
                    delivery.skip()

    def _tensors(self, bucket: Bucket, found: _SendingSession) -> AbstractContextManager[Mapping[str, Any]]:
        if found.sharded:
            assert isinstance(self.source, ShardedSource)
            return self.source.shards(bucket.names)
        return self.source.gather(bucket.names)

    def sent(self, session: str, push: int) -> DeliveryFailure | None:
        """Wait for the sinks' last answers; the first failure, if there is one."""
        deliveries = self._find(session).deliveries.pop(push, [])
        results = [delivery.result() for delivery in deliveries]
        return next((failure for failure in results if failure is not None), None)

    def has(self, session: str) -> bool:
        """Is it open here? Not after a restart, nor when a role has said anew what its weights are, or they have other
        names, shapes or types."""
        found = self._sessions.get(session)
        return found is not None and not found.stale

    def close_session(self, session: str) -> None:
        gone = self._sessions.pop(session, None)
        if gone is None:
            return
        for deliveries in gone.deliveries.values():
            for delivery in deliveries:
                delivery.result()
        for route in gone.routes:
            route.outlet.close()

    def close(self) -> None:
        for session in list(self._sessions):
            self.close_session(session)

    def _find(self, session: str) -> _SendingSession:
        found = self._sessions.get(session)
        if found is None:
            raise WeightSyncError(
                f"{self.who} knows nothing of this weight sync: it has restarted or called send_weights() since. "
                "The next push makes a new plan"
            )
        return found
