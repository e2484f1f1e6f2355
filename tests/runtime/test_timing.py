"""Where the time of calls goes."""

from __future__ import annotations

import time

from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.timing import RunQueueMeter, own_run_queue_ns
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
