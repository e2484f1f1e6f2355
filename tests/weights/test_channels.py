"""One suite for every channel: the contract of `channels.base`, with sender and receivers but no calls between."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import xxhash

from rlmesh.weights.channels.base import (
    ChannelBroken,
    ChannelReceiver,
    ChannelSender,
    RouteSettings,
    open_receiver,
    open_sender,
)
from rlmesh.weights.manifest import Manifest, TensorSpec
from rlmesh.weights.planning.buckets import Bucket, cut
from rlmesh.weights.transfer.tensor_bytes import UNIT_BYTES, checksums_of
from tests.own_time import HANG_S, OwnTime
from tests.weights.mesh import segments

SINKS = ("R:0", "R:1")
CHANNELS = ["shm", "stream", "stream under CURVE", "collective"]
SPECS = Manifest(
    (TensorSpec("a", (1000,), "float32"), TensorSpec("empty", (0, 3), "float32"), TensorSpec("b", (7,), "int64"),
     TensorSpec("big", (300, 1000), "float32"))
)  # fmt: skip
BUCKETS = cut(SPECS, {spec.name: spec.dtype for spec in SPECS}, 8192)


def some(seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    return {spec.name: (generator.standard_normal(spec.shape) * 100).astype(spec.dtype) for spec in SPECS}


class Route:
    """A channel sender and its receivers, connected."""

    def __init__(self, channel: str, *, keep: bool = False, timeout_s: float = HANG_S) -> None:
        # An address that is no loopback by its name, so that the stream is encrypted.
        host = "0.0.0.0" if "CURVE" in channel else "127.0.0.1"
        settings = RouteSettings("s", "job", 0, "A:0", SINKS, keep, timeout_s, host=host)
        kind: Any = channel.split()[0]
        self.threads = ThreadPoolExecutor(8)
        self.sender: ChannelSender = open_sender(kind, settings)
        infos = {sink: dict(self.sender.info(sink)) for sink in SINKS}
        for info in infos.values():
            if "address" in info:
                info["address"] = info["address"].replace("0.0.0.0", "127.0.0.1")
        opening = [self.threads.submit(open_receiver, kind, settings, sink, infos[sink]) for sink in SINKS]
        self.sender.connect()
        self.receivers: list[ChannelReceiver] = [each.result(HANG_S) for each in opening]

    def send(self, bucket: Bucket, tensors: dict[str, Any], stopped: Callable[[], bool] = lambda: False) -> Any:
        transfer = self.sender.put(bucket, tensors)
        taking = [
            self.threads.submit(receiver.take, bucket, self.sender.payload(transfer, sink), 5.0)
            for sink, receiver in zip(SINKS, self.receivers, strict=True)
        ]
        self.sender.transmit(transfer, stopped)
        return transfer, [each.result(HANG_S) for each in taking]

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()
        self.sender.close()
        self.threads.shutdown()


@pytest.fixture(params=CHANNELS)
def route(request: pytest.FixtureRequest) -> Iterator[Route]:
    made = Route(request.param)
    yield made
    made.close()
    assert segments() == []


def test_every_sink_gets_every_byte_and_the_right_checksums(route: Route) -> None:
    assert len(BUCKETS) > 1
    for push in range(3):
        tensors = some(push)
        for receiver in route.receivers:
            receiver.settle()
        for bucket in BUCKETS:
            transfer, taken = route.send(bucket, tensors)
            wanted = [tensors[entry.name].tobytes() for entry in bucket.entries]
            units = [data[at : at + UNIT_BYTES] for data in wanted for at in range(0, max(1, len(data)), UNIT_BYTES)]
            assert transfer.checksums == [xxhash.xxh3_64_intdigest(unit) for unit in units]
            for pieces in taken:
                assert [piece.tobytes() for piece in pieces] == wanted
                assert [one for each in checksums_of(pieces) for one in each] == transfer.checksums
                assert not wanted[0] or not np.shares_memory(pieces[0], tensors[bucket.entries[0].name])
            del taken, pieces
            for receiver in route.receivers:
                receiver.done()
            route.sender.taken(transfer)


def test_what_may_be_kept_stays_as_it_was(route: Route) -> None:
    if not all(receiver.keeps for receiver in route.receivers):
        pytest.skip("this channel's pieces are valid until done()")
    tensors = some(1)
    taken: Any = None
    pieces: Any = None
    kept, wanted = [], []
    for _ in range(4):
        transfer, taken = route.send(BUCKETS[0], tensors)
        kept.append(taken)
        wanted.append(tensors["a"].copy())
        for receiver in route.receivers:
            receiver.done()
        route.sender.taken(transfer)
        tensors["a"] += 1
    for expected, taken in zip(wanted, kept, strict=True):
        for pieces in taken:
            np.testing.assert_array_equal(pieces[0].view(np.float32), expected)
    kept.clear()
    taken = pieces = None


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_snapshot_is_taken_when_put_returns(channel: str) -> None:
    route = Route(channel, keep=True)
    tensors = some(1)
    wanted = [[tensors[entry.name].tobytes() for entry in bucket.entries] for bucket in BUCKETS]
    transfers = [route.sender.put(bucket, tensors) for bucket in BUCKETS]
    for value in tensors.values():
        value[...] = 0
    for bucket, transfer, expected in zip(BUCKETS, transfers, wanted, strict=True):
        taking = [
            route.threads.submit(receiver.take, bucket, route.sender.payload(transfer, sink), 5.0)
            for sink, receiver in zip(SINKS, route.receivers, strict=True)
        ]
        route.sender.transmit(transfer, lambda: False)
        assert [[piece.tobytes() for piece in each.result(HANG_S)] for each in taking] == [expected, expected]
        taking.clear()
        for receiver in route.receivers:
            receiver.done()
        route.sender.taken(transfer)
    route.close()


def test_a_sink_that_takes_nothing_holds_neither_source_nor_other_sink_up(route: Route, own_time: OwnTime) -> None:
    """Sink 1 has answered that it failed: the source stops in the middle of a bucket, and lets sink 0 go."""
    if route.receivers[0].keeps:
        pytest.skip("nobody waits for anybody in this channel")
    # More than the buffers of all connections hold.
    specs = Manifest((TensorSpec("huge", (16 << 20,), "float32"),))
    (bucket,) = cut(specs, {"huge": "float32"}, 1 << 27)
    transfer = route.sender.put(bucket, {"huge": np.ones(16 << 20, np.float32)})
    looks: list[float] = []

    def stopped() -> bool:
        looks.append(time.monotonic())
        return len(looks) > 3

    taking = route.threads.submit(route.receivers[0].take, bucket, None, HANG_S)
    with pytest.raises(ChannelBroken):
        route.sender.transmit(transfer, stopped)
    assert own_time.since(looks[0]) < 5.0
    began = time.monotonic()
    route.sender.abandon()
    with pytest.raises(ChannelBroken):
        # A stream may have given sink 0 all bytes of the bucket before the source stopped. No other bucket comes.
        assert all((piece.view(np.float32) == 1.0).all() for piece in taking.result(HANG_S))
        route.receivers[0].take(bucket, None, HANG_S)
    assert own_time.since(began) < 5.0, "sink 0 waits for no more"


@pytest.mark.parametrize("channel", ["stream", "stream under CURVE"])
def test_strangers_get_no_weights(channel: str) -> None:
    host = "0.0.0.0" if "CURVE" in channel else "127.0.0.1"
    settings = RouteSettings("s", "job", 0, "A:0", ("R:0",), False, 1.0, host=host)
    sender = open_sender("stream", settings)
    info = dict(sender.info("R:0"))
    info["address"] = info["address"].replace("0.0.0.0", "127.0.0.1")
    with ThreadPoolExecutor(2) as threads:
        stranger = threads.submit(open_receiver, "stream", settings, "R:0", {**info, "secret": bytes(32)})
        with pytest.raises(ChannelBroken, match="R:0 did not connect to"):
            sender.connect()
        assert isinstance(stranger.exception(HANG_S), OSError)
    sender.close()
