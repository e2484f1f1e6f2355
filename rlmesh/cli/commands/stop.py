"""``rlmesh stop [JOB]``: ends a job with grace, and proves that nothing of it is left on this machine."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlmesh import private_files
from rlmesh.agent.processes import ownership
from rlmesh.cli.job_choice import add_job_argument, as_command, asking, find_running, headline, say
from rlmesh.cli.quantities import seconds
from rlmesh.driver.outcome import STOP_COMMAND
from rlmesh.errors import CallError, LaunchError
from rlmesh.run_directory.discovery import RunningJob
from rlmesh.runtime.process.descriptors import await_readable

GRACE_S = 10.0
END_S = 15.0
"""Seconds from the end of the grace until everything must be gone."""
POLL_S = 0.05
EXPECTED_ENDS = ("the driver is gone", "the agent ended")
"""Reasons in the guardians' reports after an ordinary end."""


def add_to(commands: Any) -> None:
    """Add the command to ``rlmesh``'s subparsers."""
    parser = commands.add_parser(
        "stop",
        help="end a job and prove that nothing is left",
        description="End a job: its members get a stop request, then SIGTERM, and SIGKILL when the grace is over. "
        "Returns when nothing of the job is left on this machine, or says what is left.",
    )
    add_job_argument(parser)
    parser.add_argument(
        "--grace", type=seconds, default=GRACE_S, metavar="SECONDS", help=f"for members to end (default {GRACE_S:g})"
    )
    parser.set_defaults(run=as_command("stop", stop))


def stop(options: argparse.Namespace) -> int:
    """End the job and return the exit code: 0 if nothing is left, 1 otherwise."""
    job = find_running(options.job)
    say(headline(job))
    sys.stdout.flush()
    with _ProcessWatch(job.driver_pid) as ended:
        try:
            with asking(job) as master:
                master.call("stop", STOP_COMMAND, float(options.grace)).result()
        except CallError as error:
            print(f"  its master does not answer ({error}); its processes are looked for", file=sys.stderr)
        _await(lambda: ended() and not job.folder.exists(), options.grace + END_S)
    left = leftovers(job)
    for line in [*reports(Path(job.run_dir)), *(f"  still there: {what}" for what in left)]:
        say(line)
    if left:
        raise LaunchError(
            f"{len(left)} things of job {job.job_id} are still there {options.grace + END_S:g} s after the order to "
            f"end. Its driver is pid {job.driver_pid}: kill it, and the guardians end what is below them"
        )
    print("  nothing of it is left on this machine")
    return 0


class _ProcessWatch:
    """Watches a process by its descriptor; a process that is already gone has ended."""

    def __init__(self, pid: int) -> None:
        try:
            self._fd = os.pidfd_open(pid)
        except OSError:
            self._fd = -1

    def __enter__(self) -> Callable[[], bool]:
        return self.ended

    def ended(self) -> bool:
        return self._fd < 0 or bool(await_readable([self._fd], 0.0))

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def _await(done: Callable[[], bool], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not done() and time.monotonic() < deadline:
        time.sleep(POLL_S)


def leftovers(job: RunningJob) -> list[str]:
    """The remains of a job on this machine: processes with its mark, shared memory, its socket folder."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and ownership.read_mark(int(entry), ownership.NODE_MARK).startswith(f"{job.job_id}/"):
            process = ownership.read_process(int(entry))
            if process is not None and process.running:
                found.append(f"process {process!r}")
    found += [str(path) for path in private_files.files_in(Path("/dev/shm"), f"rlmesh-{job.job_id}-*", anybodys=True)]
    return [*found, *([str(job.folder)] if job.folder.exists() else [])]


def reports(run_dir: Path) -> list[str]:
    """One line for the exit report of each node's guardian."""
    lines = []
    for path in private_files.files_in(run_dir, "exit-node*.json"):
        try:
            report: dict[str, Any] = json.loads(private_files.read(path))
            items = [*report["leftovers"], *(report["agent"] or {}).get("leftovers", [])]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        what = "nothing had to be cleaned up" if not items else f"{len(items)} things were cleaned up"
        if unproven := [item["what"] for item in items if not item["removed"]]:
            what += f", not proven gone: {'; '.join(unproven)}"
        why = "" if report["why"] in EXPECTED_ENDS else f" ({report['why']})"
        lines.append(f"  node {report['node_rank']}: ended{why}, {what}")
    return lines
