"""What ``submit`` gives or raises at the end of a job, and how a failure is told to people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlmesh.agent.protocol import ExitReport
from rlmesh.errors import CallError, JobFailed, LaunchError, PeerLost, RemoteError, RestartBudgetExhausted
from rlmesh.job.status import FailureInfo, JobStatus

SHOWN_LOG_LINES = 20


@dataclass(frozen=True, slots=True)
class JobResult:
    """A job that succeeded.

    Attributes:
        status: its last state; ``status.records`` are empty, ``metrics.jsonl`` in ``run_dir`` has them.
        run_dir: logs, metrics and report.
        report: the picture of the run, if one was drawn.
        exit_reports: one per node: what was started, and what had to be cleaned up.
    """

    status: JobStatus
    run_dir: Path
    report: Path | None = None
    exit_reports: tuple[ExitReport, ...] = ()


def describe_failure(failure: FailureInfo) -> str:
    """A failure in full: what happened, the remote traceback, the last lines of the member's log."""
    parts = [failure.message]
    if failure.remote_traceback:
        parts += [f"traceback of {failure.role}:{failure.rank}:", _indented(failure.remote_traceback)]
    if failure.exit is not None and failure.exit.peak_rss_bytes:
        parts.append(f"peak memory: {failure.exit.peak_rss_bytes / 2**20:.0f} MiB")
    if failure.exit is not None and failure.exit.last_log_lines:
        parts.append(f"last lines of {failure.exit.log_path}:")
        parts.append(_indented("\n".join(failure.exit.last_log_lines[-SHOWN_LOG_LINES:])))
    return "\n".join(parts)


def job_failed(job_name: str, failures: Sequence[FailureInfo], run_dir: Path) -> JobFailed:
    """The error for a job that failed; its first exception is the first cause."""
    first = failures[0].message.splitlines()[0] if failures else "no cause was recorded"
    text = f"job {job_name} failed: {first} (logs and metrics: {run_dir})"
    error = JobFailed(text, [_as_exception(failure) for failure in failures] or [LaunchError(text)])
    error.run_dir = str(run_dir)
    return error


def _as_exception(failure: FailureInfo) -> Exception:
    text = describe_failure(failure)
    if failure.kind == RestartBudgetExhausted.__name__:
        return RestartBudgetExhausted(text)
    if failure.role is None:
        return LaunchError(text)
    cls: type[CallError] = PeerLost if failure.exit is not None and not failure.remote_traceback else RemoteError
    error = cls(text, role=failure.role, rank=failure.rank, executed="maybe")
    if isinstance(error, RemoteError):
        error.text = text
        error.remote_traceback = failure.remote_traceback
    elif isinstance(error, PeerLost) and failure.exit is not None:
        error.reason = failure.exit.describe()
    return error


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.rstrip().splitlines())
