"""The sender's half alone: slots are used again, limits hold, no two live slots overlap."""

from __future__ import annotations

import gc
import os
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from rlmesh.memory.attach import Attachments
from rlmesh.memory.layout import Descriptor, SlotRelease
from rlmesh.memory.native import PARALLEL_BYTES
from rlmesh.memory.pool import PoolExhausted, SegmentPool
from rlmesh.memory.room import MemoryBudget
from tests.own_time import HANG_S

MIB = 1 << 20


def ended(descriptor: Descriptor, loans: int = 1) -> list[SlotRelease]:
    return [SlotRelease(descriptor.segment, descriptor.slot, descriptor.generation, loans)]


def lent(pool: SegmentPool, frame: memoryview, receiver: str = "R") -> Descriptor:
    descriptor = pool.add_ref(frame, receiver)
    assert descriptor is not None
    return descriptor


def test_frames_are_read_only_copies(pool: SegmentPool) -> None:
    source = bytearray(b"abc" * 1000)
    frame, other = pool.put([source, memoryview(b"x" * 70)])
    source[:3] = b"zzz"
    assert bytes(frame) == b"abc" * 1000 and bytes(other) == b"x" * 70
    assert frame.readonly and frame.format == "B"


def test_a_slot_is_used_again_when_its_frames_and_loans_have_ended(pool: SegmentPool) -> None:
    frames = pool.put([b"a" * 5000, b"b" * 5000])
    first = lent(pool, frames[0])
    second = lent(pool, frames[1])
    assert (first.segment, first.slot, first.generation) == (second.segment, second.slot, second.generation)
    del frames
    assert pool.stats().slots == 1
    pool.release(ended(first), "R")
    assert pool.stats().slots == 1
    pool.release(ended(second), "R")
    assert pool.stats().slots == 0
    again = lent(pool, pool.put([b"c" * 9000])[0])
    assert (again.segment, again.slot, again.offset) == (first.segment, first.slot, first.offset)
    assert again.generation != first.generation
    assert pool.stats().segments == 1


def test_a_slice_of_a_frame_can_be_lent(pool: SegmentPool) -> None:
    frame = pool.put([bytes(range(256)) * 64])[0]
    whole, part = lent(pool, frame), lent(pool, frame[300:400])
    assert (part.offset - whole.offset, part.nbytes) == (300, 100)
    assert pool.add_ref(memoryview(b"something else"), "R") is None


def test_give_backs_that_are_late_or_wrong_change_nothing(pool: SegmentPool) -> None:
    frame = pool.put([b"a"])[0]
    loan = lent(pool, frame)
    pool.release(ended(loan), "somebody else")
    pool.release([SlotRelease(loan.segment, loan.slot, loan.generation + 1, 1), SlotRelease("x", 1, 1, 1)], "R")
    del frame
    assert pool.stats().slots == 1
    pool.release(ended(loan), "R")
    pool.release(ended(loan), "R")
    assert pool.stats().slots == 0


def test_a_lost_receiver_gives_everything_back(pool: SegmentPool) -> None:
    for receiver in ("R", "S"):
        for _ in range(3):
            lent(pool, pool.put([b"a" * 5000])[0], receiver)
    both = pool.put([b"b"])[0]
    lent(pool, both, "R"), lent(pool, both, "S")
    del both
    assert pool.receiver_lost("R") == 4
    assert pool.stats().slots == 4
    assert pool.receiver_lost("S") == 4
    assert pool.stats().slots == 0
    assert pool.receiver_lost("S") == 0


def test_a_slot_that_a_process_still_holds_is_not_used_again(pool: SegmentPool, job_id: str) -> None:
    attachments = Attachments(job_id, on_ended=lambda: None)
    loan = lent(pool, pool.put([b"a" * 5000])[0])
    view = attachments.borrow(loan, "L")
    pool.receiver_lost("R")  # its connection broke, but it lives
    assert pool.stats().lingering_slots == 1
    assert lent(pool, pool.put([b"b" * 5000])[0]).offset != loan.offset
    assert bytes(view) == b"a" * 5000
    del view
    attachments.collect()
    pool.trim(1e9)
    assert pool.stats().lingering_slots == 0
    attachments.close()


