"""Settings of an example: fields of a frozen dataclass, each with an option on its script's command line.

What is wrong with a command line is told at once, all of it, before any process of the job starts. No torch here: the
submitter imports this too.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn, TypeVar

S = TypeVar("S")


@dataclass(frozen=True)
class Limits:
    """What a setting may be: ``least`` and ``most`` are allowed themselves, ``above`` is not."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()

    def fault(self, value: Any) -> str:
        """Why ``value`` is none; empty if it is one."""
        if isinstance(value, float) and not math.isfinite(value):
            return "it is a finite number"
        if self.choices and value not in self.choices:
            return f"it is one of {', '.join(self.choices)}" + _nearest(str(value), self.choices)
        if self.least is not None and value < self.least:
            return f"it is at least {self.least:g}"
        if self.above is not None and value <= self.above:
            return f"it is above {self.above:g}"
        if self.most is not None and value > self.most:
            return f"it is at most {self.most:g}"
        return ""


def setting(default: Any, help: str, **limits: Any) -> Any:
    """A field of the dataclass, with its `Limits`."""
    return field(default=default, metadata={"help": help, "limits": Limits(**limits)})


class SettingsParser(argparse.ArgumentParser):
    """A parser that collects what is wrong instead of ending at the first of it.

    ``check`` looks at all values together, once each is right by itself, and gives what is wrong with them.
    """

    def __init__(self, *args: Any, check: Callable[[argparse.Namespace], Sequence[str]] | None = None, **kw: Any):
        super().__init__(*args, allow_abbrev=False, **kw)
        self._check = check
        self._wrong: list[str] = []

    def add_setting(self, parser: Any, name: str, default: Any, limits: Limits, help: str = "") -> None:
        """Add the option ``--name`` to this parser or to a group of it."""
        of = type(default)
        if of is bool:
            parser.add_argument(f"--{name}", default=default, help=help, action=argparse.BooleanOptionalAction)
        else:
            parser.add_argument(f"--{name}", default=default, help=help, metavar=name.upper(), type=self._reader(
                name, of, default, limits))  # fmt: skip

    def add_settings(self, parser: Any, kind: type[Any]) -> None:
        """An option for each field of a dataclass."""
        for each in fields(kind):
            self.add_setting(parser, each.name, each.default, each.metadata["limits"], each.metadata["help"])

    def _reader(self, name: str, of: type[Any], default: Any, limits: Limits) -> Callable[[str], Any]:
        def read(text: str) -> Any:
            try:
                value = of(text)
                fault = limits.fault(value)
            except ValueError:
                value, fault = default, f"it is {'a whole number' if of is int else 'a number'}"
            if fault:
                self._wrong.append(f"--{name} {text}: {fault}")
                return default
            return value

        return read

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """What was given.

        Exits with code 2 and a list of all faults if something is wrong.
        """
        self._wrong = []
        parsed, left = self.parse_known_args(_joined(sys.argv[1:] if args is None else args), namespace)
        names = [name for name in self._option_string_actions if name.startswith("--")]
        for word in left:
            name = word.partition("=")[0]
            if word.startswith("-"):
                self._wrong.append(f"{name}: there is no such option" + _nearest(name, names))
            elif not (left.index(word) and left[left.index(word) - 1].startswith("-")):  # else it is that one's value
                self._wrong.append(f"{word}: there are options only, no words beside them")
        if not self._wrong and self._check is not None:
            self._wrong += self._check(parsed)
        if self._wrong:
            self._tell()
        return parsed

    def error(self, message: str) -> NoReturn:
        """Exit with what ``argparse`` itself cannot read, such as an option without its value, and all else."""
        self._wrong.append(message)
        self._tell()

    def _tell(self) -> NoReturn:
        count = len(self._wrong)
        head = "an option is wrong" if count == 1 else f"{count} options are wrong"
        lines = "".join(f"\n  {fault}" for fault in self._wrong)
        self.exit(2, f"{self.prog}: {head}, and nothing was started:{lines}\n--help lists all options\n")


def settings_of(args: argparse.Namespace, kind: type[S]) -> S:
    """What was given on the command line."""
    return kind(**{each.name: getattr(args, each.name) for each in fields(kind)})  # type: ignore[arg-type]


def _joined(words: Sequence[str]) -> list[str]:
    """``--lr -1e-3`` as one word: argparse takes the number for an option."""
    joined: list[str] = []
    for word in words:
        number = re.fullmatch(r"-(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|-inf|-nan", word)
        if number and joined and re.fullmatch(r"--\w+", joined[-1]):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _nearest(name: str, valid: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, valid, n=1)
    return f". Did you mean {near[0]}?" if near else ""
