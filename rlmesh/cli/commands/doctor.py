"""``rlmesh doctor``: checks whether this machine is fit for jobs; ``rlmesh doctor RUN`` names a run's bottleneck."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rlmesh.agent.machine_checks import MachineCheck, gather, judge
from rlmesh.cli.job_choice import as_command, check_run, find_any
from rlmesh.errors import UsageError
from rlmesh.observe.views.safe_text import shown

_MARKS = {"ok": "ok     ", "warning": "warning", "failed": "FAILED "}
LAST_STEPS = 50
DESCRIPTION = """Without RUN: check this machine, and say how to repair each fault; the exit code is 1 if a job could
not run. With RUN, a training of a language model that runs or has ended: name the part of a step that takes most of the
time, and the one setting to change."""


def add_to(commands: Any) -> None:
    """Add the command to ``rlmesh``'s subparsers."""
    parser = commands.add_parser(
        "doctor", help="check this machine, or name the bottleneck of a run", description=DESCRIPTION
    )
    parser.add_argument("job", metavar="RUN", nargs="?", help="a run directory, or the id or name of a job")
    parser.add_argument(
        "--last", metavar="N", type=int, default=LAST_STEPS, help=f"of RUN: look at the last N steps ({LAST_STEPS})"
    )
    parser.set_defaults(run=as_command("doctor", show))


def show(options: argparse.Namespace) -> int:
    """Print the checks or the diagnosis, and return the exit code."""
    if options.job is not None:
        return _show_run(options)
    checks = judge(gather())
    print("\n".join(lines(checks)))
    return int(any(check.verdict == "failed" for check in checks))


def lines(checks: Iterable[MachineCheck]) -> Iterator[str]:
    """One line per check, and the advice below each check that is not ok."""
    for check in checks:
        yield f"{_MARKS[check.verdict]}  {check.name:<11}  {check.text}"
        if check.verdict != "ok":
            yield f"         {'':<11}  → {check.advice}"


def _show_run(options: argparse.Namespace) -> int:
    if options.last < 1:
        raise UsageError(f"--last {options.last} must be ≥ 1")
    run_dir = Path(options.job) if Path(options.job).is_dir() else Path(find_any(options.job).run_dir)
    check_run(run_dir)
    try:
        from rlmesh.rl.evaluation.saved_run import load_saved_run
        from rlmesh.rl.reading.diagnosis import diagnose
        from rlmesh.rl.reading.steps import read_steps
    except ImportError as error:
        raise UsageError(f"{error}; pip install 'rlmesh[torch,data,rewards]'") from error
    steps = read_steps(run_dir)
    settings, unknown = None, []
    try:
        settings = load_saved_run(run_dir)
    except UsageError as error:
        unknown = [f"also: the settings of the run are unknown ({error})"]
    # One step more: the first of several is left out.
    found = diagnose(steps[-options.last - 1 :], settings)
    # Printed without masking of secrets, which would hide settings such as token_budget.
    print(shown("\n".join([f"{run_dir}: {found}", *unknown, *_alarms(run_dir)]), lines=True))
    return 0


def _alarms(run_dir: Path) -> Iterator[str]:
    for path in sorted(run_dir.glob("reward-alarm-*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            yield f"also: reward alarm ({content['kind']}) at step {content['step']}: {content['why']}; {path}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            yield f"also: {path} cannot be read: {error}"
