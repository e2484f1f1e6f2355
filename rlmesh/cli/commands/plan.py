"""``rlmesh plan JOB.py``: prints where the members of a job would run; starts nothing."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rlmesh.cli.commands.launch import run_script
from rlmesh.driver.options import LaunchOptions, ambient
from rlmesh.errors import JobSpecError, PlacementError, UsageError

if TYPE_CHECKING:
    from rlmesh.job.description.config import JobDescription

DESCRIPTION = """Print where the members of a job would run, without starting anything. The script runs until it
submits a job. Exit code 0: the job fits; 1: it does not, and the missing resources are printed; 2: wrong usage."""


def add_to(commands: Any) -> None:
    """Add the command to ``rlmesh``'s subparsers."""
    parser = commands.add_parser(
        "plan",
        help="print where a job's members would run",
        description=DESCRIPTION,
        usage="rlmesh plan [options] JOB.py [script arguments]",
        allow_abbrev=False,
    )
    parser.add_argument("job", metavar="JOB.py", help="the script; it calls submit() on a job")
    parser.add_argument(
        "--cluster", type=Path, metavar="FILE", help="TOML file that describes a cluster (default: this machine)"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, rest: list[str]) -> int:
    """Plan the job that the script submits; return the exit code."""
    script = Path(options.job)
    if not script.is_file():
        print(f"rlmesh plan: there is no script {script}", file=sys.stderr)
        return 2
    asked: list[int] = []

    def preview(config: JobDescription, job_name: str) -> NoReturn:
        asked.append(show(config, job_name, options.cluster, as_json=options.json))
        raise SystemExit(asked[-1])

    with ambient(LaunchOptions(preview=preview)):
        code = run_script(str(script), rest)
    if not asked and code == 0:
        print(f"rlmesh plan: {script} submitted no job", file=sys.stderr)
        return 1
    return asked[-1] if asked else code


def show(config: JobDescription, job_name: str, cluster: Path | None, *, as_json: bool) -> int:
    """Print the plan of a job, or why there is none; return the exit code."""
    from rlmesh.placement.describe import describe_plan, plan_values
    from rlmesh.placement.preview import plan_job

    try:
        config.check()
        plan = plan_job(config, cluster)
    except UsageError as error:
        print(f"rlmesh plan: {error}", file=sys.stderr)
        return 1 if isinstance(error, JobSpecError) else 2
    except PlacementError as error:
        print(f"{job_name}: {error}", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps({"job": job_name, **plan_values(plan)}, indent=1))
    else:
        print(f"{job_name}: {describe_plan(plan)}")
    return 0
