"""Settings of an example: fields of a frozen dataclass, each with an option on its script's command line.

No torch here: the submitter imports this too.
"""

from __future__ import annotations

import argparse
from dataclasses import field, fields
from typing import Any, TypeVar

S = TypeVar("S")


def setting(default: Any, help: str) -> Any:
    """A field of the dataclass."""
    return field(default=default, metadata={"help": help})


def add_settings(parser: Any, kind: type[Any]) -> None:
    """An option for each field, on a parser or a group of one."""
    for each in fields(kind):
        of, help = type(each.default), each.metadata["help"]
        how = {"action": argparse.BooleanOptionalAction} if of is bool else {"type": of}
        parser.add_argument(f"--{each.name}", default=each.default, help=help, **how)


def settings_of(args: argparse.Namespace, kind: type[S]) -> S:
    """What was given on the command line."""
    return kind(**{each.name: getattr(args, each.name) for each in fields(kind)})  # type: ignore[arg-type]
