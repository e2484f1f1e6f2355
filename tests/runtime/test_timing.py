"""How long threads were runnable without a core."""

from __future__ import annotations

from rlmesh.runtime.calling.call_stats import RunQueueMeter, own_run_queue_ns


def test_run_queue_time_only_grows() -> None:
    first = own_run_queue_ns()
    sum(range(100_000))
    assert own_run_queue_ns() >= first
    meter = RunQueueMeter([2**22 + 1])
    assert meter.read_ns() == 0, "a thread that does not exist counts nothing"
    meter.close()
