"""`WeightPlan`: the bucket of each tensor, and the channel to each sink. No I/O: values in, values out.

A bucket is a run of tensors that are staged, acknowledged and named in errors together. A route is one source rank, one
channel and the sinks that it feeds. If the source is sharded and its memory can be shared with all sinks, every rank
sends its own shards: there is a route from each rank to each sink, nothing is gathered, and the sinks join the parts.
Otherwise every sink is on exactly one route, which carries whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rlmesh.errors import UsageError, WeightSyncError
from rlmesh.weights.manifest import NO_CASTS, Casts, Manifest, misfits
from rlmesh.weights.planning.buckets import Bucket, cut, parts_of, share_out
from rlmesh.weights.planning.source_state import LastCommit, RankState

Mode = Literal["double_buffer", "in_place"]
SourceMode = Literal["fenced", "snapshot"]
Channel = Literal["shm", "cuda_ipc", "collective", "stream"]

CHANNELS: tuple[Channel, ...] = ("cuda_ipc", "shm", "collective", "stream")
DEFAULT_BUCKET_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class DeviceLocation:
    """The location of a member's weights.

    Attributes:
        node: equal for members of one node.
        shm: equal for members that can share memory.
        device: UUID of the GPU that holds the weights; empty on a CPU.
        peers: UUIDs of the GPUs that this process sees and this GPU can reach.
        hidden_peers: UUIDs of the GPUs that this GPU can reach, and a mask hides from this process. Their memory can be
            opened all the same, if both processes have the same IPC namespace.
        cuda_ipc: other processes can open this GPU's memory; else ``why_no_ipc`` is the reason.
    """

    node: str
    shm: str
    device: str = ""
    peers: tuple[str, ...] = ()
    cuda_ipc: bool = False
    why_no_ipc: str = ""
    hidden_peers: tuple[str, ...] = ()

    def reaches(self, other: DeviceLocation) -> bool:
        """True if this GPU can read the memory of the other's process on another GPU of the node."""
        # Containers with IPC namespaces of their own have a /dev/shm of their own, too.
        return other.device in self.peers or (other.device in self.hidden_peers and other.shm == self.shm)


@dataclass(frozen=True, slots=True)
class Participant:
    """One source rank or one sink, as it described itself.

    Attributes:
        parts: of a source rank: tensor → (first, count) of the elements that it holds, in C order; None: it can give
            whole tensors only.
        takes_parts: of a sink: tensors may come in several parts.
        version: of a sink: the version that it serves; None: it serves none.
        rank_state: of a source rank: the version of its weights.
        last_commit: of a sink: the last commit that it took part in.
    """

    name: str
    incarnation: int
    location: DeviceLocation
    manifest: Manifest | None
    mode: Mode = "double_buffer"
    channels: tuple[Channel, ...] = CHANNELS
    parts: Mapping[str, tuple[int, int]] | None = None
    takes_parts: bool = False
    version: int | None = None
    rank_state: RankState | None = None
    last_commit: LastCommit | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """``sinks`` get all buckets from ``source`` by ``channel``."""

    channel: Channel
    source: str
    sinks: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class SyncOptions:
    """Options of a `WeightSync` that decide the plan.

    Attributes:
        bucket_bytes: size limit of a bucket, unless one tensor is larger.
        casts: allowed changes of the element type.
        channel: one channel for all sinks, or role or member → channel; "auto" chooses.
        source_mode: fenced or snapshotted.
        verify: make and compare checksums.
    """

    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    casts: Casts = NO_CASTS
    channel: str | Mapping[str, str] = "auto"
    source_mode: SourceMode = "fenced"
    verify: bool = True

    def __post_init__(self) -> None:
        names: Iterable[object] = self.channel.values() if isinstance(self.channel, Mapping) else (self.channel,)
        for name in names:
            if not isinstance(name, str) or name not in ("auto", *CHANNELS):
                raise UsageError(f"channel={self.channel!r:.80}: each is 'auto' or one of {', '.join(CHANNELS)}")

    def channel_of(self, sink: str) -> str:
        if isinstance(self.channel, str):
            return self.channel
        return self.channel.get(sink) or self.channel.get(sink.rpartition(":")[0]) or "auto"


