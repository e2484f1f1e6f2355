"""The closing lines of a job's output, the same in every view."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlmesh.job.masking import mask_text
from rlmesh.job.status import FailureInfo, JobStatus, MetricRecord
from rlmesh.observe.time_use import format_time_use
from rlmesh.observe.views.progress import JobProgress

__all__ = ["closing_lines", "failure_line", "format_value", "headline_metrics"]

_HEADLINES = ("reward_mean", "val/reward_mean", "heldout_accuracy", "kl", "steps_lost", "log_prob_gap")
_SHOWN_METRICS = 6
MOST_COUNT = 1_000_000_000
"""Larger numbers take more room than a view has."""


def headline_metrics(progress: JobProgress) -> list[tuple[str, float]]:
    """Names and latest values of the metrics to show, the well-known ones first, the step time last."""
    latest = progress.latest
    if latest is None:
        return []
    names = [name for name in _HEADLINES if progress.values(name)]
    others = [name for name in latest.metrics if name not in (*_HEADLINES, "step_time_s", "total_steps")]
    names += others[: max(0, _SHOWN_METRICS - len(names))]
    if progress.values("step_time_s"):
        names.append("step_time_s")
    return [(name, values[-1]) for name in names if (values := progress.values(name))]


def format_value(value: float) -> str:
    """Format with four significant digits; counts in full."""
    if abs(value) < MOST_COUNT and value == int(value):
        return str(int(value))
    return f"{value:.4g}"


def failure_line(failure: FailureInfo) -> str:
    """The first line of a failure; the job's error has all lines."""
    who = "" if failure.role is None else f"{failure.role}:{failure.rank}: "
    text = mask_text(failure.message).strip().splitlines() or ["failed"]
    return text[0] if text[0].startswith(who) else who + text[0]


def buffer_lines(records: Sequence[MetricRecord]) -> list[str]:
    """The sample buffer of a training at its last reported step: how full it is, and who waited for whom.

    Args:
        records: the last reports of the job, oldest first.
    """
    last = next((one for one in reversed(records) if "buffer/ready" in one.metrics), None)
    if last is None:
        return []
    ready, sampling, engines_s, trainer_s = (
        float(last.metrics.get(f"buffer/{name}", 0.0))
        for name in ("ready", "sampling", "engines_wait_s", "trainer_wait_s")
    )
    full = "; it is full, so engines wait" if ready and not sampling else ""
    return [
        f"sample buffer at step {last.step}: {ready:.0f} groups ready, {sampling:.0f} being sampled{full}; since the "
        f"last step, engines waited {engines_s:.1f} s for room, and the trainer {trainer_s:.1f} s for samples"
    ]


SHOWN_ALARMS = 3


def alarm_lines(status: JobStatus) -> list[str]:
    """The last alarms that members raised; ``events.jsonl`` has all."""
    lines = [f"alarm: {alarm}" for alarm in status.alarms[-SHOWN_ALARMS:]]
    if status.alarm_count > len(lines):
        lines.insert(0, f"alarms: {status.alarm_count}, of which these are the last")
    return lines


def closing_lines(progress: JobProgress, status: JobStatus, report_png: Path | None, now: float) -> list[str]:
    """The outcome of the job, both ends of its curves, its time use, and the paths of its files."""
    steps = "" if progress.step is None else f" at step {progress.step}"
    lines = [f"{status.job_name} {status.stage} after {max(0.0, now - status.started_at):.1f} s{steps}"]
    if status.first_serving_s is not None:
        serving = f"first member serving after {status.first_serving_s:.2f} s"
        if status.all_serving_s is not None:
            serving += f", all {len(status.members)} after {status.all_serving_s:.2f} s"
        lines.append(serving)
    lines += [f"first cause: {failure_line(failure)}" for failure in status.failures[:1]]
    lines += [f"incident: {path}" for path in status.incidents[-3:]]
    lines += alarm_lines(status)
    lines += _curve_ends(progress)
    lines += format_time_use(progress.time_use.callers())
    if status.run_dir:
        lines.append(f"run directory: {status.run_dir}")
    if report_png is not None:
        lines.append(f"report: {report_png}")
    return lines


def _curve_ends(progress: JobProgress) -> list[str]:
    ends = []
    for name in _HEADLINES:
        values = progress.values(name)
        if len(values) > 1:
            ends.append(f"{name} {format_value(values[0])} → {format_value(values[-1])}")
    return ["   ".join(ends)] if ends else []
