"""The view on a running job: a live table on a terminal, plain lines anywhere else."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlmesh.job.status import JobStatus, MemberState, MemberStatus
from rlmesh.observe.views.plain import PlainView
from rlmesh.observe.views.progress import JobProgress, sparkline
from rlmesh.observe.views.safe_text import shown
from rlmesh.observe.views.summary import closing_lines, failure_line, format_value, headline_metrics
from rlmesh.observe.views.text_output import can_write
from rlmesh.runtime.process.clock import epoch
from rlmesh.runtime.process.forked import forget_in_children

__all__ = ["JobView", "LiveView", "NoView", "ViewMode", "make_view"]

ViewMode = Literal["auto", "live", "plain", "none"]

_STATE_STYLE: dict[MemberState, str] = {
    "starting": "yellow",
    "bound": "yellow",
    "ready": "green",
    "running": "bold green",
    "finished": "cyan",
    "stopping": "yellow",
    "exited": "dim",
    "failed": "bold red",
}
_FIRST: frozenset[MemberState] = frozenset({"failed", "starting", "bound"})
_LINES_AROUND_THE_MEMBERS = 12
_SPARK_WIDTH = 40
_SHOWN_BARS = 4


class JobView(Protocol):
    """Shows one job: ``update`` is called about five times a second, ``finish`` once, ``close`` always."""

    def update(self, status: JobStatus) -> None:
        """Show a snapshot. Its reports begin with number ``records_from``; known ones are skipped."""

    def output(self, line: str) -> None:
        """Show a line that a worker printed, as ``ROLE:rank | text`` without its newline."""

    def bars(self, lines: Sequence[str]) -> None:
        """Show the workers' present progress bars, as ``ROLE:rank | text``; they replace the earlier ones."""

    def ready(self) -> bool:
        """True if lines can be taken without waiting for their reader. Other lines stay in their files."""

    def finish(self, status: JobStatus, report_png: Path | None) -> None:
        """Show how the job ended with this snapshot, its time use, and its files."""

    def close(self) -> None:
        """Release the terminal. Safe to call twice, and after ``finish``."""


def make_view(
    mode: ViewMode,
    *,
    out: TextIO | None = None,
    err: TextIO | None = None,
    clock: Callable[[], float] = epoch,
) -> JobView:
    """Create a view that writes the workers' lines to ``out`` (stdout) and its own lines to ``err`` (stderr).

    ``auto`` is ``live`` if both are terminals that can move the cursor, else ``plain``. ``clock`` returns
    seconds since the epoch.
    """
    out = sys.stdout if out is None else out
    err = sys.stderr if err is None else err
    if mode == "none":
        return NoView()
    if mode == "auto":
        able = out.isatty() and err.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        mode = "live" if able else "plain"
    return LiveView(Console(file=err), clock) if mode == "live" else PlainView(out, err, clock)


class NoView:
    """Shows nothing."""

    shows = False

    def update(self, status: JobStatus) -> None: ...

    def output(self, line: str) -> None: ...

    def bars(self, lines: Sequence[str]) -> None: ...

    def ready(self) -> bool:
        return True

    def finish(self, status: JobStatus, report_png: Path | None) -> None: ...

    def close(self) -> None: ...


