"""Owner and borrowers are processes of their own, and die at any moment."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlmesh.errors import SlotGone
from rlmesh.memory.attach import writable
from rlmesh.memory.exchange import MemoryExchange
from rlmesh.memory.layout import Descriptor, remove_segments
from rlmesh.memory.native import PAGE_BYTES
from tests.memory.borrower import Borrower, borrowed, borrower, digest
from tests.own_time import HANG_S

SIZE = 3 << 20
DATA = bytes(range(256)) * (SIZE // 256)


@pytest.fixture
def one(job_id: str) -> Iterator[Borrower]:
    with borrower(job_id, "one") as process:
        yield process


@pytest.fixture
def two(job_id: str) -> Iterator[Borrower]:
    with borrower(job_id, "two") as process:
        yield process


def lend(exchange: MemoryExchange, data: bytes, *receivers: str) -> list[Descriptor]:
    frame = exchange.capture([data])[0]
    found = [exchange.add_ref(frame, receiver) for receiver in receivers]
    return [descriptor for descriptor in found if descriptor is not None]


def take_back(exchange: MemoryExchange, process: Borrower, name: str) -> None:
    exchange.release(process.do("releases").get("main", []), name)


def eventually_no_slots(exchange: MemoryExchange) -> bool:
    """The kernel drops a dead process's locks when it has reaped its descriptors."""
    deadline = time.monotonic() + HANG_S
    while exchange.pool.stats().slots and time.monotonic() < deadline:
        exchange.pool.trim(1e9)
        time.sleep(0.005)
    return exchange.pool.stats().slots == 0


def test_a_hundred_uses_of_one_slot(exchange: MemoryExchange, one: Borrower) -> None:
    places = set()
    for i in range(100):
        data = bytes([i]) * SIZE
        (descriptor,) = lend(exchange, data, "one")
        places.add((descriptor.segment, descriptor.offset))
        one.do("borrow", "x", descriptor, "main")
        if i % 10 == 0:
            assert one.do("digest", "x") == digest(data)
        if i % 7 == 0:
            one.do("write", "x", 255)
        one.do("drop", "x")
        take_back(exchange, one, "one")
    assert len(places) == 1
    assert exchange.pool.stats().slots == 0


