"""Values that the tests of the views share."""

from __future__ import annotations

from typing import Any

from rlmesh.job.status import CallStats, JobStatus, MemberState, MemberStatus, MetricRecord

STARTED_AT = 1_760_000_000.0


class Clock:
    """Seconds since the epoch, moved by hand."""

    def __init__(self) -> None:
        self.now = STARTED_AT

    def __call__(self) -> float:
        return self.now


def call(role: str, method: str = "forward", **values: Any) -> CallStats:
    given: dict[str, Any] = {
        "calls": 1, "wall_s": 0.2, "method_s": 0.19, "queued_s": 0.0, "run_queue_s": 0.004,
        "overhead_s": 0.006, "slowest_rank": 0,
    }  # fmt: skip
    return CallStats(role=role, method=method, **(given | values))


def record(step: int, *calls: CallStats, role: str = "TRAINER", rank: int = 0, **metrics: float) -> MetricRecord:
    return MetricRecord(STARTED_AT + step, role, rank, step, metrics, calls)


def member(role: str, rank: int, state: MemberState, **values: Any) -> MemberStatus:
    return MemberStatus(role, rank, 0, 0, values.pop("pid", 4000 + rank), state, **values)


def status(*members: MemberStatus, **values: Any) -> JobStatus:
    given: dict[str, Any] = {"stage": "running", "started_at": STARTED_AT, "run_dir": "runs/demo-1"}
    return JobStatus(job_name="demo", job_id="j1", members=members, **(given | values))
