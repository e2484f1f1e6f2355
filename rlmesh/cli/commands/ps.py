"""``rlmesh ps [JOB] [--pending]``: lists the jobs that run here, their members, and the calls that they wait for."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from rlmesh.cli.commands.status import ask_status, graph_lines
from rlmesh.cli.job_choice import add_job_argument, as_command, asking, find_running, headline, say
from rlmesh.job.status import JobStatus, MemberWaits
from rlmesh.run_directory.discovery import RunningJob, running_jobs
from rlmesh.run_directory.records import ended_jobs
from rlmesh.run_directory.workspace import KEY_FILE


def add_to(commands: Any) -> None:
    """Add the command to ``rlmesh``'s subparsers."""
    parser = commands.add_parser(
        "ps",
        help="list the jobs that run on this machine",
        description="List your jobs whose master runs on this machine, or the members of one of them.",
    )
    add_job_argument(parser)
    parser.add_argument(
        "--pending", action="store_true", help="whom each member waits for, since when, and what that member does"
    )
    parser.add_argument("--graph", action="store_true", help="who called whom, how often, how long and how many bytes")
    parser.add_argument("--all", action="store_true", help="include jobs that have ended")
    parser.set_defaults(run=as_command("ps", show))


def show(options: argparse.Namespace) -> int:
    """Print the requested list and return the exit code."""
    jobs = running_jobs()
    if options.job is None and not (options.pending or options.graph):
        if not jobs:
            print("no job of yours runs on this machine")
        ended = ended_jobs(job.run_dir for job in jobs) if options.all else []
        for line in [*map(headline, ended), *map(headline, jobs)]:
            say(line)
        return 0
    job = find_running(options.job)
    say(headline(job))
    say(f"  {job.master_endpoint}  key file {job.folder / KEY_FILE}")
    for line in ask(job, pending=options.pending, graph=options.graph):
        say(line)
    return 0


def ask(job: RunningJob, *, pending: bool = False, graph: bool = False) -> list[str]:
    """The lines about a job: its members, the calls that each of them waits for, or the call graph.

    Raises:
        CallError: the master does not answer.
    """
    if graph:
        return graph_lines(job, "text")
    if pending:
        with asking(job) as master:
            return list(pending_lines(master.call("pending").result()))
    return list(member_lines(ask_status(job)))


def member_lines(status: JobStatus) -> Iterable[str]:
    """One line per member."""
    yield f"  {status.stage}{': ' + status.note if status.note else ''}"
    for member in status.members:
        step = f"  step {member.step}" if member.step is not None else ""
        fused = f"  in the process of {member.fused_with}" if member.fused_with else ""
        doing = f"  {member.doing}" if member.doing else ""
        yield f"  {member.role}:{member.rank}  {member.state}  pid {member.pid}{step}{fused}{doing}"
    for path in status.incidents:
        yield f"  incident: {path}"


def pending_lines(members: Iterable[MemberWaits]) -> Iterable[str]:
    """Each member that waits or is waited for, with whom and since when; the other members in one line."""
    idle = []
    for member in members:
        name = f"{member.role}:{member.rank}"
        if not (member.waits or member.serves or member.error):
            idle.append(name)
            continue
        step = f"  step {member.step}" if member.step is not None else ""
        yield f"  {name}  {member.state}{step}  {member.process or f'pid {member.pid}'}"
        if member.error:
            yield f"    does not say whom it waits for: {member.error}"
        for waiting in member.waits:
            yield f"    waits for {waiting}"
        for serving in member.serves:
            yield f"    {serving}"
    if idle:
        yield f"  nothing is pending at {', '.join(idle)}"