@dataclass(frozen=True)
class WeightPlan:
    """The plan of a `WeightSync`. ``str(plan)`` lists routes, their channels, and why these were chosen.

    Attributes:
        by_rank: source rank → the buckets that it sends: all buckets, or its shards of them.
    """

    sources: tuple[Participant, ...]
    sinks: tuple[Participant, ...]
    manifest: Manifest
    buckets: tuple[Bucket, ...]
    routes: tuple[Route, ...]
    source_mode: SourceMode
    by_rank: Mapping[str, tuple[Bucket, ...]]

    @property
    def nbytes(self) -> int:
        """The number of bytes that each sink receives."""
        return sum(entry.nbytes for bucket in self.buckets for entry in bucket.entries)

    def on_one_gpu(self, route: Route) -> bool:
        """True if source and sinks of a route are on the same GPU."""
        devices = {location.device for location in self._locations(route)}
        return len(devices) == 1 and "" not in devices

    def shares_events(self, route: Route) -> bool:
        """True if source and sinks of a route see the same /dev/shm, where the driver keeps events."""
        return len({location.shm for location in self._locations(route)}) == 1

    @property
    def sharded(self) -> bool:
        """True if every rank sends its own shards."""
        return any(entry.is_part for cut in self.by_rank.values() for bucket in cut for entry in bucket.entries)

    def on_gpus(self, route: Route) -> bool:
        """True if source and sinks of a route are on GPUs, each on a GPU of its own."""
        devices = [location.device for location in self._locations(route)]
        return all(devices) and len(set(devices)) == len(devices)

    def _locations(self, route: Route) -> list[DeviceLocation]:
        names = {route.source, *route.sinks}
        return [member.location for member in (*self.sources, *self.sinks) if member.name in names]

    def __str__(self) -> str:
        tied = [spec for spec in self.manifest if spec.alias_of is not None]
        count = sum(len(bucket.entries) for bucket in self.buckets)
        largest = max((bucket.nbytes for bucket in self.buckets), default=0)
        lines = [
            f"{_size(self.nbytes)} in {count} tensors ({len(tied)} tied names), {len(self.buckets)} buckets of at most "
            f"{_size(largest)}; source {'fenced' if self.source_mode == 'fenced' else 'snapshotted'}"
            f"{', each rank sends its own shards' if self.sharded else ''}"
        ]
        mode = {sink.name: sink.mode for sink in self.sinks}
        for route in self.routes:
            sinks = ", ".join(f"{name} ({mode[name]})" for name in route.sinks)
            lines.append(f"  {route.source} → {sinks} by {route.channel}: {route.why}")
        if self.manifest.excluded:
            lines.append(f"  not synced: {', '.join(self.manifest.excluded)}")
        return "\n".join(lines)


def make_plan(sources: Sequence[Participant], sinks: Sequence[Participant], options: SyncOptions) -> WeightPlan:
    """Match manifests, cut buckets and choose channels.

    Raises:
        WeightSyncError: manifests do not fit (lists all faults, sink by sink), or no channel leads to a sink.
    """
    if not sources or not sinks:
        raise WeightSyncError(f"a weight sync needs a source and a sink; it has {len(sources)} and {len(sinks)}")
    manifest = _one_manifest(sources)
    faults = []
    for sink in sinks:
        if sink.manifest is not None:
            faults += [f"{sink.name}: {fault}" for fault in misfits(manifest, sink.manifest, options.casts)]
    if faults:
        raise WeightSyncError(
            f"the weights of {sources[0].name} do not fit {_names(sinks)}; nothing was sent:\n"
            + "\n".join(f"  {fault}" for fault in faults)
        )
    buckets = cut(manifest, wire_types(manifest, sinks), options.bucket_bytes)
    routes, by_rank = _shards(manifest, buckets, sources, sinks, options)
    if not routes:
        routes, by_rank = choose_routes(sources, sinks, options), {source.name: buckets for source in sources}
    return WeightPlan(tuple(sources), tuple(sinks), manifest, buckets, routes, options.source_mode, by_rank)


def _one_manifest(sources: Sequence[Participant]) -> Manifest:
    first = sources[0].manifest
    if first is None:
        raise WeightSyncError(f"{sources[0].name} does not describe its weights")
    for other in sources[1:]:
        if other.manifest != first:
            lines = misfits(first, other.manifest or Manifest(()), Casts())
            raise WeightSyncError(
                f"the ranks of the source hold different weights: {sources[0].name} and {other.name}:\n  "
                + "\n  ".join(lines or ["other ties or another order of names"])
            )
    return first


def wire_types(manifest: Manifest, sinks: Sequence[Participant]) -> dict[str, str]:
    """The type in which each tensor is transferred: the sinks' type if all have the same one, else the source's."""
    chosen = {}
    for spec in manifest:
        wanted = {found.dtype for s in sinks if s.manifest is not None and (found := s.manifest.find(spec.name))}
        unknown = any(s.manifest is None for s in sinks)
        chosen[spec.name] = wanted.pop() if len(wanted) == 1 and not unknown else spec.dtype
    return chosen


_WITHOUT_GATHERING: tuple[Channel, ...] = ("cuda_ipc", "shm")


