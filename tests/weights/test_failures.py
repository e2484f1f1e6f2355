"""Cases O16 and O17: receivers that fail in the middle, versions that can be trusted; on every channel of a CPU."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from rlmesh.errors import CallError, CallTimeout, WeightsNotReady, WeightSyncError
from rlmesh.memory.layout import TABLE_BYTES
from rlmesh.runtime.connections.address_book import AddressBook, MemberAddress
from rlmesh.weights.arrays import ArraySink, ArraySource
from rlmesh.weights.manifest import Manifest
from rlmesh.weights.planning.plan import Mode
from rlmesh.weights.protocols import WeightSink
from rlmesh.weights.transfer.tensor_bytes import UNIT_BYTES
from tests.own_time import HANG_S, OwnTime
from tests.weights.mesh import WeightMesh, arrays, segments, until

BUCKETS = 20
SIZES = [4096] * BUCKETS
OPTIONS: dict[str, Any] = {"bucket_bytes": 4 * 4096}
CHANNELS = ["shm", "stream", "collective"]


class Fault:
    """A tap that does something when one bucket of one push is staged."""

    def __init__(self, action: Any, bucket: int = 7) -> None:
        self.action, self.bucket, self.armed = action, bucket, False

    def __call__(self, step: str, bucket: int) -> None:
        if self.armed and step == "stage" and bucket == self.bucket:
            self.armed = False
            self.action()


def check_serves(sink: ArraySink, member: Any, version: int, weights: dict[str, Any]) -> None:
    with member.weights.serving(1) as served:
        assert served == version
        for name, value in weights.items():
            np.testing.assert_array_equal(sink.arrays[name], value)


@pytest.mark.case("O16")
@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize(
    ("mode", "how"), [("double_buffer", "raises"), ("in_place", "raises"), ("double_buffer", "is late")]
)
def test_a_receiver_that_fails_in_bucket_7(
    mesh: WeightMesh, mode: Mode, how: str, channel: str, own_time: OwnTime
) -> None:
    late = threading.Event()

    def fail() -> None:
        if how == "raises":
            raise ValueError("out of cheese")
        late.wait(10)

    fault = Fault(fail)
    first, second = arrays(1, SIZES), arrays(2, SIZES)
    weights = dict(first)
    sinks = [ArraySink(arrays(0, SIZES), mode, keep_shared=False) for _ in range(2)]
    members = [mesh.add_sink(sinks[0], 0), mesh.add_sink(sinks[1], 1, tap=fault)]
    mesh.add_source(ArraySource(weights))
    sync = mesh.sync(channel=channel, bucket_timeout_s=2.0, **OPTIONS)
    sync.push(1).result(HANG_S)
    assert len(sync.plan().buckets) == BUCKETS
    fault.armed = True
    weights.update(second)
    began = time.monotonic()
    with pytest.raises(WeightSyncError) as failed:
        sync.push(2).result(HANG_S)
    assert own_time.since(began) < 2.5
    error = failed.value
    assert (error.version, error.receiver, error.bucket) == (2, "ROLLOUT:1", 7)
    assert "version 2 was not committed: receiver ROLLOUT:1 failed in bucket 7 of 20" in str(error)
    if how == "raises":
        assert "ValueError: out of cheese" in str(error)
    else:
        assert "gave no answer within its deadline" in str(error) or "ROLLOUT:1 was not ready" in str(error)
    if mode == "double_buffer":
        assert "ROLLOUT:0 keeps 1" in str(error)
        check_serves(sinks[0], members[0], 1, first)
    else:
        assert "ROLLOUT:0 serves nothing until it is pushed to" in str(error)
        with pytest.raises(WeightsNotReady, match="a push that was under way failed"), members[0].weights.serving():
            pass
    assert segments() == []
    late.set()
    sync.push(3).result(HANG_S)
    for sink, member in zip(sinks, members, strict=True):
        check_serves(sink, member, 3, second)


@pytest.mark.case("O16")
def test_a_flip_that_fails_on_one_sink_is_undone_on_all(mesh: WeightMesh) -> None:
    class Stubborn(ArraySink):
        refuses = False

        def flip(self, version: int) -> None:
            if self.refuses:
                raise RuntimeError("no")
            super().flip(version)

    sinks = [ArraySink(arrays(0)), Stubborn(arrays(0))]
    members = [mesh.add_sink(sink, rank) for rank, sink in enumerate(sinks)]
    first, second = arrays(1), arrays(2)
    weights = dict(first)
    sync = mesh.sync(ArraySource(weights))
    sync.push(1).result(HANG_S)
    weights.update(second)
    Stubborn.refuses = True
    with pytest.raises(WeightSyncError, match=r"receiver ROLLOUT:1 failed: RuntimeError.*no.*ROLLOUT:0 keeps 1"):
        sync.push(2).result(HANG_S)
    Stubborn.refuses = False
    for sink, member in zip(sinks, members, strict=True):
        check_serves(sink, member, 1, first)
    sync.push(3).result(HANG_S)
    for sink, member in zip(sinks, members, strict=True):
        check_serves(sink, member, 3, second)


def test_bytes_that_change_on_the_way_are_found_out(mesh: WeightMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = ArraySink(arrays(0))
    member = mesh.add_sink(sink, 0)
    sync = mesh.sync(ArraySource(arrays(1)))
    from rlmesh.weights.channels.shm import ShmReceiver

    take = ShmReceiver.take

    def altered(self: ShmReceiver, *args: Any) -> Any:
        pieces = take(self, *args)
        pieces[1][-1] ^= 1
        return pieces

    monkeypatch.setattr(ShmReceiver, "take", altered)
    with pytest.raises(WeightSyncError, match=r"bucket 0 arrived altered: the checksums of layer.1 \(1 of 5 tensors\)"):
        sync.push(1).result(HANG_S)
    assert member.weights.version is None


@pytest.mark.parametrize("unit", [0, 1, 2])
def test_sinks_that_look_at_one_memory_verify_it_together(
    mesh: WeightMesh, monkeypatch: pytest.MonkeyPatch, unit: int
) -> None:
    """Behind three small tensors, every other unit of a tensor is in the first sink's share: each is seen."""
    sizes = (7, 1000, 0, 3 * UNIT_BYTES // 4, 3)
    sinks = [ArraySink(arrays(0, sizes)) for _ in range(2)]
    members = [mesh.add_sink(sink, rank) for rank, sink in enumerate(sinks)]
    weights = arrays(1, sizes)
    sync = mesh.sync(ArraySource(weights))
    sync.push(1).result(HANG_S)
    from rlmesh.weights.channels import shm

    fill = shm._BucketFiller.fill

    def altered(self: Any, into: memoryview) -> None:
        fill(self, into)
        place = next(entry.offset for entry in self._bucket.entries if entry.name == "layer.3")
        into.cast("B")[place + (unit + 1) * UNIT_BYTES - 1] ^= 1

    with monkeypatch.context() as patched:
        patched.setattr(shm._BucketFiller, "fill", altered)
        seen = f"receiver ROLLOUT:{(3 + unit) % 2} failed in bucket 0 .*altered: the checksums of layer.3"
        with pytest.raises(WeightSyncError, match=seen):
            sync.push(2).result(HANG_S)
    for sink, member in zip(sinks, members, strict=True):
        check_serves(sink, member, 1, weights)


@pytest.mark.parametrize("snapshot", [False, True])
def test_memory_for_one_bucket_is_enough_where_sinks_copy(
    mesh: WeightMesh, monkeypatch: pytest.MonkeyPatch, snapshot: bool
) -> None:
    """Each bucket waits until the one before was given back."""
    from rlmesh.memory.pool import SegmentPool
    from rlmesh.weights.channels import shm

    one = 1 << 20

    def small(*args: Any, **options: Any) -> SegmentPool:
        return SegmentPool(*args, **options, limit_bytes=one + TABLE_BYTES)

    monkeypatch.setattr(shm, "SegmentPool", small)
    sizes = [one // 4] * 6
    weights = arrays(1, sizes)
    sinks = [ArraySink(arrays(0, sizes), "in_place") for _ in range(2)]
    members = [mesh.add_sink(sink, rank) for rank, sink in enumerate(sinks)]
    sync = mesh.sync(ArraySource(weights), bucket_bytes=one, snapshot=snapshot, bucket_timeout_s=5.0)
    for version in (1, 2):
        sync.push(version).result(HANG_S)
        for sink, member in zip(sinks, members, strict=True):
            check_serves(sink, member, version, weights)


def test_optional_members_of_a_sink_have_defaults() -> None:
    class Plain(WeightSink):
        mode, framework, device = "double_buffer", "numpy", "cpu"

        def manifest(self) -> Manifest | None:
            return None

        def begin(self, version: int) -> None: ...
        def stage(self, tensors: Any, *, keep: bool) -> None: ...
        def flip(self, version: int) -> None: ...
        def rollback(self) -> None: ...
        def discard(self) -> None: ...

    sink: Any = Plain()
    assert sink.gate is None and sink.rooms([None, None], keep=True) == [None, None] and not sink.takes_parts()
    sink.prepare_flip()
    sink.conclude(1)


def test_a_sink_that_concluded_too_late_goes_back() -> None:
    """The only sink flips and concludes in one step; if its answer does not come in time, the push has failed."""
    from rlmesh.weights.transfer.receiver import Receiver

    class Swap:
        mode: Mode = "double_buffer"
        framework: Any = "numpy"
        device = "cpu"
        held = "old"

        def manifest(self) -> None:
            return None

        def begin(self, version: int) -> None: ...
        def stage(self, tensors: Any, *, keep: bool) -> None: ...
        def discard(self) -> None: ...
        def flip(self, version: int) -> None:
            self.before, self.held = self.held, f"of {version}"

        def rollback(self) -> None:
            self.held = self.before

    sink = Swap()
    receiver = Receiver(sink, "R:0")
    for push, version in ((1, 10), (2, 11)):
        receiver.state = receiver.state.begin(push, version, 0)
        receiver.flip(push, version, 1.0, alone=True)
        assert receiver.version == version
    receiver.abort(1)
    assert receiver.version == 11, "that push was committed, and another one since"
    receiver.abort(2)
    assert receiver.version == 10 and sink.held == "of 10"
    receiver.abort(2)
    assert receiver.version == 10
    receiver.state = receiver.state.begin(3, 12, 0)
    receiver.flip(3, 12, 1.0, alone=True)
    receiver.state = receiver.state.begin(4, 13, 0).abort()
    receiver.abort(3)
    with pytest.raises(WeightsNotReady), receiver.serving(0.1):
        pass


@pytest.mark.case("O17")
@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("hold", ["per rollout", "per token"])
def test_versions_can_be_trusted(mesh: WeightMesh, hold: str, channel: str) -> None:
    weights = arrays(1)
    sink = ArraySink(arrays(0))
    member = mesh.add_sink(sink, 0)
    sync = mesh.sync(ArraySource(weights), channel=channel)
    with pytest.raises(WeightsNotReady, match="ROLLOUT:0 has no weights to serve"), member.weights.serving():
        pass
    sync.push(1).result(HANG_S)
    truth = {1: weights["layer.0"].copy(), 2: arrays(2)["layer.0"]}
    started, used = threading.Event(), list[int]()

    def token() -> None:
        with member.weights.serving() as version:
            np.testing.assert_array_equal(sink.arrays["layer.0"], truth[version])
            used.append(version)
            started.set()
            time.sleep(0.01)
            np.testing.assert_array_equal(sink.arrays["layer.0"], truth[version])

    def rollout() -> None:
        if hold == "per rollout":
            with member.weights.serving():
                for _ in range(30):
                    token()
        else:
            while len(used) < 30 or used[-1] == 1:
                token()

    thread = threading.Thread(target=rollout)
    thread.start()
    assert started.wait(HANG_S)
    for name, value in arrays(2).items():
        weights[name][...] = value
    sync.push(2).result(HANG_S)
    thread.join(HANG_S)
    assert member.weights.version == sync.version == 2
    assert used == sorted(used) and set(used) == ({1} if hold == "per rollout" else {1, 2})
    fresh = ArraySink(arrays(0))
    back = mesh.restart_sink(fresh, 0)
    assert back.weights.version is None
    with pytest.raises(WeightsNotReady), back.weights.serving():
        pass
    assert sync.catch_up() == ("ROLLOUT:0",) and sync.catch_up() == ()
    check_serves(fresh, back, 2, arrays(2))


def test_a_sink_that_has_not_started_again_is_told_as_such(mesh: WeightMesh) -> None:
    """A caller that waits for slow starts knows by the cause that nothing was executed."""
    mesh.add_sink(ArraySink(arrays(0)), 0)
    sync = mesh.sync(ArraySource(arrays(1)), connect_timeout_s=0.05)
    sync.push(1).result(HANG_S)
    starts = MemberAddress("ROLLOUT", 0, 1, None)
    mesh.caller.set_address_book(AddressBook(99, (starts,)))
    deadline = time.monotonic() + HANG_S
    with pytest.raises(WeightSyncError, match="ROLLOUT:0 could not say what it serves: CallTimeout") as raised:
        while time.monotonic() < deadline:  # the caller's loop takes the address book a moment later
            sync.catch_up()
    assert isinstance(raised.value.__cause__, CallTimeout)
    assert CallError.details(raised.value.__cause__).executed == "no"


def test_a_push_leaves_sinks_out_that_restart(mesh: WeightMesh) -> None:
    """The others get each version meanwhile; the one that is back gets the last version, or the next one."""
    weights, sinks = arrays(1), [ArraySink(arrays(0)) for _ in range(2)]
    members = [mesh.add_sink(sink, rank) for rank, sink in enumerate(sinks)]
    mesh.add_source(ArraySource(weights))
    sync = mesh.sync(wait_for_restarts=False, **OPTIONS)

    def known() -> tuple[tuple[str, ...], tuple[str, ...]]:
        return sync.served, sync.returned

    assert known() == ((), ())
    both = ("ROLLOUT:0", "ROLLOUT:1")
    assert sync.push(1).result(HANG_S).sinks == both and known() == (both, ())

    def restarts(rank: int) -> None:
        mesh.stop_sink(rank)
        mesh.announce_restart(rank)
        name = f"ROLLOUT:{rank}"
        until(lambda: name not in sync.served)

    restarts(1)
    assert known() == (("ROLLOUT:0",), ())
    for version in (2, 3):
        weights["layer.0"] += 1
        assert sync.push(version).result(HANG_S).sinks == ("ROLLOUT:0",)
    check_serves(sinks[0], members[0], 3, weights)
    assert sync.catch_up() == ()

    back = mesh.add_sink(sinks[1], 1, incarnation=1)
    assert back.weights.version is None and known() == (("ROLLOUT:0",), ("ROLLOUT:1",))
    assert sync.catch_up() == ("ROLLOUT:1",) and known() == (both, ())
    check_serves(sinks[1], back, 3, weights)
    weights["layer.0"] += 1
    assert sync.push(4).result(HANG_S).sinks == both and known() == (both, ())

    restarts(0)
    mesh.add_sink(sinks[0], 0, incarnation=1)
    assert known() == (("ROLLOUT:1",), ("ROLLOUT:0",))
    weights["layer.0"] += 1
    assert sync.push(5).result(HANG_S).sinks == both and known() == (both, ())
    check_serves(sinks[0], mesh.sinks["ROLLOUT:0"], 5, weights)


def test_a_push_to_sinks_that_all_restart_waits_for_them(mesh: WeightMesh) -> None:
    weights = arrays(1)
    mesh.add_sink(ArraySink(arrays(0)), 0)
    sync = mesh.sync(ArraySource(weights), wait_for_restarts=False, connect_timeout_s=HANG_S)
    sync.push(1).result(HANG_S)
    mesh.stop_sink(0)
    mesh.announce_restart(0)
    until(lambda: not sync.served)
    sink = ArraySink(arrays(0))
    pushed: list[object] = []
    thread = threading.Thread(target=lambda: pushed.append(sync.push(2).result(HANG_S)))
    thread.start()
    try:
        assert not pushed
    finally:
        member = mesh.add_sink(sink, 0, incarnation=1)
        thread.join(HANG_S)
    assert pushed and sync.served == ("ROLLOUT:0",)
    check_serves(sink, member, 2, weights)


def test_a_sink_that_joins_later_is_part_of_the_next_push(mesh: WeightMesh) -> None:
    weights = arrays(1)
    sinks = [ArraySink(arrays(0)) for _ in range(2)]
    mesh.add_sink(sinks[0], 0)
    sync = mesh.sync(ArraySource(weights))
    sync.push(1).result(HANG_S)
    late = mesh.add_sink(sinks[1], 1)
    assert late.weights.version is None
    assert sync.push(2).result(HANG_S).sinks == ("ROLLOUT:0", "ROLLOUT:1")
    check_serves(sinks[1], late, 2, weights)


def test_two_pushes_one_after_the_other_and_a_snapshot_that_stands_still(mesh: WeightMesh) -> None:
    weights = arrays(1, SIZES)
    sink = ArraySink(arrays(0, SIZES))
    gate = threading.Event()
    fault = Fault(lambda: gate.wait(10), bucket=0)
    member = mesh.add_sink(sink, 0, tap=fault)
    mesh.add_source(ArraySource(weights))
    sync = mesh.sync(snapshot=True, **OPTIONS)
    sync.push(1).result(HANG_S)
    fault.armed = True
    before = {name: value.copy() for name, value in weights.items()}
    future = sync.push(2)
    # The source takes its next call: it is free, and nothing has arrived at the sink.
    sync._source.command("ACTOR:0", "weights_source_describe", timeout_s=5).result(HANG_S)
    for value in weights.values():
        value += 1
    assert not future.done() and member.weights.version == 1
    gate.set()
    assert sync.push(3).result(HANG_S).version == 3
    assert future.result(0).version == 2
    assert sync.rollback() == 2
    check_serves(sink, member, 2, before)
