"""``rlmesh status [JOB] [--graph]``: prints the state of a running job, how a job ended, or a job's call graph."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmesh.cli.job_choice import add_job_argument, age, as_command, asking, find_any, headline, say
from rlmesh.job.status import JobStatus, MemberStatus
from rlmesh.master.jobspec import REJECTED
from rlmesh.master.monitoring.graph import CallGraph
from rlmesh.master.monitoring.graph_drawing import FORMATS, Format, drawn
from rlmesh.master.state.last_state import last_graph
from rlmesh.observe.files.incidents import newest_incident
from rlmesh.observe.files.metric_files import METRICS_FILE, read_tail
from rlmesh.observe.views.summary import alarm_lines, buffer_lines
from rlmesh.run_directory.discovery import RunningJob
from rlmesh.run_directory.records import EndedJob

_NO_RECORDS = 1 << 62
LAST = 32
"""Reports among which the last one of the trainer is."""


def add_to(commands: Any) -> None:
    """Add the command to ``rlmesh``'s subparsers."""
    parser = commands.add_parser("status", help="print the state of a job, or how it ended", description=__doc__)
    add_job_argument(parser)
    parser.add_argument(
        "--graph", nargs="?", const="text", choices=FORMATS, metavar="FORMAT",
        help="instead, who called whom, as far as observed: text (the default), dot for Graphviz, or mermaid",
    )  # fmt: skip
    parser.set_defaults(run=as_command("status", show))


def show(options: argparse.Namespace) -> int:
    """Print the state; return 0 if the job runs or succeeded, 1 if it failed."""
    job = find_any(options.job)
    if options.graph is not None:
        if options.graph == "text":  # other formats are for programs, which read nothing else
            say(headline(job))
        say("\n".join(graph_lines(job, options.graph)))
        return 0
    say(headline(job))
    if isinstance(job, EndedJob):
        say("\n".join(end_lines(job)))
        return 0 if job.stage == "succeeded" else 1
    say("\n".join(status_lines(ask_status(job))))
    return 0


def graph_lines(job: RunningJob | EndedJob, how: Format) -> list[str]:
    """The call graph of a job, from its master while it runs, else from its last state; text is indented.

    Raises:
        CallError: the master does not answer.
    """
    if isinstance(job, RunningJob):
        with asking(job) as master:
            graph = CallGraph.of_plain(master.call("graph").result())
    else:
        graph = last_graph(Path(job.run_dir))
    return [f"  {line}" if how == "text" else line for line in drawn(graph, how)]


def ask_status(job: RunningJob) -> JobStatus:
    """The status of a job from its master, without metric records."""
    with asking(job) as master:
        status: JobStatus = master.call("status", _NO_RECORDS).result()
    return status


def status_lines(status: JobStatus) -> Iterator[str]:
    """The stage, one line for each role, and the failures."""
    yield f"  {status.stage}{': ' + status.note if status.note else ''}"
    yield from _restart_lines([(record.unit, record.at, record.cause) for record in status.restarts], status.at)
    by_role: dict[str, list[MemberStatus]] = {}
    for member in status.members:
        by_role.setdefault(member.role, []).append(member)
    for role, members in by_role.items():
        yield f"  {role}  {_counted(member.state for member in members)}{_details(members)}"
        yield from (f"    {member.role}:{member.rank}: {member.doing}" for member in members if member.doing)
    if status.samples_trained:
        yield f"  samples trained: {status.samples_trained:,}"
    yield from (f"  {line}" for line in buffer_lines(read_tail(Path(status.run_dir) / METRICS_FILE, LAST)[1]))
    if rejected := status.extra.get(REJECTED):
        yield f"  strangers: {rejected}"
    yield from _failure_lines([failure.message for failure in status.failures])
    for path in status.incidents:
        yield f"  incident: {path}"
    yield from (f"  {line}" for line in alarm_lines(status))


def _details(members: list[MemberStatus]) -> str:
    steps = sorted({member.step for member in members if member.step is not None})
    text = f"  step {steps[0]}" if len(steps) == 1 else f"  steps {steps[0]} to {steps[-1]}" if steps else ""
    nodes = sorted({member.node_rank for member in members})
    text += _restarted(members)
    if fused := sorted({member.fused_with.rpartition(":")[0] for member in members if member.fused_with}):
        text += f"  fused with {', '.join(fused)}"
    return text + (f"  on nodes {', '.join(map(str, nodes))}" if nodes != [0] else "")


def _restarted(members: list[MemberStatus]) -> str:
    """A text: how often the role was restarted, if that is the same for all members; else how often each member was
    restarted. Empty without a restart."""
    often = Counter({f"rank {member.rank}": member.incarnation for member in members if member.incarnation})
    if not often:
        return ""
    if len(often) == len(members) and len(set(often.values())) == 1:
        return f"  restarted {times(members[0].incarnation)}"
    return f"  restarted: {_how_often(often)}"


def times(count: int) -> str:
    """A count in words."""
    return "once" if count == 1 else f"{count} times"


def _how_often(counts: Mapping[str, int], shown: int = 8) -> str:
    items = [f"{what} {times(count)}" for what, count in counts.items()]
    return ", ".join([*items[:shown], *(["…"] if len(items) > shown else [])])


def _restart_lines(restarts: Sequence[tuple[str, float, str]], now: float) -> Iterator[str]:
    """The restarts so far, and the cause of the last one."""
    if restarts:
        _, at, cause = restarts[-1]
        yield f"  restarts: {_how_often(Counter(unit for unit, *_ in restarts))}; last {age(now - at)} ago: {cause}"


def _counted(states: Iterable[str]) -> str:
    return ", ".join(f"{count} {state}" for state, count in Counter(states).items())


def end_lines(job: EndedJob) -> Iterator[str]:
    """The lines about a job that has ended."""
    if job.stage == "lost":
        yield "  its driver died before it could report the end; the logs and exit-node*.json tell more"
    if job.trouble:
        yield f"  its record cannot be read: {job.trouble}"
    if job.stopped_at is not None:
        yield f"  all ranks stopped after step {job.stopped_at}; to go on: rlmesh launch --run-dir {job.run_dir} …"
    yield from _restart_lines(job.restarts, time.time())
    by_role: dict[str, list[str]] = {}
    for name, state in job.members:
        by_role.setdefault(name.rpartition(":")[0], []).append(state)
    for role, states in by_role.items():
        yield f"  {role}  {_counted(states)}"
    yield from _failure_lines(job.failures)
    if incident := newest_incident(Path(job.run_dir)):
        yield f"  incident: {incident}"
    yield from (f"  {line}" for line in job.alarms)


def _failure_lines(failures: Iterable[str]) -> Iterator[str]:
    for number, text in enumerate(failures):
        first, *more = text.splitlines() or [""]
        yield f"  {'first cause' if number == 0 else 'then'}: {first}"
        yield from (f"    {line}" for line in more[:20])
