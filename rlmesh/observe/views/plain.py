"""The view for files and pipes: few plain lines, each complete in itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from rlmesh.job.status import JobStatus
from rlmesh.observe.views.progress import JobProgress
from rlmesh.observe.views.summary import closing_lines, failure_line, format_value, headline_metrics
from rlmesh.observe.views.text_output import Lines

__all__ = ["PlainView"]

_SECONDS = re.compile(r"[0-9.]+ s\b")
CHANGES_EVERY_S = 0.5
STEPS_EVERY_S = 2.0
BARS_EVERY_S = 10.0
_SHOWN_BARS = 3


class PlainView:
    """Writes the workers' lines to ``out``, and lines about the job, each with the job's age in seconds, to ``err``.

    State changes that come together share a line; steps are shown at most every two seconds, the last one always.
    Progress bars are shown every ten seconds; their last state is a line of the worker.
    """

    def __init__(self, out: TextIO, err: TextIO, clock: Callable[[], float]) -> None:
        self._out = Lines(out)
        self._err = Lines(err)
        self._clock = clock
        self._progress = JobProgress()
        self._changes: dict[str, str] = {}
        self._changes_at = float("-inf")
        self._step_at = float("-inf")
        self._shown_step: int | None = None
        self._shown_failures = 0
        self._note = ""
        self._doing: dict[str, str] = {}
        self._bars: tuple[str, ...] = ()
        self._bars_at = float("-inf")
        self._started = False

    def update(self, status: JobStatus) -> None:
        if not self._started:
            self._started = True
            self._say(status, f"{status.job_name} started, run directory {status.run_dir}")
        for change in self._progress.update(status):
            self._changes[change.role] = change.states
        self._show_failures(status)
        if status.note and status.note != self._note:
            self._say(status, status.note)
        self._note = status.note
        self._show_doing(status)
        now = self._clock()
        if now - self._changes_at >= CHANGES_EVERY_S:
            self._show_changes(status, now)
        if now - self._step_at >= STEPS_EVERY_S:
            self._show_step(status, now)

    def output(self, line: str) -> None:
        self._out.write(line)

    def bars(self, lines: Sequence[str]) -> None:
        now = self._clock()
        if not self._bars:
            self._bars_at = now  # the last state of a short bar is shown as a line
        self._bars = tuple(lines)
        if lines and now - self._bars_at >= BARS_EVERY_S and self._out.ready():
            self._bars_at = now
            for line in lines[:_SHOWN_BARS]:
                self._out.write(line)
            if len(lines) > _SHOWN_BARS:
                self._out.write(f"and {len(lines) - _SHOWN_BARS} more progress bars")

    def ready(self) -> bool:
        self._err.pump()
        return self._out.ready()

    def finish(self, status: JobStatus, report_png: Path | None) -> None:
        for change in self._progress.update(status):
            self._changes[change.role] = change.states
        now = self._clock()
        self._show_failures(status)
        self._show_changes(status, now)
        self._show_step(status, now)
        for line in closing_lines(self._progress, status, report_png, now):
            self._err.write(line)
        self.close()

    def close(self) -> None:
        """Write the remaining lines, unless nobody reads them."""
        if self._out.drain():
            self._err.drain()
        else:
            self._err.drain(0.1)  # stdout's reader takes nothing, and stderr's is likely the same: do not wait long

    def _say(self, status: JobStatus, text: str) -> None:
        age = max(0.0, self._clock() - status.started_at)
        if self._err.ready():  # progress can be left out, but not the end
            self._err.write(f"{age:8.1f} s  {text}")

    def _show_failures(self, status: JobStatus) -> None:
        for failure in status.failures[self._shown_failures :]:
            self._say(status, f"failed: {failure_line(failure)}")
        self._shown_failures = max(self._shown_failures, len(status.failures))

    def _show_doing(self, status: JobStatus) -> None:
        """Show a member's activity when it begins, not again with every second that it lasts."""
        doing = {f"{member.role}:{member.rank}": member.doing for member in status.members if member.doing}
        for name, text in doing.items():
            if _SECONDS.sub("", text) != _SECONDS.sub("", self._doing.get(name, "")):
                self._say(status, f"{name}: {text}")
        self._doing = doing

    def _show_changes(self, status: JobStatus, now: float) -> None:
        if self._changes:
            self._say(status, " · ".join(f"{role} {states}" for role, states in self._changes.items()))
            self._changes.clear()
            self._changes_at = now

    def _show_step(self, status: JobStatus, now: float) -> None:
        step = self._progress.step
        if step is None or step == self._shown_step:
            return
        self._shown_step, self._step_at = step, now
        total = self._progress.total_steps
        count = f"step {step}" if total is None else f"step {step}/{total}"
        metrics = headline_metrics(self._progress)
        values = "  ".join(f"{name} {format_value(value)}" for name, value in metrics)
        self._say(status, f"{count}  {values}".rstrip())
