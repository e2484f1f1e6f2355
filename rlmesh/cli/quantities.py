"""Quantities on command lines, for argparse."""

from __future__ import annotations

import argparse
import math

from rlmesh.runtime.argument_types import MOST_S


def seconds(text: str) -> float:
    """Parse a time that can be waited for: not negative, and not beyond any clock.

    Raises:
        argparse.ArgumentTypeError: the text is not such a number.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= MOST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def count(text: str) -> int:
    """Parse a whole number of at least 0.

    Raises:
        argparse.ArgumentTypeError: the text is not such a number.
    """
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def positive(text: str) -> int:
    """Parse a whole number of at least 1.

    Raises:
        argparse.ArgumentTypeError: the text is not such a number.
    """
    if not (text.isascii() and text.isdigit()) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