def _shards(
    manifest: Manifest,
    buckets: Sequence[Bucket],
    sources: Sequence[Participant],
    sinks: Sequence[Participant],
    options: SyncOptions,
) -> tuple[tuple[Route, ...], dict[str, tuple[Bucket, ...]]]:
    """Routes from every rank for its own shards; none if the shards do not add up to whole tensors, or if a channel or
    sink needs whole tensors."""
    shares = share_out(manifest, {source.name: source.parts for source in sources})
    if len(sources) < 2 or shares is None or not all(_takes_parts(sink, buckets) for sink in sinks):
        return (), {}
    routes: list[Route] = []
    by_rank = {}
    for rank, source in enumerate(sources):
        cut = by_rank[source.name] = parts_of(buckets, shares[source.name])
        # Each rank begins with another sink, so that no two sinks read from the same rank first.
        first = rank % len(sinks)
        try:
            mine = choose_routes([source], [*sinks[first:], *sinks[:first]], options) if cut else ()
        except WeightSyncError:
            return (), {}
        routes += mine
    if any(route.channel not in _WITHOUT_GATHERING for route in routes):
        return (), {}
    return tuple(routes), by_rank


def _takes_parts(sink: Participant, buckets: Sequence[Bucket]) -> bool:
    """True if the sink has exactly one tensor of the transferred dtype per entry."""
    mine = sink.manifest
    if not sink.takes_parts or mine is None:
        return False
    for entry in (entry for bucket in buckets for entry in bucket.entries):
        owners = [mine.owner(name) for name in (entry.name, *entry.tied) if mine.find(name) is not None]
        if len({owner.name for owner in owners}) != 1 or owners[0].dtype != entry.dtype:
            return False
    return True


def choose_routes(
    sources: Sequence[Participant], sinks: Sequence[Participant], options: SyncOptions
) -> tuple[Route, ...]:
    """Choose one channel per sink, and one source rank per channel and location, so that few copies are written."""
    grouped: dict[tuple[Channel, str], dict[str, str]] = {}
    for sink in sinks:
        source, channel, why = _choose(sources, sink, options.channel_of(sink.name))
        grouped.setdefault((channel, source.name), {})[sink.name] = why
    return tuple(Route(channel, source, tuple(whys), _joined(whys)) for (channel, source), whys in grouped.items())


def _joined(whys: Mapping[str, str]) -> str:
    """The reason that all sinks of a route share, or each reason with its sinks."""
    reasons: dict[str, list[str]] = {}
    for sink, why in whys.items():
        reasons.setdefault(why, []).append(sink)
    if len(reasons) == 1:
        return next(iter(reasons))
    return "; ".join(f"{why} ({', '.join(of)})" for why, of in reasons.items())


def _choose(sources: Sequence[Participant], sink: Participant, wanted: str) -> tuple[Participant, Channel, str]:
    refusals = []
    for channel in CHANNELS if wanted == "auto" else tuple(name for name in CHANNELS if name == wanted):
        if wanted == "auto" and channel == "collective" and not (sink.location.device and sources[0].location.device):
            continue  # between CPUs a stream is as fast, and needs no process group
        best, why = _nearest(sources, sink, channel)
        if best is not None and channel in sink.channels:
            return best, channel, why if wanted == "auto" else f"{why} (as configured)"
        refusals.append(f"{channel}: {why if best is None else f'{sink.name} does not take it'}")
    raise WeightSyncError(f"no channel leads from {_names(sources)} to {sink.name}: {'; '.join(refusals)}")


def _nearest(sources: Sequence[Participant], sink: Participant, channel: Channel) -> tuple[Participant | None, str]:
    """The source rank that is nearest to a sink for a channel, and why; or None, and why none can use the channel."""
    location = sink.location
    if channel == "shm":
        found = next((s for s in sources if s.location.shm == location.shm), None)
        return found, "same node" if found else "they do not share /dev/shm"
    if channel == "cuda_ipc":
        if not location.device:
            return None, f"{sink.name} has its weights on a CPU"
        on_gpu = [s for s in sources if s.location.device and s.location.node == location.node]
        unable = next((p for p in (sink, *on_gpu) if not p.location.cuda_ipc), None)
        if not on_gpu or unable is not None:
            return None, unable.location.why_no_ipc if unable is not None else "the source has no GPU on that node"
        same = next((s for s in on_gpu if s.location.device == location.device), None)
        if same is not None:
            return same, "same GPU"
        peer = next((s for s in on_gpu if location.reaches(s.location)), None)
        return peer, "peer GPUs of one node" if peer else "their GPUs cannot reach each other"
    near = next((s for s in sources if s.location.node == location.node), sources[0])
    return near, "same node" if near.location.node == location.node else "other nodes"


def _names(participants: Sequence[Participant]) -> str:
    return ", ".join(participant.name for participant in participants)


def _size(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes} bytes"
