"""``rlmesh doctor``: checks whether this machine is fit for jobs, and says what to do if it is not."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

from rlmesh.agent.machine_checks import MachineCheck, gather, judge
from rlmesh.cli.job_choice import as_command

_MARKS = {"ok": "ok     ", "warning": "warning", "failed": "FAILED "}


def add_to(commands: Any) -> None:
    """Add the command to ``rlmesh``'s subparsers."""
    parser = commands.add_parser(
        "doctor", help="check whether this machine is fit for jobs", description="Check this machine, and say how to "
        "repair each fault. The exit code is 1 if a job could not run."
    )  # fmt: skip
    parser.set_defaults(run=as_command("doctor", show))


def show(options: argparse.Namespace) -> int:
    """Print the checks and return the exit code."""
    checks = judge(gather())
    print("\n".join(lines(checks)))
    return int(any(check.verdict == "failed" for check in checks))


def lines(checks: Iterable[MachineCheck]) -> Iterator[str]:
    """One line per check, and the advice below each check that is not ok."""
    for check in checks:
        yield f"{_MARKS[check.verdict]}  {check.name:<11}  {check.text}"
        if check.verdict != "ok":
            yield f"         {'':<11}  → {check.advice}"
