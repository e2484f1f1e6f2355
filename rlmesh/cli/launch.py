"""``rlmesh launch JOB.py``: runs a script that submits a job, in this process, as ``python JOB.py`` would.

What it adds: options for the jobs that the script submits, and errors that people can read.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

from rlmesh.errors import JobFailed, RLMeshError, UsageError
from rlmesh.job.restarts import SCOPES
from rlmesh.master.options import LaunchOptions, ambient
from rlmesh.runtime.security import KEY_VARIABLE, find_key

DESCRIPTION = "Run a script that submits a job. What stands after -- is for the script."
VIEWS = ("auto", "live", "plain", "none")


def add_to(commands: Any) -> None:
    """Add the command to ``rlmesh``'s subparsers."""
    parser = commands.add_parser(
        "launch",
        help="run a script that submits a job",
        description=DESCRIPTION,
        usage="rlmesh launch [options] JOB.py [-- script arguments]",
    )
    parser.add_argument("job", metavar="JOB.py", help="the script; it calls submit() on a job")
    parser.add_argument(
        "--view",
        choices=VIEWS,
        help="how progress is shown: live on a terminal, plain lines elsewhere (auto, the default), or not at all",
    )
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="folder of logs, metrics and report")
    parser.add_argument(
        "--restart",
        choices=SCOPES,
        help="what is started again when a member dies, whatever the job says (never: the job fails)",
    )
    parser.add_argument(
        "--key-file",
        type=Path,
        metavar="FILE",
        help=f"the job's key, made by rlmesh keygen (default: the file that {KEY_VARIABLE} names, else a new key)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, rest: list[str]) -> int:
    """Run the script and return the exit code."""
    script = Path(options.job)
    if not script.is_file():
        print(f"rlmesh launch: there is no script {script} (in {os.getcwd()})", file=sys.stderr)
        return 2
    try:
        key = find_key(options.key_file) if options.key_file or os.environ.get(KEY_VARIABLE) else None
    except UsageError as error:
        print(f"rlmesh launch: {error}", file=sys.stderr)
        return 2
    launch_options = LaunchOptions(view=options.view, restart=options.restart, run_dir=options.run_dir, key=key)
    with ambient(launch_options):
        return run_script(script, rest)


def run_script(script: Path, arguments: list[str]) -> int:
    """Run ``script`` as ``__main__`` and turn its end into an exit code; errors are told on stderr."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        return _code_of(error)
    except KeyboardInterrupt as error:
        print(f"rlmesh: {error or 'stopped'}", file=sys.stderr)
        return 130
    except JobFailed as error:
        print(tell_failure(error), file=sys.stderr)
        return 1
    except RLMeshError as error:
        print(f"rlmesh: {type(error).__name__} ({error.code}): {error}", file=sys.stderr)
        return 1
    except Exception as error:
        _tell_script_error(error, script)
        return 1
    finally:
        sys.argv, sys.path[:] = argv, path
    return 0


def tell_failure(error: JobFailed) -> str:
    """A failed job for people: the first cause with its last log lines, then what followed, then where to look."""
    first, *others = error.exceptions
    lines = ["", f"{error.message.partition(' failed: ')[0]} failed. First cause:", _indented(str(first))]
    if others:
        lines.append("What followed:")
        lines += [_indented(str(other).splitlines()[0]) for other in others]
    lines.append(f"Logs and metrics: {error.run_dir}")
    return "\n".join(lines)


def _indented(text: str) -> str:
    return "\n".join("  " + line for line in text.splitlines())


def _code_of(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _tell_script_error(error: Exception, script: Path) -> None:
    """The script's own traceback, without the frames that ran it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != str(script):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace or error.__traceback__, file=sys.stderr)
