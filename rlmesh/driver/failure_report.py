"""Short report of a failed job. Details are in files, which the report names."""

from __future__ import annotations

import sys
from types import TracebackType

from rlmesh.driver.outcome import StoppedBySignal
from rlmesh.errors import JobFailed, JobStopped, RestartBudgetExhausted
from rlmesh.observe.views.safe_text import shorten

__all__ = ["failure_lines", "report_ends_briefly"]

MOST_LINES = 16
SHOWN_OTHERS = 3
WIDEST = 400


def failure_lines(error: JobFailed) -> list[str]:
    """Return the report of a failed job: the first cause, the first lines of its consequences, and the files.

    Output of members that was shown while the job ran is left out.
    """
    first, *others = [str(one) for one in error.exceptions]
    cause = first.splitlines() or [""]
    # If the restart budget is used up, the first failure may be hours old and far up in the shown output: keep its
    # traceback.
    if error.shown and not isinstance(error.exceptions[0], RestartBudgetExhausted):
        cause = _without_traceback(cause)
    lines = [f"{error.message.partition(' failed: ')[0]} failed. First cause:"]
    lines += [f"  {line}" for line in shorten(cause, MOST_LINES - SHOWN_OTHERS)]
    if others:
        lines.append("What followed:")
        lines += [f"  {other.splitlines()[0][:WIDEST]}" for other in others[:SHOWN_OTHERS]]
        if len(others) > SHOWN_OTHERS:
            lines.append(f"  and {len(others) - SHOWN_OTHERS} more")
    if error.incident:
        lines.append(f"What happened, in order: {error.incident}")
    lines.append(f"Logs and metrics: {error.run_dir}")
    return lines


def _without_traceback(lines: list[str]) -> list[str]:
    """Return a failure without tracebacks, and without the end of the log that repeats them."""
    remaining: list[str] = []
    inside = had_one = False
    for line in lines:
        if line.startswith("--- traceback of "):
            break
        if line.strip().startswith("out of memory: "):  # follows the traceback and explains it
            remaining.append(line)
            continue
        if line.startswith("traceback of ") or (had_one and line.startswith("last lines of ")):
            inside = had_one = True
        elif not (inside and (line.startswith("    ") or not line.strip())):
            inside = False
            remaining.append(line)
    return remaining


def report_ends_briefly() -> None:
    """Let an uncaught job error print a short report. A hook that the program has set stays in place."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _hook


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, JobFailed):
        sys.stderr.write("\n".join(["", *failure_lines(error), ""]))
    elif isinstance(error, StoppedBySignal | JobStopped):
        sys.stderr.write(f"rlmesh: {error}\n")
    else:
        sys.__excepthook__(kind, error, trace)