def test_the_limit_names_itself_and_nothing_is_taken(job_id: str) -> None:
    pool = SegmentPool(job_id, "o", limit_bytes=9 * MIB)
    kept = pool.put([bytes(4 * MIB)])
    with pytest.raises(PoolExhausted, match=r"6\.0 MiB do not fit .* limit of 9\.0 MiB.*4\.0 MiB are in use"):
        pool.put([bytes(6 * MIB)])
    assert pool.stats().slots == 1
    more = pool.put([bytes(4 * MIB)])
    assert pool.stats().total_bytes <= 9 * MIB
    del kept, more
    # Idle segments that are too small make room for one that is large enough.
    assert len(pool.put([bytes(8 * MIB)])[0]) == 8 * MIB
    assert pool.stats().segments == 1
    pool.close()


def test_too_little_room_is_found_out_before(job_id: str) -> None:
    size = 7 * MIB
    pool = SegmentPool(job_id, "o", room=lambda _: MemoryBudget(size - pool.stats().total_bytes, "the shed is small"))
    kept = pool.put([bytes(MIB)])  # of a segment of 4 MiB
    with pytest.raises(PoolExhausted, match=r"no room for 6\.0 MiB of shared memory: the shed is small"):
        pool.put([bytes(6 * MIB)])
    size = 0
    kept += pool.put([bytes(3 * MIB)])  # what is there already needs no room
    with pytest.raises(PoolExhausted):
        pool.put([bytes(MIB)])
    kept.clear()
    size = 7 * MIB
    kept += pool.put([bytes(6 * MIB)])  # the idle segment makes room
    assert pool.stats().segments == 1
    with pytest.raises(PoolExhausted):
        pool.put([bytes(2 * MIB)])
    kept += pool.put([bytes(512 << 10)])  # a smaller segment than usual has room
    assert pool.stats().segments == 2
    kept.clear()
    pool.close()


def test_a_directory_that_refuses_is_told(job_id: str, tmp_path: Path) -> None:
    pool = SegmentPool(job_id, "o", directory=str(tmp_path / "gone"), room=lambda _: MemoryBudget(1 << 40, "nothing"))
    with pytest.raises(PoolExhausted, match=r"could not be reserved in .*gone: No such file or directory"):
        pool.put([b"x"])


def test_names_that_an_earlier_process_left_are_passed_over(job_id: str, tmp_path: Path) -> None:
    (tmp_path / f"rlmesh-{job_id}-o-0").write_text("old")
    pool = SegmentPool(job_id, "o", directory=str(tmp_path))
    assert lent(pool, pool.put([b"x"])[0]).segment == f"rlmesh-{job_id}-o-1"
    pool.close()
    assert [p.name for p in tmp_path.iterdir()] == [f"rlmesh-{job_id}-o-0"]


def test_idle_segments_go_back_to_the_system(job_id: str) -> None:
    now = 0.0
    pool = SegmentPool(job_id, "o", clock=lambda: now)
    big, small = pool.put([bytes(8 * MIB)]), pool.put([bytes(MIB)])
    now = 100.0
    del big
    assert pool.trim(10.0) == 0  # it became idle just now
    now = 109.0
    assert pool.trim(10.0) == 0
    now = 111.0
    assert 8 * MIB < pool.trim(10.0) < 9 * MIB
    assert pool.stats().segments == 1
    assert bytes(small[0][:10]) == bytes(10)
    del small
    assert pool.trim(0.0) > 0
    assert pool.stats().total_bytes == 0
    assert not [name for name in os.listdir("/dev/shm") if job_id in name]
    pool.close()


def test_a_filler_that_fails_takes_nothing(pool: SegmentPool) -> None:
    class Broken:
        nbytes = 100

        def fill(self, into: memoryview) -> None:
            into[:1] = b"x"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pool.put([b"abc", Broken()])
    assert pool.stats().slots == 0


