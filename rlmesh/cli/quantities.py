"""Quantities on command lines, for argparse."""

from __future__ import annotations

import argparse
import math

from rlmesh.runtime.argument_types import MOST_S


def seconds(text: str) -> float:
    """A time that can be waited: not negative, and none that no clock counts to.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= MOST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return value


def count(text: str) -> int:
    """A whole number, not negative.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 0")
    return int(text)


def positive(text: str) -> int:
    """A whole number of at least 1.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not (text.isascii() and text.isdigit()) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)