def test_a_warm_slot_costs_no_page_faults(exchange: MemoryExchange, one: Borrower) -> None:
    """At neither end, though the receiver reads every byte: that is what the speed stands on."""

    def faults() -> list[int]:
        stats = [Path(f"/proc/{pid}/stat").read_text() for pid in (os.getpid(), one.process.pid)]
        return [int(text.rpartition(")")[2].split()[7]) for text in stats]

    def use() -> None:
        (descriptor,) = lend(exchange, DATA, "one")
        one.do("borrow", "x", descriptor, "main")
        one.do("digest", "x")
        one.do("drop", "x")
        take_back(exchange, one, "one")

    for _ in range(3):
        use()
    before = faults()
    for _ in range(20):
        use()
    pages = 20 * SIZE // PAGE_BYTES
    assert all(after - start < pages // 20 for start, after in zip(before, faults(), strict=True))


def test_two_receivers_of_one_slot_write_to_copies_of_their_own(
    exchange: MemoryExchange, one: Borrower, two: Borrower
) -> None:
    for_one, for_two = lend(exchange, DATA, "one", "two")
    assert for_one == for_two
    one.do("borrow", "x", for_one, "main")
    two.do("borrow", "x", for_two, "main")
    one.do("write", "x", 7)
    assert one.do("digest", "x") == digest(bytes([7]) * SIZE)
    assert two.do("digest", "x") == digest(DATA)
    one.do("drop", "x")
    take_back(exchange, one, "one")
    assert exchange.pool.stats().slots == 1
    two.do("drop", "x")
    take_back(exchange, two, "two")
    assert exchange.pool.stats().slots == 0
    (again,) = lend(exchange, b"n" * SIZE, "one")
    assert (again.segment, again.offset) == (for_one.segment, for_one.offset)
    one.do("borrow", "x", again, "main")
    assert one.do("digest", "x") == digest(b"n" * SIZE), "what it wrote before is gone"


@pytest.mark.parametrize("when", ["before it opened", "while it holds", "after it let go"])
def test_a_receiver_is_killed(exchange: MemoryExchange, one: Borrower, when: str) -> None:
    (descriptor,) = lend(exchange, DATA, "one")
    if when != "before it opened":
        one.do("borrow", "x", descriptor, "main")
        one.do("write", "x", 1)
    if when == "after it let go":
        one.do("drop", "x")
        one.do("releases")  # which get lost
    one.kill()
    assert exchange.pool.receiver_lost("one") == 1
    assert eventually_no_slots(exchange)


def test_a_receiver_is_killed_at_any_moment(exchange: MemoryExchange, job_id: str) -> None:
    """It borrows, writes, passes on and drops as fast as it can until the signal comes."""
    dice = random.Random(5)
    for _ in range(8):
        with borrower(job_id, "churn") as process:
            descriptors = [lend(exchange, bytes([i]) * (100_000 * (i + 1)), "churn")[0] for i in range(4)]
            process.do("releases")  # it is up
            process.start("churn", descriptors, "main")
            time.sleep(dice.uniform(0, 0.05))
            os.kill(process.process.pid, signal.SIGKILL)
            # Told while it may still be dying: slots that it holds must not be used before it is gone.
            exchange.pool.receiver_lost("churn")
            process.process.wait(HANG_S)
        assert eventually_no_slots(exchange)
        assert exchange.pool.stats().lingering_slots == 0
    assert exchange.pool.stats().total_bytes <= 8 << 20


def test_a_living_process_whose_connection_broke_keeps_what_it_sees(exchange: MemoryExchange, one: Borrower) -> None:
    (descriptor,) = lend(exchange, DATA, "one")
    one.do("borrow", "x", descriptor, "main")
    exchange.peer_lost("one")
    for byte in range(5):
        lend(exchange, bytes([byte]) * SIZE, "nobody")
    assert one.do("digest", "x") == digest(DATA)
    one.do("close_exchange")
    assert one.do("digest", "x") == digest(DATA), "its runtime closed, its tensor lives"
    exchange.pool.receiver_lost("nobody")
    assert exchange.pool.stats().lingering_slots == 1
    one.do("drop", "x")
    assert eventually_no_slots(exchange)


def test_forwarding_copies_nothing_and_every_loan_comes_back(
    exchange: MemoryExchange, one: Borrower, two: Borrower
) -> None:
    (descriptor,) = lend(exchange, DATA, "one")
    one.do("borrow", "x", descriptor, "main")
    onward = one.do("pass_on", "x", "two")
    assert onward == descriptor
    two.do("borrow", "y", onward, "one")
    one.do("sent", "x")
    one.do("write", "x", 9)
    one.do("drop", "x")
    assert one.do("releases") == {}, "two still has it"
    assert two.do("digest", "y") == digest(DATA)
    two.do("drop", "y")
    ended = two.do("releases")
    assert list(ended) == ["one"]
    one.do("receive_give_backs", ended["one"], "two")
    take_back(exchange, one, "one")
    assert exchange.pool.stats().slots == 0


def test_what_was_changed_is_not_forwarded_but_copied(exchange: MemoryExchange, one: Borrower) -> None:
    (descriptor,) = lend(exchange, DATA, "one")
    one.do("borrow", "x", descriptor, "main")
    one.do("write", "x", 9)
    assert one.do("pass_on", "x", "two") is None


def test_a_forwarder_dies_after_the_next_one_opened(exchange: MemoryExchange, one: Borrower, two: Borrower) -> None:
    (descriptor,) = lend(exchange, DATA, "one")
    one.do("borrow", "x", descriptor, "main")
    two.do("borrow", "y", one.do("pass_on", "x", "two"), "one")
    one.kill()
    exchange.peer_lost("one")
    for byte in range(5):
        lend(exchange, bytes([byte]) * SIZE, "nobody")
    assert two.do("digest", "y") == digest(DATA)
    two.do("drop", "y")
    two.do("releases")
    exchange.pool.receiver_lost("nobody")
    assert eventually_no_slots(exchange)


def test_a_forwarder_dies_before_the_next_one_opened(exchange: MemoryExchange, one: Borrower, two: Borrower) -> None:
    (descriptor,) = lend(exchange, DATA, "one")
    one.do("borrow", "x", descriptor, "main")
    onward = one.do("pass_on", "x", "two")
    one.kill()
    exchange.peer_lost("one")
    assert eventually_no_slots(exchange)
    lend(exchange, b"other" * 1_000_000, "nobody")
    with pytest.raises(SlotGone):
        two.do("borrow", "y", onward, "one")


def test_a_value_that_comes_back_to_its_owner_is_a_view_of_its_own_slot(
    exchange: MemoryExchange, one: Borrower
) -> None:
    """A value that comes back unchanged is a view of the sender's own slot."""
    (descriptor,) = lend(exchange, DATA, "one")
    one.do("borrow", "x", descriptor, "main")
    returned = one.do("pass_on", "x", "main")
    view = exchange.borrow([returned], "one")[0]
    one.do("sent", "x")
    one.do("drop", "x")
    assert view == DATA
    assert exchange.pool.stats().segments == 1
    ended = exchange.take_releases()
    assert list(ended) == ["one"], "given back at once: the owner holds it by itself"
    one.do("receive_give_backs", ended["one"], "main")
    take_back(exchange, one, "one")
    assert exchange.pool.stats().slots == 1 and view == DATA
    del view
    assert exchange.take_releases() == {}
    assert exchange.pool.stats().slots == 0


def test_what_came_home_is_room_before_the_pool_grows(exchange: MemoryExchange, one: Borrower) -> None:
    """Who sends a large value, gets it back and sends the next one needs no second segment, though nobody ran
    `take_releases` in between, and what it wrote to the value is gone."""
    for step in range(3):
        data = bytes([step]) * (100 << 20)
        (descriptor,) = lend(exchange, data, "one")
        one.do("borrow", "x", descriptor, "main")
        view = exchange.borrow([one.do("pass_on", "x", "main")], "one")[0]
        one.do("sent", "x")
        one.do("drop", "x")
        one.do("receive_give_backs", exchange.take_releases()["one"], "main")
        take_back(exchange, one, "one")
        assert view == data
        writable(view)[:100] = b"w" * 100
        del view
    assert exchange.pool.stats().segments == 1


def test_a_value_that_is_passed_to_and_fro_comes_home(exchange: MemoryExchange, one: Borrower, two: Borrower) -> None:
    """Each of the two lends it to the other; neither waits for the other to end."""
    (descriptor,) = lend(exchange, DATA, "one")
    processes = {"one": one, "two": two}
    one.do("borrow", "v0", descriptor, "main")
    for i in range(6):
        here, there = ("one", "two") if i % 2 == 0 else ("two", "one")
        onward = processes[here].do("pass_on", f"v{i}", there)
        assert onward == descriptor
        processes[there].do("borrow", f"v{i + 1}", onward, here)
        processes[here].do("sent", f"v{i}")
    # … and to the owner, which lends its own slot once more.
    view = exchange.borrow([one.do("pass_on", "v6", "main")], "one")[0]
    one.do("sent", "v6")
    frame = exchange.capture([view])[0]
    assert exchange.add_ref(frame, "two") == descriptor
    two.do("borrow", "v7", descriptor, "main")
    del frame, view
    for i in range(8):
        processes["one" if i % 2 == 0 and i < 7 else "two"].do("drop", f"v{i}")
    for _ in range(4):
        for name, process in processes.items():
            for lender, ended in process.do("releases").items():
                if lender == "main":
                    exchange.release(ended, name)
                else:
                    processes[lender].do("receive_give_backs", ended, name)
        for lender, ended in exchange.take_releases().items():
            processes[str(lender)].do("receive_give_backs", ended, "main")
    assert one.do("borrowed") == two.do("borrowed") == borrowed(exchange.attachments) == []
    assert exchange.pool.stats().slots == 0


def test_an_owner_is_killed_and_its_values_live_on(exchange: MemoryExchange, one: Borrower, job_id: str) -> None:
    view = exchange.borrow([one.do("put", "x", DATA, "main")], "one")[0]
    one.kill()
    exchange.peer_lost("one")
    assert remove_segments(job_id, "one") == 1
    assert view == DATA
    del view
    assert exchange.take_releases() == {}
    assert borrowed(exchange.attachments) == []


def test_what_was_sent_last_is_opened_before_the_segments_go(job_id: str, one: Borrower) -> None:
    last = MemoryExchange(job_id, "last", wake=lambda: None)
    (descriptor,) = lend(last, DATA, "one")
    one.start("borrow", "x", descriptor, "main")
    last.close(linger_s=20.0)
    one.result()
    assert one.do("digest", "x") == digest(DATA)


def test_a_message_that_cannot_be_opened_is_given_back_whole(exchange: MemoryExchange, one: Borrower) -> None:
    first = one.do("put", "a", b"a" * SIZE, "main")
    second = one.do("put", "b", b"b" * SIZE, "main")
    with pytest.raises(SlotGone):
        exchange.borrow([first, second._replace(generation=1 << 40), second], "one")
    ended = exchange.take_releases()["one"]
    assert sorted(g.slot for g in ended) == sorted([first.slot, second.slot, second.slot])
    assert [g.refs for g in ended] == [1, 1, 1]