class LiveView:
    """A table of the members that is redrawn in place; worker output scrolls above it. Starts no thread."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console = console
        self._clock = clock
        self._progress = JobProgress()
        self._live: Live | None = None
        self._bars: Sequence[str] = ()

    def update(self, status: JobStatus) -> None:
        self._progress.update(status)
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
            # A process that dies of an exception elsewhere must not leave the terminal without a cursor.
            atexit.register(self.close)
            forget_in_children(self)
        self._live.update(self.render(status), refresh=True)

    def output(self, line: str) -> None:
        self._console.print(_styled(line), soft_wrap=True)

    def bars(self, lines: Sequence[str]) -> None:
        self._bars = lines

    def ready(self) -> bool:
        try:
            return can_write(self._console.file.fileno())
        except (OSError, ValueError):
            return True

    def finish(self, status: JobStatus, report_png: Path | None) -> None:
        self.update(status)
        self.close()
        for line in closing_lines(self._progress, status, report_png, self._clock()):
            self._console.print(Text(shown(line)), soft_wrap=True)

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()
            atexit.unregister(self.close)

    def forked(self) -> None:
        """Detach a forked child from the terminal, which belongs to the parent's view; its output is only printed."""
        live, self._live = self._live, None
        if live is not None:
            live._disable_redirect_io()
            atexit.unregister(self.close)

    def render(self, status: JobStatus) -> RenderableType:
        """The display for a snapshot."""
        parts: list[RenderableType] = [self._head(status), self._members(status)]
        failures = [failure_line(failure) for failure in status.failures[:3]]
        parts += [Text(shown(f"failed: {line}"), style="bold red") for line in failures]
        if self._progress.curves:
            parts.append(self._curves())
        for line in self._bars[:_SHOWN_BARS]:
            bar = _styled(line)
            bar.no_wrap, bar.overflow = True, "ellipsis"
            parts.append(bar)
        if len(self._bars) > _SHOWN_BARS:
            parts.append(Text(f"and {len(self._bars) - _SHOWN_BARS} more bars", style="dim"))
        if status.note:
            parts.append(Text(shown(status.note), style="dim"))
        return Group(*parts)

    def _head(self, status: JobStatus) -> RenderableType:
        minutes, seconds = divmod(max(0.0, self._clock() - status.started_at), 60)
        age = f"{int(minutes):02d}:{seconds:04.1f}"
        head = Text.assemble((shown(status.job_name), "bold"), f"  {status.stage}  {age}")
        step, total = self._progress.step, self._progress.total_steps
        if step is None:
            return head
        if not total:
            return head.append(f"  step {step}")
        head.append(f"  step {step}/{total} ")
        line = Table.grid()
        line.add_row(head, ProgressBar(total=total, completed=min(step, total), width=_SPARK_WIDTH))
        return line

    def _members(self, status: JobStatus) -> RenderableType:
        nodes = len({member.node_rank for member in status.members}) > 1
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in ("member", *(("node",) if nodes else ())):
            table.add_column(name)
        table.add_column("pid", justify="right")
        table.add_column("state")
        table.add_column("step", justify="right")
        table.add_column("last beat", justify="right")
        room = max(3, self._console.height - _LINES_AROUND_THE_MEMBERS)
        rows = status.members
        if len(rows) > room:  # members with trouble come first
            rows = tuple(sorted(rows, key=lambda member: not member.doing and member.state not in _FIRST)[: room - 1])
        for member in rows:
            table.add_row(*self._row(member, nodes))
        if len(rows) < len(status.members):
            return Group(table, Text(f"and {len(status.members) - len(rows)} more members", style="dim"))
        return table

    def _row(self, member: MemberStatus, nodes: bool) -> list[RenderableType]:
        name = f"{member.role}:{member.rank}"
        if member.incarnation:
            name += f" (restart {member.incarnation})"
        beat = ""
        if member.last_beat_at is not None and member.state not in ("exited", "failed"):
            beat = f"{max(0.0, self._clock() - member.last_beat_at):.1f} s"
        return [
            Text(name),
            *([Text(str(member.node_rank))] if nodes else []),
            Text(str(member.pid or "")),
            Text(f"{member.state}, {member.doing}", style="yellow")
            if member.doing
            else Text(member.state, style=_STATE_STYLE[member.state]),
            Text("" if member.step is None else str(member.step)),
            Text(beat),
        ]

    def _curves(self) -> RenderableType:
        table = Table.grid(padding=(0, 2, 0, 0))
        for name, value in headline_metrics(self._progress):
            line = sparkline(self._progress.values(name), _SPARK_WIDTH)
            table.add_row(Text(shown(name)), Text(format_value(value), justify="right"), Text(line, style="cyan"))
        return table


def _styled(line: str) -> Text:
    """A worker's line with the member's name set apart from its text."""
    member, bar, text = line.partition(" | ")
    written = Text.from_ansi(shown((text if bar else line).rpartition("\r")[2], styles=True))
    return Text.assemble((f"{shown(member)} | ", "dim cyan"), written) if bar else written
