"""Numbers in the answers of language models, read exactly: signs, currency, thousands, decimals and fractions."""

from __future__ import annotations

import re
from fractions import Fraction

__all__ = ["first_number", "last_number", "to_fraction"]

# The parts of a number, in order: sign, currency, sign after the currency, digits, denominator. Unicode's minus signs
# count as minus.
_SIGN = r"[-+\u2212\u2013]?"
_DIGITS = r"(?:\d+(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = rf"(?P<sign>{_SIGN})\s?\\?[$€£]?\s?(?P<sign2>{_SIGN})(?P<digits>{_DIGITS})(?:\s?/\s?(?P<under>\d+))?"

_AT_START = re.compile(rf"[\s*_(\[]*{_NUMBER}")
# A sign that follows a word or a number is an operator: 10-3 holds 10 and 3.
_ANYWHERE = re.compile(rf"(?<![\w.,]){_NUMBER}|(?P<digits2>{_DIGITS})")


def first_number(text: str) -> Fraction | None:
    """The number at the beginning of ``text``, after white space and emphasis marks; ``None`` if there is none."""
    found = _AT_START.match(text)
    return None if found is None else _value(found)


def last_number(text: str) -> Fraction | None:
    """The last number in ``text``; ``None`` if there is none."""
    end = max(text.rfind(digit) for digit in "0123456789")
    last = None
    # Numbers of more than a thousand digits are no answers, so a window before the last digit is enough.
    for last in _ANYWHERE.finditer(text, max(0, end - 4000), end + 1):  # noqa: B007 - the last one is wanted
        pass
    return None if last is None else _value(last)


def to_fraction(answer: object) -> Fraction:
    """The number in a data set's answer.

    Args:
        answer: a number, or a text that is one.

    Raises:
        ValueError: it is no number.
    """
    if isinstance(answer, bool) or answer is None:
        raise ValueError(f"the ground truth must be a number, got {answer!r}")
    if isinstance(answer, float):
        return Fraction(repr(answer))
    text = str(answer).strip()
    found = _AT_START.match(text)
    if found is None or text[found.end() :].strip(" .%"):
        raise ValueError(f"the ground truth must be a number, got {answer!r}")
    value = _value(found)
    if value is None:
        raise ValueError(f"the ground truth must be a number, got {answer!r}")
    return value


def _value(found: re.Match[str]) -> Fraction | None:
    parts = found.groupdict()
    digits = parts["digits"] or parts.get("digits2")
    if digits is None or len(digits) > 1000:  # no answer is that long, and converting it takes quadratic time
        return None
    value = Fraction(digits.replace(",", ""))
    if parts["under"]:
        under = int(parts["under"][:1000])
        if not under:
            return None
        value /= under
    negative = (parts["sign"] or parts["sign2"] or "+") not in "+"
    return -value if negative else value
