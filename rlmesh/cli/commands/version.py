"""``rlmesh version``: prints the versions of rlmesh and Python."""

from __future__ import annotations

import argparse
import platform
from typing import Any

import rlmesh


def add_to(commands: Any) -> None:
    """Add the command to ``rlmesh``'s subparsers."""
    parser = commands.add_parser("version", help="print the versions of rlmesh and Python", description=__doc__)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, rest: list[str]) -> int:
    """Print one line."""
    print(f"rlmesh {rlmesh.__version__} (Python {platform.python_version()})")
    return 0
