"""Splits a command line at the script: rlmesh's words before it, the script's after it. No I/O."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rlmesh.errors import UsageError
from rlmesh.job.nearest_name import did_you_mean

__all__ = ["split_at_script"]


def split_at_script(words: Sequence[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[str], list[str]]:
    """Split into the parser's options, the script (one word, or none), and the script's arguments: all words after it,
    except one ``--`` directly after it.

    Raises:
        UsageError: an option before the script is unknown to the parser.
    """
    options = parser._option_string_actions
    rest = list(words)
    own: list[str] = []
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        word = rest.pop(0)
        own.append(word)
        name, equals, _ = word.partition("=")
        action = options.get(name)
        if action is None and not word.startswith("--"):
            action = options.get(word[:2])
            equals = word[2:]  # -r3
        if action is None:
            known = [option for option in options if option.startswith("--") == name.startswith("--")]
            raise UsageError(f"unknown option {name}.{did_you_mean(name, known)} Options of the script stand behind it")
        if action.nargs != 0 and not equals and rest:
            own.append(rest.pop(0))
    if rest[:1] == ["--"]:
        rest.pop(0)
    script, rest = rest[:1], rest[1:]
    return own, script, rest[1:] if rest[:1] == ["--"] else rest
