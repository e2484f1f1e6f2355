"""``rlmesh chaos [JOB] --kill ROLE[:RANK] --at-step N``: rehearse the failure of a running job."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from rlmesh.cli.job_choice import add_job_argument, as_command, asking, find_running, say
from rlmesh.cli.quantities import count, positive, seconds
from rlmesh.errors import CallError, UsageError
from rlmesh.master.chaos_plan import parse_kill
from rlmesh.run_directory.discovery import RunningJob

POLL_S = 0.2
DESCRIPTION = """\
Kill a member of a running job, its master or an agent, at a chosen moment, and see whether the job does what its
restart policy says. Without a moment the kill is at once. The same kills can be given to a job at its start:
rlmesh launch --chaos REWARD:0@step=5 JOB.py
"""


def add_to(commands: Any) -> None:
    """Add the command to ``rlmesh``'s subparsers."""
    parser = commands.add_parser("chaos", help="rehearse the failure of a running job", description=DESCRIPTION)
    add_job_argument(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--kill", metavar="ROLE[:RANK]", help="the member to kill; also master, agent or agent:NODE")
    what.add_argument("--random", type=positive, metavar="KILLS", help="kill this many members, drawn by --seed")
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--at-step", type=count, metavar="N", help="when step N has been reported")
    when.add_argument("--at-call", metavar="[ROLE.]METHOD", help="when the method begins")
    when.add_argument("--at-shutdown", action="store_true", help="when the job begins to end")
    parser.add_argument("--signal", default="KILL", help="the signal (default KILL; STOP makes the process hang)")
    parser.add_argument("--seed", type=int, help="seed of --random (default 0)")
    parser.add_argument("--within", type=seconds, metavar="S", help="seconds for all kills of --random (default 30)")
    parser.set_defaults(run=as_command("chaos", run))


def run(options: argparse.Namespace) -> int:
    """Order the kills from the job's master, wait until they have happened, and return the exit code."""
    text = kill_text(options)
    job = find_running(options.job)
    try:
        return rehearse(job, text, say)
    except KeyboardInterrupt:
        print("rlmesh chaos: kills that have not happened yet may still happen", file=sys.stderr)
        raise


def kill_text(options: argparse.Namespace) -> str:
    """The options as a kill's text.

    Raises:
        UsageError: the options are not a valid kill.
    """
    if options.random is not None:
        if options.at_step is not None or options.at_call or options.at_shutdown or options.signal != "KILL":
            raise UsageError(
                "--at-step, --at-call, --at-shutdown and --signal are for --kill: --random draws the moments"
            )
        seed, within = options.seed or 0, 30.0 if options.within is None else options.within
        return f"random:seed={seed},kills={options.random},within={within:g}"
    if options.seed is not None or options.within is not None:
        raise UsageError("--seed and --within are for --random")
    point = "now"
    if options.at_step is not None:
        point = f"step={options.at_step}"
    elif options.at_call:
        point = f"call={options.at_call}"
    elif options.at_shutdown:
        point = "shutdown"
    text = f"{options.kill}@{point}+{options.signal}"
    parse_kill(text)
    return text


def rehearse(job: RunningJob, text: str, tell: Callable[[str], None]) -> int:
    """Order the kills and wait for them; return 0 when they happened, 1 if the job ended before.

    Raises:
        UsageError: the job has no such member.
        CallError: the master does not answer.
    """
    with asking(job) as master:
        waiting = list(master.call("rehearse", (text,)).result())
        for kill in waiting:
            tell(f"to come: {kill}")
        while waiting:
            try:
                _, left, cannot = master.call("rehearsed").result()
            except CallError:  # the master is gone
                own = [kill for kill in waiting if kill.startswith(("master", "agent"))]
                tell("\n".join(f"happened: {kill}" for kill in own) or "the job has ended before it happened")
                return 0 if own == waiting else 1
            for kill in [kill for kill in waiting if kill not in left]:
                waiting.remove(kill)
                if kill in cannot:
                    tell(f"cannot happen: {cannot[kill]}")
                    return 1
                tell(f"happened: {kill}")
            if waiting:
                time.sleep(POLL_S)
    return 0
