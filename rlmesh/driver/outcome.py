"""The result or error of a job that has ended, and the texts that describe failures."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlmesh.agent.protocol import ExitReport
from rlmesh.errors import (
    CallError,
    JobFailed,
    JobStopped,
    LaunchError,
    PeerLost,
    RemoteError,
    RestartBudgetExhausted,
)
from rlmesh.job.masking import mask_text
from rlmesh.job.status import NODE_LOST, FailureInfo, JobStatus, first_cause
from rlmesh.observe.views.safe_text import shown

SHOWN_LOG_LINES = 20
SHOWN_MEMBERS = 8


@dataclass(frozen=True, slots=True)
class JobResult:
    """A job that succeeded.

    Attributes:
        status: the last state; ``status.records`` is empty, ``metrics.jsonl`` in ``run_dir`` has the records.
        run_dir: folder of logs, metrics and report.
        report: the drawing of the run, if one was made.
        exit_reports: one per node: what was started, and what had to be cleaned up.
    """

    status: JobStatus
    run_dir: Path
    report: Path | None = None
    exit_reports: tuple[ExitReport, ...] = ()


CTRL_C, STOP_COMMAND = "Ctrl-C", "rlmesh stop"
"""The reasons of jobs that were stopped by SIGINT, and by the command."""


class StoppedBySignal(KeyboardInterrupt):
    """The job was stopped by a signal; ``number`` is the signal's, 2 for Ctrl-C.

    Attributes:
        stop_signal: the same number, or 0 if the program itself stopped the job.
    """

    number: int = int(signal.SIGINT)
    stop_signal: int = 0


def cut_short(status: JobStatus) -> JobStatus:
    """Return the last state of a job that was cut short: members without a reported end were killed with their
    agent."""
    gone = ("exited", "failed", "restarting")
    killed = [f"{m.role}:{m.rank}" for m in status.members if m.state not in gone]
    names = ", ".join(killed[:SHOWN_MEMBERS])
    if len(killed) > SHOWN_MEMBERS:
        names += f" and {len(killed) - SHOWN_MEMBERS} more"
    return replace(
        status,
        stage="stopped",
        members=tuple(m if m.state == "failed" else replace(m, state="exited") for m in status.members),
        killed="; ".join(filter(None, [status.killed, names and f"killed with their agents: {names}"])),
    )


def job_interrupted(job_name: str, reason: str, note: str) -> StoppedBySignal:
    """Return the error of a job that was stopped at any step."""
    error = StoppedBySignal(f"job {job_name} was stopped: {reason}" + (f" ({note})" if note else ""))
    if reason in signal.Signals.__members__:
        error.number = error.stop_signal = signal.Signals[reason]
    elif reason in (CTRL_C, STOP_COMMAND):
        error.stop_signal = int(signal.SIGINT)
    return error


def interrupt_code(error: KeyboardInterrupt | JobFailed) -> int:
    """The exit code of a command that the user interrupted: 128 and the number of the signal, 130 after Ctrl-C."""
    if isinstance(error, JobFailed):
        return 128 + error.stop_signal if error.stop_signal else 1
    return 128 + (error.number if isinstance(error, StoppedBySignal) else int(signal.SIGINT))


def job_stopped(job_name: str, status: JobStatus, reason: str, run_dir: Path) -> JobStopped:
    """Return the error of a job that stopped after a notice and can be resumed."""
    where = "before a step at which all ranks could stop"
    if status.stopped_at is not None:
        where = f"after step {status.stopped_at}, all ranks at the same"
    note = f" ({status.note})" if status.note and status.stopped_at is None else ""
    error = JobStopped(
        f"job {job_name} stopped {where}: {reason}{note}. Start it again with --run-dir {run_dir} to resume it"
    )
    error.step, error.run_dir = status.stopped_at, str(run_dir)
    return error


def describe_failure(failure: FailureInfo) -> str:
    """Return a failure in full: what happened, the remote traceback, the last lines of the member's log."""
    parts = [failure.message, *filter(None, [failure.touched])]
    if failure.remote_traceback:
        parts += [f"traceback of {failure.role}:{failure.rank}:", _indented(failure.remote_traceback)]
    if failure.exit is not None and failure.exit.peak_rss_bytes:
        parts.append(f"peak memory: {failure.exit.peak_rss_bytes / 2**20:.0f} MiB")
    if failure.exit is not None and failure.exit.last_log_lines and not _ends_alike(failure):
        parts.append(f"last lines of {failure.exit.log_path}:")
        parts.append(_indented("\n".join(failure.exit.last_log_lines[-SHOWN_LOG_LINES:])))
    return shown(mask_text("\n".join(parts)), lines=True)


def _ends_alike(failure: FailureInfo) -> bool:
    """True if the log ends with the traceback, so that one of the two can be left out."""
    last = failure.remote_traceback.rstrip().splitlines()[-1:]
    return bool(last) and failure.exit is not None and last[0] in failure.exit.last_log_lines


def job_failed(
    job_name: str, failures: Sequence[FailureInfo], run_dir: Path, *, output_shown: bool = False
) -> JobFailed:
    """Return the error of a job that failed; the first exception is the first cause.

    ``output_shown``: a view showed the output of the members.
    """
    from rlmesh.observe.files.incidents import newest_incident

    incident = newest_incident(run_dir)
    files = f"what happened: {incident}; logs and metrics: {run_dir}" if incident else f"logs and metrics: {run_dir}"
    text = f"{shown(mask_text(first_cause(job_name, failures)))} ({files})"
    error = JobFailed(text, [_as_exception(failure) for failure in failures] or [LaunchError(text)])
    error.run_dir, error.shown = str(run_dir), output_shown
    error.incident = str(incident or "")
    error.node_lost = bool(failures) and failures[0].kind == NODE_LOST
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