def test_sources_of_all_kinds_are_put(pool: SegmentPool) -> None:
    class Tens:
        nbytes = 10

        def fill(self, into: memoryview) -> None:
            into[:] = bytes(range(0, 100, 10))

    grid = memoryview(bytearray(range(256)) * 16).cast("B", [64, 64])
    every_third = memoryview(bytes(range(30)))[::3]
    frames = pool.put([b"", every_third, grid, Tens(), memoryview(b"read-only"), b""])
    assert [bytes(f) for f in frames] == [
        b"", bytes(range(0, 30, 3)), bytes(grid), bytes(range(0, 100, 10)), b"read-only", b"",
    ]  # fmt: skip
    assert lent(pool, frames[0]).nbytes == 0


def test_frames_outlive_the_pool(job_id: str) -> None:
    pool = SegmentPool(job_id, "o")
    frame = pool.put([b"a" * 5000])[0]
    pool.close()
    pool.close()
    assert bytes(frame) == b"a" * 5000
    assert pool.add_ref(frame, "R") is None
    with pytest.raises(PoolExhausted, match="closed"):
        pool.put([b"x"])
    del frame
    assert pool.trim(0) == 0


def test_a_forked_child_leaves_the_pool_alone(pool: SegmentPool) -> None:
    loan = lent(pool, pool.put([b"a" * 5000])[0])
    child = os.fork()
    if child == 0:
        try:
            pool.close()
            pool.put([b"x"])
        except PoolExhausted:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert os.path.exists(f"/dev/shm/{loan.segment}")


def test_threads_that_put_at_once_get_slots_of_their_own(pool: SegmentPool) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(60):
                data = bytes([number]) * (1000 + 137 * i)
                frame = pool.put([data])[0]
                loan = lent(pool, frame, str(number))
                assert bytes(frame) == data
                del frame
                if i % 2:
                    pool.release(ended(loan), str(number))
            pool.receiver_lost(str(number))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert pool.stats().slots == 0


def test_the_garbage_collector_may_end_frames_at_any_moment(pool: SegmentPool) -> None:
    """Frames in cycles end inside whatever allocates next, which may hold the pool's lock."""
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(300):
            cycle: list[Any] = [pool.put([b"x" * 100])[0]]
            cycle.append(cycle)
            lent(pool, cycle[0])
            del cycle
            pool.receiver_lost("R")
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert pool.stats().slots == 0


