"""``rlmesh prepare SET --from PATH --to DIR``: converts well-known data sets to parquet files for training."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rlmesh.cli.job_choice import as_command
from rlmesh.errors import UsageError

NAMES = ("gsm8k", "math", "hellaswag", "hh_rlhf")


def add_to(commands: Any) -> None:
    """Add the command to ``rlmesh``'s subparsers."""
    parser = commands.add_parser(
        "prepare",
        help="create the parquet files of a well-known data set",
        description="Convert the usual files of a data set (parquet, JSON lines or JSON, one per split) to parquet "
        "files with the columns prompt, data_source, reward_model and extra_info. Nothing is downloaded.",
    )
    parser.add_argument("name", metavar="SET", choices=NAMES, help=", ".join(NAMES))
    parser.add_argument(
        "--from", dest="source", metavar="PATH", type=Path, required=True, help="file or folder to read"
    )
    parser.add_argument("--to", dest="target", metavar="DIR", type=Path, required=True, help="folder to write to")
    parser.set_defaults(run=as_command("prepare", run))


def run(options: argparse.Namespace) -> int:
    """Write the files and return the exit code."""
    try:
        from rlmesh.rl.data.prepare import prepare

        found = prepare(options.name, options.source, options.target)
    except ImportError as error:
        raise UsageError(f"{error}; pip install 'rlmesh[data,torch]'") from error
    for split, count in found.items():
        said = f"{count} rows" if count else "not written, since its rows have no right answers"
        print(f"{options.target / split}.parquet: {said}")
    return 0
