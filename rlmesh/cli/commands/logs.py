"""``rlmesh logs [-f] [ROLE[:RANK]]``: prints the output of members, each line with the member's name."""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from typing import Any

from rlmesh.agent.monitoring.logs import LogLine, LogTail, last_lines, logs_folder
from rlmesh.cli.job_choice import add_job_argument, as_command, check_own, checked, find_any
from rlmesh.cli.quantities import count
from rlmesh.errors import UsageError
from rlmesh.observe.views.safe_text import shown
from rlmesh.run_directory.discovery import RunningJob

POLL_S = 0.2
BARS_EVERY_S = 10.0
"""Seconds between prints of progress bars that are being drawn; their last state is a line like any other."""
OWN = ("master", "agent")
"""The job's own processes: printed only on request."""


def add_to(commands: Any) -> None:
    """Add the command to ``rlmesh``'s subparsers."""
    parser = commands.add_parser(
        "logs",
        help="print the output of members",
        description="Print the output of a job's members, each line with the member's name; also of jobs that have "
        "ended. MASTER and AGENT:node are the job's own processes. Members of other nodes are included where the run "
        "directory is shared.",
    )
    parser.add_argument("who", metavar="ROLE[:RANK]", nargs="?", help="one role or one member (default: all)")
    parser.add_argument("-f", "--follow", action="store_true", help="continue until the job ends")
    parser.add_argument("-n", "--lines", type=count, metavar="N", help="only the last N lines of each")
    add_job_argument(parser, option=True)
    parser.set_defaults(run=as_command("logs", show))


def show(options: argparse.Namespace) -> int:
    """Print the lines and return the exit code."""
    job = find_any(options.job)
    folder = logs_folder(job.run_dir)
    check_own(folder)
    chosen = _choose(folder, options.who)
    tail = LogTail()
    for name, path in chosen.items():
        tail.add(name, path)
    if options.lines is None:
        _print(tail.finish())
    else:
        for name, path in chosen.items():
            _print(LogLine(name, text) for text in last_lines(path, options.lines))
        if options.follow:
            tail.finish()
    if not options.follow and not any(path.stat().st_size for path in chosen.values()):
        print(f"rlmesh logs: nothing was printed so far by {', '.join(chosen)}", file=sys.stderr)
    if options.follow:
        _follow(tail, folder, options.who, job.folder if isinstance(job, RunningJob) else None)
    return 0


def files(folder: Path) -> dict[str, Path]:
    """The log files of a run directory, by process name: ``ROLE:rank``, ``agent:node`` or ``master``."""
    found = {}
    for path in sorted(folder.glob("*.log"), key=_order):
        match = re.fullmatch(r"(.+)-(\d+)", path.stem)
        found[f"{match[1]}:{match[2]}" if match else path.stem] = path
    return found


def _order(path: Path) -> tuple[str, int]:
    match = re.fullmatch(r"(.+)-(\d+)", path.stem)
    return (match[1], int(match[2])) if match else (path.stem, 0)


def _choose(folder: Path, who: str | None) -> dict[str, Path]:
    found = files(folder)
    if not found:
        raise UsageError(f"there are no logs in {folder} on this machine")
    # A link is the log of a member that runs in another member's process.
    names = [
        name
        for name, path in found.items()
        if who is not None or (name.partition(":")[0] not in OWN and not path.is_symlink())
    ]
    return {name: found[name] for name in checked(names, who)}


def _follow(tail: LogTail, folder: Path, who: str | None, running: Path | None) -> None:
    bars_at = time.monotonic()
    while running is not None and running.exists():
        _print(tail.poll())
        if time.monotonic() - bars_at >= BARS_EVERY_S:
            bars_at = time.monotonic()
            _print(tail.bars())
        time.sleep(POLL_S)
        for name, path in _choose(folder, who).items():
            tail.add(name, path)  # members that started later
    _print(tail.finish())


def _print(lines: Any) -> None:
    for line in lines:
        sys.stdout.write(f"{shown(line.name)} | {shown(line.text)}\n")
    sys.stdout.flush()
