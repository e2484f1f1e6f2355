"""``rlmesh timeline [JOB] -o trace.json``: writes a job's members, steps and calls as a trace for Perfetto."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rlmesh.cli.job_choice import add_job_argument, as_command, check_run, find_any
from rlmesh.cli.output_file import write_output
from rlmesh.observe.files.event_log import EVENTS_FILE
from rlmesh.observe.timeline import read_trace

DESCRIPTION = """\
Write the history of a job, running or ended, as a trace that https://ui.perfetto.dev and chrome://tracing open:
the life of each member, its steps, and, if it was launched with --timeline, its calls, with arrows to where they ran.
JOB may also be a run directory.
"""


def add_to(commands: Any) -> None:
    """Add the command to ``rlmesh``'s subparsers."""
    parser = commands.add_parser("timeline", help="write a job as a trace for Perfetto", description=DESCRIPTION)
    add_job_argument(parser)
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("trace.json"), metavar="FILE", help="default trace.json"
    )
    parser.set_defaults(run=as_command("timeline", write))


def write(options: argparse.Namespace) -> int:
    """Write the file, print what it has, and return 0."""
    run_dir = _run_dir(options.job)
    check_run(run_dir)
    trace = read_trace(run_dir)
    write_output(options.output, json.dumps(trace, separators=(",", ":")))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    calls = sum(event["cat"] in ("call", "sync") for event in slices)
    steps = sum(event["cat"] == "step" for event in slices)
    print(f"{options.output}: {calls} calls, {steps} steps of {run_dir}; open it at https://ui.perfetto.dev")
    if not calls:
        print("no calls were traced: launch with --timeline to see them")
    return 0


def _run_dir(job: str | None) -> Path:
    if job is not None and (Path(job) / EVENTS_FILE).is_file():
        return Path(job)
    return Path(find_any(job).run_dir)
