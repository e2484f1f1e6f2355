"""The receiver's half in one process: views, changes that stay private, passing on, the end of views."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlmesh.errors import MalformedFrame, SlotGone
from rlmesh.memory.attach import Attachments, writable
from rlmesh.memory.layout import TABLE_BYTES, Descriptor, SlotRelease
from rlmesh.memory.pool import SegmentPool
from tests.memory.borrower import borrowed

SIZE = 300_000


@pytest.fixture
def woken() -> list[int]:
    return []


@pytest.fixture
def attachments(job_id: str, woken: list[int]) -> Iterator[Attachments]:
    attachments = Attachments(job_id, on_ended=lambda: woken.append(1))
    yield attachments
    attachments.close()


def send(pool: SegmentPool, data: bytes) -> Descriptor:
    """Put and lend; only the loan holds the slot."""
    descriptor = pool.add_ref(pool.put([data])[0], "R")
    assert descriptor is not None
    return descriptor


def pass_on(attachments: Attachments, view: memoryview) -> memoryview | None:
    descriptor = attachments.unchanged(view)
    return attachments.frame_at(descriptor) if descriptor is not None else None


def settle(pool: SegmentPool, attachments: Attachments) -> dict[object, list[SlotRelease]]:
    ended = attachments.collect()
    pool.release(ended.get("L", []), "R")
    return ended


def test_a_view_shows_the_slot_and_its_end_gives_it_back(
    pool: SegmentPool, attachments: Attachments, woken: list[int]
) -> None:
    descriptor = send(pool, b"a" * SIZE)
    view = attachments.borrow(descriptor, "L")
    assert view.readonly and view == b"a" * SIZE
    part = view[1000:2000]
    del view
    assert woken == []
    assert borrowed(attachments)[0]["views"] == 1
    del part
    assert woken == [1]
    assert attachments.collect() == {"L": [SlotRelease(descriptor.segment, descriptor.slot, descriptor.generation, 1)]}
    assert attachments.collect() == {}
    assert borrowed(attachments) == []


def test_changes_stay_here_and_are_gone_at_the_next_use(pool: SegmentPool, attachments: Attachments) -> None:
    frame = pool.put([b"a" * SIZE])[0]
    descriptor = pool.add_ref(frame, "R")
    assert descriptor is not None
    view = attachments.borrow(descriptor, "L")
    writable(view)[:] = b"z" * SIZE
    assert view == b"z" * SIZE
    assert frame == b"a" * SIZE
    del frame, view
    settle(pool, attachments)
    for byte in (b"b", b"c"):
        again = send(pool, byte * SIZE)
        assert (again.segment, again.slot, again.offset) == (descriptor.segment, descriptor.slot, descriptor.offset)
        view = attachments.borrow(again, "L")
        assert view == byte * SIZE
        writable(view[5000:5001])[0] = 0
        assert view[4999:5002] == byte + b"\0" + byte
        del view
        settle(pool, attachments)


def test_two_receivers_in_one_process_do_not_see_each_others_changes(
    pool: SegmentPool, attachments: Attachments
) -> None:
    frame = pool.put([b"a" * SIZE])[0]
    loans = [pool.add_ref(frame, "R") for _ in range(3)]
    views = [attachments.borrow(loan, "L") for loan in loans if loan is not None]
    for i, view in enumerate(views):
        writable(view)[:] = bytes([i]) * SIZE
    assert [view == bytes([i]) * SIZE for i, view in enumerate(views)] == [True] * 3
    assert frame == b"a" * SIZE
    del view, views[0]
    attachments.collect()
    fourth = pool.add_ref(frame, "R")
    assert fourth is not None
    views.append(attachments.borrow(fourth, "L"))  # the first one's changes are still in the cached mapping
    assert views[-1] == b"a" * SIZE
    views.clear()
    assert [g.refs for g in settle(pool, attachments)["L"]] == [4]
    del frame
    assert pool.stats().slots == 0


def test_parts_of_one_slot_are_apart(pool: SegmentPool, attachments: Attachments) -> None:
    frames = pool.put([b"a" * 100, b"b" * 100, b"c" * 5000])
    views = [attachments.borrow(loan, "L") for loan in (pool.add_ref(f, "R") for f in frames) if loan is not None]
    writable(views[0])[:] = b"z" * 100
    assert [bytes(v[:1]) for v in views] == [b"z", b"b", b"c"]
    del frames, views[1]
    settle(pool, attachments)
    assert pool.stats().slots == 1
    views.clear()
    settle(pool, attachments)
    assert pool.stats().slots == 0


def test_an_unchanged_view_is_passed_on_without_a_copy(pool: SegmentPool, attachments: Attachments) -> None:
    descriptor = send(pool, bytes(range(250)) * 1000)
    view = attachments.borrow(descriptor, "L")
    frame = pass_on(attachments, view[8192:9000])
    assert frame is not None and frame.readonly
    writable(view)[8192:9000] = b"z" * 808  # after it was captured
    assert frame == (bytes(range(250)) * 1000)[8192:9000]
    onward = attachments.add_ref(frame, "S")
    assert onward == descriptor._replace(offset=descriptor.offset + 8192, nbytes=808)
    assert pass_on(attachments, view[8192:9000]) is None
    assert pass_on(attachments, view[4 * 8192 :]) is not None
    assert pass_on(attachments, memoryview(bytes(SIZE))) is None
    del view, frame
    assert attachments.collect() == {}, "the loan to S holds the slot"
    assert attachments.release([SlotRelease(*descriptor[:3], 1)], "T") == {}
    assert attachments.release([SlotRelease(*descriptor[:3], 1)], "S") == {"L": [SlotRelease(*descriptor[:3], 1)]}
    assert borrowed(attachments) == []


def test_what_a_dead_lender_left_is_passed_on_as_bytes(pool: SegmentPool, attachments: Attachments) -> None:
    view = attachments.borrow(send(pool, b"a" * SIZE), "L")
    frame = pass_on(attachments, view)
    assert frame is not None
    pool.close()  # its owner has ended, and its segment went with it
    assert attachments.add_ref(frame, "S") is None, "nobody else can open it"
    assert bytes(frame) == b"a" * SIZE


def test_a_lost_peer_ends_its_loans_and_is_owed_nothing(pool: SegmentPool, attachments: Attachments) -> None:
    first, second = send(pool, b"a" * SIZE), send(pool, b"b" * SIZE)
    view, other = attachments.borrow(first, "L"), attachments.borrow(second, "M")
    frame = pass_on(attachments, view)
    assert frame is not None and attachments.add_ref(frame, "S") is not None
    del view, frame
    attachments.collect()
    assert [g.slot for g in attachments.peer_lost("S")["L"]] == [first.slot]
    assert attachments.peer_lost("M") == {}
    assert other == b"b" * SIZE
    del other
    assert attachments.collect() == {}


def test_a_slot_that_holds_something_else_is_gone(pool: SegmentPool, attachments: Attachments) -> None:
    descriptor = send(pool, b"a" * SIZE)
    pool.receiver_lost("R")
    with pytest.raises(SlotGone, match="sender has ended"):
        attachments.borrow(descriptor, "L")
    again = send(pool, b"b" * SIZE)
    assert again.slot == descriptor.slot
    with pytest.raises(SlotGone):
        attachments.borrow(descriptor, "L")
    view = attachments.borrow(again, "L")
    with pytest.raises(SlotGone):
        attachments.borrow(descriptor, "L")
    assert view == b"b" * SIZE
    pool.receiver_lost("R")
    assert pool.stats().lingering_slots == 1, "the refused descriptor did not unlock the slot"


def test_what_a_removed_segment_lent_is_still_there(pool: SegmentPool, attachments: Attachments, job_id: str) -> None:
    descriptor, never_opened = send(pool, b"a" * SIZE), send(pool, b"b" * SIZE)
    view = attachments.borrow(descriptor, "L")
    pool.close()
    late = attachments.borrow(never_opened, "L")
    assert view == b"a" * SIZE
    assert late == b"b" * SIZE
    other = Attachments(job_id, on_ended=lambda: None)
    with pytest.raises(SlotGone, match="is gone"):
        other.borrow(descriptor, "L")
    other.close()
    assert _is_open(descriptor.segment)
    del view, late
    attachments.collect()
    assert not _is_open(descriptor.segment)


def test_an_idle_mapping_of_a_removed_segment_is_forgotten(pool: SegmentPool, attachments: Attachments) -> None:
    descriptor = send(pool, b"a" * SIZE)
    attachments.borrow(descriptor, "L")
    settle(pool, attachments)
    pool.close()
    assert _is_open(descriptor.segment)
    attachments.forget_removed()
    assert not _is_open(descriptor.segment)


def _is_open(name: str) -> bool:
    with open("/proc/self/maps") as maps:
        mapped = name in maps.read()
    files = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return mapped or any(name in os.readlink(file) for file in files if os.path.islink(file))


def test_an_owner_of_the_same_name_is_told_apart(job_id: str, attachments: Attachments) -> None:
    for byte in (b"a", b"b"):
        pool = SegmentPool(job_id, "owner")
        descriptor = send(pool, byte * SIZE)
        assert descriptor.segment.endswith("-owner-0")
        assert attachments.borrow(descriptor, "L") == byte * SIZE
        pool.close()


def test_views_outlive_the_attachments_and_stay_locked(pool: SegmentPool, attachments: Attachments) -> None:
    view = attachments.borrow(send(pool, b"a" * SIZE), "L")
    attachments.close()
    pool.receiver_lost("R")
    send(pool, b"b" * SIZE)
    assert view == b"a" * SIZE
    assert pool.stats().lingering_slots == 1
    del view
    pool.trim(1e9)
    assert pool.stats().lingering_slots == 0
    with pytest.raises(SlotGone, match="no shared memory any more"):
        attachments.borrow(send(pool, b"c"), "L")


def test_descriptors_that_cannot_be_are_malformed(pool: SegmentPool, attachments: Attachments, job_id: str) -> None:
    good = send(pool, b"a" * SIZE)
    with open("/dev/shm/" + good.segment, "rb") as file:
        whole = file.read(TABLE_BYTES)
    bad = [
        good._replace(segment="rlmesh-other-job-0"),
        good._replace(segment=good.segment + "/../x"),
        good._replace(segment=f"rlmesh-{job_id}-../../etc/passwd"),
        good._replace(slot=0),
        good._replace(slot=10**6),
        good._replace(offset=good.offset - 1),
        good._replace(nbytes=10**9),
        good._replace(offset=0),
    ]
    for descriptor in bad:
        with pytest.raises(MalformedFrame):
            attachments.borrow(descriptor, "L")
    with pytest.raises(SlotGone):
        attachments.borrow(good._replace(slot=good.slot + 1), "L")
    path = Path(f"/dev/shm/rlmesh-{job_id}-liar-0")
    try:
        for content in (b"", b"hello", whole, bytes(TABLE_BYTES)):
            path.write_bytes(content)
            with pytest.raises(MalformedFrame, match="not a whole segment"):
                attachments.borrow(good._replace(segment=path.name), "L")
        path.unlink()
        os.mkfifo(path)
        with pytest.raises((MalformedFrame, OSError)):
            attachments.borrow(good._replace(segment=path.name), "L")
        path.unlink()
        path.symlink_to(f"/dev/shm/{good.segment}")
        with pytest.raises(OSError, match="symbolic links"):
            attachments.borrow(good._replace(segment=path.name), "L")
    finally:
        path.unlink(missing_ok=True)
    assert attachments.borrow(good, "L") == b"a" * SIZE


def test_many_threads_send_change_pass_on_and_drop(pool: SegmentPool, attachments: Attachments) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(80):
                data = bytes([number, i]) * (3000 + 411 * i)
                view = attachments.borrow(send(pool, data), "L")
                assert view == data
                if i % 3 == 0:
                    writable(view)[:4] = b"____"
                    assert attachments.unchanged(view) is None
                else:
                    frame = pass_on(attachments, view)
                    assert frame is not None and frame == data
                    del frame
                del view
                settle(pool, attachments)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    settle(pool, attachments)
    assert pool.stats().slots == 0
    assert borrowed(attachments) == []


def test_a_view_that_ends_while_the_collector_runs_does_not_block(pool: SegmentPool, attachments: Attachments) -> None:
    """A cycle ends its view inside some allocation of a thread that may hold the lock."""
    deadline = time.monotonic() + 20
    for _ in range(200):
        cycle: list[object] = [attachments.borrow(send(pool, b"a" * 5000), "L")]
        cycle.append(cycle)
        del cycle
        settle(pool, attachments)
        assert time.monotonic() < deadline
