"""``rlmesh doctor``: whether this machine is fit for jobs, and what to do where it is not."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

from rlmesh.agent.machine_checks import MachineCheck, gather, judge
from rlmesh.cli.job_choice import told

_MARKS = {"ok": "ok     ", "warning": "warning", "failed": "FAILED "}


def add_to(commands: Any) -> None:
    """Add the command to ``rlmesh``'s subparsers."""
    parser = commands.add_parser(
        "doctor", help="check whether this machine is fit for jobs", description="Check this machine, and say what to "
        "do about each thing that is not right. The exit code is 1 if a job could not run."
    )  # fmt: skip
    parser.set_defaults(run=told("doctor", show))


def show(options: argparse.Namespace) -> int:
    """Print the checks and return the exit code."""
    checks = judge(gather())
    print("\n".join(lines(checks)))
    return int(any(check.verdict == "failed" for check in checks))


def lines(checks: Iterable[MachineCheck]) -> Iterator[str]:
    """One line per check, and what to do under those that are not ok."""
    for check in checks:
        yield f"{_MARKS[check.verdict]}  {check.name:<11}  {check.text}"
        if check.verdict != "ok":
            yield f"         {'':<11}  → {check.advice}"
