"""``rlmesh replay RUN --step N``: computes a recorded step again, and compares."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rlmesh.cli.job_choice import as_command, check_run
from rlmesh.errors import UsageError
from rlmesh.observe.views.safe_text import shown

DESCRIPTION = """Compute a step of a training again, in this process, from the checkpoint before it and the recorded
samples, and print its loss and metrics beside the recorded ones. On CPUs, in float32, with one thread and one rank they
have the same bits. Nothing is written into RUN. Exit code 0: the same numbers; 1: they differ."""


def add_to(commands: Any) -> None:
    """Add the command to ``rlmesh``'s subparsers."""
    parser = commands.add_parser("replay", help="compute a recorded step again", description=DESCRIPTION)
    parser.add_argument("folder", metavar="RUN", type=Path, help="a run directory")
    parser.add_argument("--step", metavar="N", type=int, required=True, help="the step to compute, from 1 on")
    parser.set_defaults(run=as_command("replay", run))


def run(options: argparse.Namespace) -> int:
    """Compute the step; return the exit code."""
    if not options.folder.is_dir():
        raise UsageError(f"there is no run directory {options.folder}")
    check_run(options.folder)
    try:
        from rlmesh.rl.evaluation.saved_run import load_saved_run
        from rlmesh.rl.reading.replay import replay
    except ImportError as error:
        raise UsageError(f"{error}; pip install 'rlmesh[torch,data,rewards]'") from error
    found = replay(options.folder, load_saved_run(options.folder), options.step)
    # Printed without masking of secrets, which would hide metrics such as response_tokens.
    print(shown(str(found), lines=True))
    return int(not found.equal)
