"""What ``rlmesh status`` says of a training's sample buffer."""

from __future__ import annotations

from typing import Any

from rlmesh.job.status import MetricRecord
from rlmesh.observe.views.summary import buffer_lines


def record(step: int, **metrics: float) -> MetricRecord:
    values: Any = {name.replace("__", "/"): value for name, value in metrics.items()}
    return MetricRecord(at=0.0, role="TRAINER", rank=0, step=step, metrics=values)


def test_the_last_report_says_who_waits() -> None:
    older = record(1, buffer__ready=0.0, buffer__sampling=4.0)
    full = record(2, buffer__ready=8.0, buffer__sampling=0.0, buffer__engines_wait_s=1.25, buffer__trainer_wait_s=0.0)
    assert buffer_lines([older, full, record(2, other=1.0)]) == [
        "sample buffer at step 2: 8 groups ready, 0 being sampled; it is full, so engines wait; since the last step, "
        "engines waited 1.2 s for room, and the trainer 0.0 s for samples"
    ]
    (line,) = buffer_lines([older])
    assert "0 groups ready, 4 being sampled;" in line and "full" not in line


def test_a_job_without_a_buffer_has_no_line() -> None:
    assert buffer_lines([record(1, reward=1.0)]) == [] and buffer_lines([]) == []
