"""Conversion of reported numbers without loss of digits. No I/O."""

from __future__ import annotations

import operator
from typing import Any

from rlmesh.errors import UsageError

__all__ = ["as_number", "as_step"]

MOST_STEP = 2**63 - 1
"""TensorBoard and the job's store count steps in 64 bits."""


def as_number(member: str, key: str, value: Any) -> float:
    """Return ``value`` as an exact int if its type is a whole number, else as a float.

    Ints of Python, NumPy and torch stay ints, because a float is exact up to 2**53 only; True is 1.

    Raises:
        UsageError: the value is not a number, or no float can approximate it.
    """
    try:
        plain = value.detach() if getattr(value, "requires_grad", False) else value  # avoids a warning of torch
        try:
            number: float = operator.index(plain)
            float(number)
        except TypeError:
            number = float(plain)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UsageError(
            f"{member}: report() got {key}={_shown(value)} ({type(value).__name__}), which is not a number "
            f"({error}). Report one number per metric, for example loss=loss.mean()."
        ) from None
    return number


def as_step(member: str, step: Any) -> int:
    """Return ``step`` as an int.

    Raises:
        UsageError: the step is not a whole number, or does not fit into 64 bits.
    """
    number = as_number(member, "step", step)
    if number % 1 != 0:  # NaN and infinity too
        raise UsageError(f"{member}: step={_shown(step)}: a step is a whole number; it counts what was done")
    if not -MOST_STEP - 1 <= number <= MOST_STEP:
        raise UsageError(f"{member}: step={_shown(step)}: a step has at most 64 bits")
    return int(number)


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except ValueError as error:  # Python does not print ints of thousands of digits
        return f"a value that cannot be shown ({error})"
