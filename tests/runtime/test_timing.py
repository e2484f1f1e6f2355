"""Where the time of calls goes."""

from __future__ import annotations

import time

import pytest

from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.timing import CallLedger, RunQueueMeter, own_run_queue_ns
from tests.runtime.conftest import Mesh


class Slow:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    @rpc
    def work(self) -> None:
        time.sleep(self.seconds)


def test_the_slowest_members_time_is_not_overhead(mesh: Mesh) -> None:
    group = mesh.serve("S", Slow(0.02), Slow(0.15), Slow(0.05))
    mesh.caller.take_call_stats()
    group.call("work").result()
    (stats,) = mesh.caller.take_call_stats()
    assert (stats.role, stats.method, stats.calls, stats.slowest_rank) == ("S", "work", 1, 1)
    assert 0.15 <= stats.method_s <= stats.wall_s < 0.5
    assert stats.overhead_s < 0.1
    assert mesh.caller.take_call_stats() == ()


def test_waiting_behind_another_call_is_queueing(mesh: Mesh) -> None:
    handle = mesh.serve("S", Slow(0.1))[0]
    for future in [handle.call("work") for _ in range(3)]:
        future.result()
    (stats,) = mesh.caller.take_call_stats()
    assert stats.calls == 3
    assert 0.25 < stats.queued_s < 0.6  # 0 + 0.1 + 0.2 and change.
    assert stats.overhead_s < 0.15
    # The three overlap: their shares add up to the time in which any was pending.
    assert 0.3 <= stats.share_s <= 0.6 and stats.wall_s > stats.share_s


def test_run_queue_time_only_grows() -> None:
    first = own_run_queue_ns()
    sum(range(100_000))
    assert own_run_queue_ns() >= first
    meter = RunQueueMeter([2**22 + 1])
    assert meter.read_ns() == 0, "a thread that does not exist counts nothing"
    meter.close()


def test_many_calls_are_summed_in_bulk_to_the_same_totals() -> None:
    """4,500 calls of two methods, one after the other: the first 4,001 go the quick way."""
    ledger = CallLedger()
    for number in range(4500):
        began_ns = 1_000 * number
        method = "a" if number % 3 else "b"
        ledger.add((f"S:{number % 2}", method, began_ns, began_ns + 900, 50, f"S:{number % 2}", 400, 100, 50))
    stats = {each.method: each for each in ledger.take()}
    assert {method: each.calls for method, each in stats.items()} == {"a": 3000, "b": 1500}
    for each in stats.values():
        assert each.wall_s == pytest.approx(each.calls * 900e-9)
        assert each.method_s == pytest.approx(each.calls * 400e-9)
        assert each.queued_s == pytest.approx(each.calls * 100e-9)
        assert each.run_queue_s == pytest.approx(each.calls * 100e-9)
        assert each.overhead_s == pytest.approx(each.calls * 300e-9)
        assert each.share_s == pytest.approx(each.calls * 900e-9)
        assert each.slowest_rank in (0, 1)


def test_calls_that_overlap_share_the_time_in_bulk_too() -> None:
    """4,001 calls, all pending during the same millisecond."""
    ledger = CallLedger()
    for number in range(4001):
        ledger.add(("S:0", "a", number, 1_000_000 + number, 0, "S:0", 0, 0, 0))
    (stats,) = ledger.take()
    assert stats.wall_s == pytest.approx(4001 * 1e-3)
    assert stats.share_s == pytest.approx(1.004e-3)
