"""Command line options of an example, with limits.

All faults of a command line are reported together, before any process of the job starts. The module has no torch, since
the submitter imports it too.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn


@dataclass(frozen=True)
class Limits:
    """Allowed values of a setting: ``least`` and ``most`` are included, ``above`` is not."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()

    def fault(self, value: Any) -> str:
        """The reason why ``value`` is not allowed; empty if it is."""
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


class SettingsParser(argparse.ArgumentParser):
    """A parser that collects all faults instead of exiting at the first.

    ``check`` gets all values, once each is valid by itself, and returns faults of their combination.
    """

    def __init__(self, *args: Any, check: Callable[[argparse.Namespace], Sequence[str]] | None = None, **kw: Any):
        super().__init__(*args, allow_abbrev=False, **kw)
        self._check = check
        self._faults: list[str] = []

    def add_setting(self, parser: Any, name: str, default: Any, limits: Limits, help: str = "") -> None:
        """Add the option ``--name`` to this parser or one of its groups."""
        of = type(default)
        if of is bool:
            parser.add_argument(f"--{name}", default=default, help=help, action=argparse.BooleanOptionalAction)
        else:
            parser.add_argument(f"--{name}", default=default, help=help, metavar=name.upper(), type=self._reader(
                name, of, default, limits))  # fmt: skip

    def _reader(self, name: str, of: type[Any], default: Any, limits: Limits) -> Callable[[str], Any]:
        def read(text: str) -> Any:
            try:
                value = of(text)
                fault = limits.fault(value)
            except ValueError:
                value, fault = default, f"it is {'a whole number' if of is int else 'a number'}"
            if fault:
                self._faults.append(f"--{name} {text}: {fault}")
                return default
            return value

        return read

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the command line; exits with code 2 and a list of all faults if there are any."""
        self._faults = []
        parsed, left = self.parse_known_args(_joined(sys.argv[1:] if args is None else args), namespace)
        names = [name for name in self._option_string_actions if name.startswith("--")]
        for word in left:
            name = word.partition("=")[0]
            if word.startswith("-"):
                self._faults.append(f"{name}: there is no such option" + _nearest(name, names))
            elif not (left.index(word) and left[left.index(word) - 1].startswith("-")):  # else an option's value
                self._faults.append(f"{word}: there are options only, no words beside them")
        if not self._faults and self._check is not None:
            self._faults += self._check(parsed)
        if self._faults:
            self._exit()
        return parsed

    def error(self, message: str) -> NoReturn:
        """Exit with all faults and one of ``argparse`` itself, such as an option without its value."""
        self._faults.append(message)
        self._exit()

    def _exit(self) -> NoReturn:
        count = len(self._faults)
        head = "an option is wrong" if count == 1 else f"{count} options are wrong"
        lines = "".join(f"\n  {fault}" for fault in self._faults)
        self.exit(2, f"{self.prog}: {head}, and nothing was started:{lines}\n--help lists all options\n")


def _joined(words: Sequence[str]) -> list[str]:
    """Join ``--lr -1e-3`` into one word, since argparse would take the number for an option."""
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
