"""Checks of the results of batch methods: a sequence, an array or a tensor with one result per item."""

from __future__ import annotations

from collections import UserString
from collections.abc import Sequence, Set
from typing import Any

_TEXT = (str, bytes, bytearray, UserString)


def what_is_wrong(value: Any, wanted: int) -> str:
    """The reason why a value is not ``wanted`` results, in words that follow "returned"; empty if it is.

    The keys of a dict, the letters of a text, the fields of a record and the columns of a table do not count as
    results, even if their number fits.
    """
    cls = type(value)
    if hasattr(cls, "_fields") or hasattr(cls, "n_fields"):  # A record: a NamedTuple, or the result of torch.max.
        return f"a {cls.__name__}, which is one result with named fields,"
    if isinstance(value, list | tuple):
        return "" if len(value) == wanted else f"{len(value)} results"
    try:
        got = len(value)
    except TypeError:  # Also raised by arrays and tensors without an axis, although they have a __len__.
        return f"a {cls.__name__}, which has no length,"
    if isinstance(value, Sequence):
        fits = not isinstance(value, _TEXT)
    elif hasattr(value, "iloc") or hasattr(value, "columns"):
        return f"a {cls.__name__} of length {got}, whose items are its columns, or go by its labels,"
    else:
        fits = hasattr(value, "shape") or _counts(value)
    if not fits:
        return f"a {cls.__name__} of length {got}, which is no sequence and no array,"
    return "" if got == wanted else f"{got} results"


def _counts(value: Any) -> bool:
    """True if the items are at 0, 1, 2, …, as far as the type tells."""
    return not isinstance(value, Set) and hasattr(type(value), "__getitem__") and not hasattr(value, "keys")