class PoolMachine(RuleBasedStateMachine):
    """Any order of what can be done to a pool; what is alive stays apart and unchanged."""

    frames: Bundle[list[tuple[memoryview, bytes]]] = Bundle("frames")
    loans: Bundle[tuple[Descriptor, str]] = Bundle("loans")
    number = 0

    def __init__(self) -> None:
        super().__init__()
        PoolMachine.number += 1
        self.pool = SegmentPool(f"machine{os.getpid()}", str(PoolMachine.number), limit_bytes=14 * MIB)
        self.attachments = Attachments(f"machine{os.getpid()}", on_ended=lambda: None)
        self.alive: list[tuple[memoryview, bytes]] = []
        self.open: dict[tuple[Descriptor, str], int] = {}
        self.views: list[tuple[memoryview, bytes]] = []

    @rule(target=frames, sizes=st.lists(st.sampled_from([0, 1, 100, 4096, 5000, 70_000, 3 * MIB]), max_size=3),
          fill=st.integers(0, 255))  # fmt: skip
    def put(self, sizes: list[int], fill: int) -> list[tuple[memoryview, bytes]]:
        data = [bytes([(fill + i) % 256]) * size for i, size in enumerate(sizes)]
        try:
            made = list(zip(self.pool.put(data), data, strict=True))
        except PoolExhausted:
            return []
        self.alive += made
        return made

    @rule(made=consumes(frames))
    def drop(self, made: list[tuple[memoryview, bytes]]) -> None:
        for pair in made:
            self.alive = [other for other in self.alive if other is not pair]
        made.clear()

    @rule(target=loans, made=frames, receiver=st.sampled_from("RS"), borrow=st.booleans())
    def lend(self, made: list[tuple[memoryview, bytes]], receiver: str, borrow: bool) -> Any:
        if not made:
            return None
        descriptor = lent(self.pool, made[0][0], receiver)
        self.open[descriptor, receiver] = self.open.get((descriptor, receiver), 0) + 1
        if borrow:
            self.views.append((self.attachments.borrow(descriptor, "L"), made[0][1]))
        return descriptor, receiver

    @rule(loan=loans)
    def release(self, loan: tuple[Descriptor, str] | None) -> None:
        if loan is not None and self.open.get(loan, 0):
            self.open[loan] -= 1
            self.pool.release(ended(loan[0]), loan[1])

    @rule(receiver=st.sampled_from("RS"))
    def lose(self, receiver: str) -> None:
        self.pool.receiver_lost(receiver)
        self.open = {loan: count for loan, count in self.open.items() if loan[1] != receiver}

    @rule()
    def end_views(self) -> None:
        self.views.clear()
        self.attachments.collect()

    @rule()
    def trim(self) -> None:
        self.pool.trim(0)

    @invariant()
    def what_is_alive_stays_as_it_was(self) -> None:
        for view, data in self.alive + self.views:
            assert view == data

    @invariant()
    def live_slots_do_not_overlap(self) -> None:
        ranges: dict[str, list[tuple[int, int]]] = {}
        for frame, _ in self.alive:
            probe = lent(self.pool, frame, "probe")
            self.pool.release(ended(probe), "probe")
            ranges.setdefault(probe.segment, []).append((probe.offset, probe.offset + probe.nbytes))
        for inside in ranges.values():
            ordered = sorted(each for each in inside if each[0] < each[1])
            assert all(before[1] <= after[0] for before, after in pairwise(ordered))

    def teardown(self) -> None:
        try:
            self.alive.clear()
            self.end_views()
            self.lose("R")
            self.lose("S")
            gc.collect()
            self.pool.trim(0)
            # Hypothesis still holds the frames of its bundle.
            held = self.pool.stats()
            assert held.lingering_slots == 0
        finally:
            self.pool.close()
            self.attachments.close()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)


def test_a_slot_that_comes_back_in_a_moment_is_waited_for(job_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread takes the give-backs; whoever may not wait, grows."""
    monkeypatch.setattr("rlmesh.memory.pool.WAIT_S_PER_BYTE", 1.0)
    here = threading.current_thread()
    pool = SegmentPool(job_id, "waits", may_wait=lambda: threading.current_thread() is here)
    data = bytes(32 * MIB)
    first = lent(pool, pool.put([data])[0])

    def release() -> None:
        end = time.monotonic() + 10
        while not pool._waiting and time.monotonic() < end:
            time.sleep(0.001)
        pool.release(ended(first), "R")

    giver = threading.Thread(target=release)
    giver.start()
    again = lent(pool, pool.put([data])[0])
    giver.join()
    assert again.segment == first.segment and pool.stats().segments == 1
    other = threading.Thread(target=lambda: pool.put([data]))
    other.start()
    other.join(HANG_S)
    assert pool.stats().segments == 2, "the thread that takes the give-backs must not wait for them"
    pool.close()


@pytest.mark.parametrize("nbytes", [PARALLEL_BYTES - 1, PARALLEL_BYTES, PARALLEL_BYTES + 1, 3 * PARALLEL_BYTES + 4097])
@pytest.mark.parametrize("threads", ["as many as there are cores", "none"])
def test_large_copies_are_cut_among_cores_and_lose_nothing(
    pool: SegmentPool, nbytes: int, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(3))
    if threads == "none":

        def refuse(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refuse)
    data = np.random.default_rng(1).integers(0, 255, nbytes, dtype=np.uint8)
    assert np.array_equal(np.frombuffer(pool.put([data.data])[0], dtype=np.uint8), data)
