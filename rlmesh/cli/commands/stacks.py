"""``rlmesh stacks [ROLE[:RANK]]``: prints what each thread of each member is doing, also of members that hang."""

from __future__ import annotations

import argparse
from typing import Any

from rlmesh.cli.job_choice import add_job_argument, as_command, asking, checked, find_running, say

TIMEOUT_S = 30.0


def add_to(commands: Any) -> None:
    """Add the command to ``rlmesh``'s subparsers."""
    parser = commands.add_parser(
        "stacks",
        help="print what each thread of each member is doing",
        description="Print the Python stacks of all threads of all members, innermost call first. It works for members "
        "that hold the interpreter's lock or wait in C, and changes nothing in them.",
    )
    parser.add_argument("who", metavar="ROLE[:RANK]", nargs="?", help="one role or one member (default: all)")
    add_job_argument(parser, option=True)
    parser.set_defaults(run=as_command("stacks", show))


def show(options: argparse.Namespace) -> int:
    """Print the stacks and return the exit code."""
    job = find_running(options.job)
    with asking(job, TIMEOUT_S) as master:
        found: dict[str, str] = master.call("stacks").result()
    for name in checked(list(found), options.who):
        say(f"=== {found[name]}")
    return 0
