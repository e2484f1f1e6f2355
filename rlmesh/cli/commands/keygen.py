"""``rlmesh keygen FILE``: creates the key of a job, for nodes and services that get it by hand."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rlmesh.cli.job_choice import as_command
from rlmesh.runtime.connections.security import KEY_VARIABLE, write_key_file

DESCRIPTION = (
    "Write a new key to FILE, which must not exist yet and which only its owner can read. Whoever has the key of a job "
    f"can run code in its processes. Jobs take the key by --key-file or by the environment variable {KEY_VARIABLE}."
)


def add_to(commands: Any) -> None:
    """Add the command to ``rlmesh``'s subparsers."""
    parser = commands.add_parser("keygen", help="create a job's key", description=DESCRIPTION)
    parser.add_argument("file", metavar="FILE", type=Path, help="the file to write")
    parser.set_defaults(run=as_command("keygen", run))


def run(options: argparse.Namespace) -> int:
    """Write the file and return the exit code. The key is never printed."""
    write_key_file(options.file)
    print(f"wrote {options.file}; use it by --key-file {options.file}")
    return 0
