"""Slurm's compressed lists of node names, ``n[001-003,007],rack[1-2]-n[01-02]``, and of counts, ``24(x5),16``. No I/O.

Grammar of names, after the documentation of ``scontrol show hostnames``::

    list  = name ("," name)*
    name  = (text | "[" item ("," item)* "]")+
    item  = digits | digits "-" digits

A range counts up and keeps the width of its lower end: ``[08-10]`` is 08, 09, 10. Of several brackets in one name
the last one varies fastest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

from rlmesh.errors import UsageError

__all__ = ["expand_counts", "expand_nodes"]

MAX_NAMES = 100_000
"""A list with more names is taken for a typing error; Slurm's own limit is 65,533 nodes."""

_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def expand_nodes(text: str) -> tuple[str, ...]:
    """Expand a list of node names, in order; a name that is listed twice comes twice.

    Raises:
        UsageError: the text is not such a list; says where it is wrong.
    """
    names: list[str] = []
    for start, pattern in _split(text):
        names += _expand_name(text, start, pattern, MAX_NAMES - len(names))
    return tuple(names)


def _split(text: str) -> Iterator[tuple[int, str]]:
    """Position and text of each name: commas inside brackets do not end one."""
    start, depth = 0, 0
    for at, char in enumerate(text + ","):
        if char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
        if depth not in (0, 1):
            raise _fault(text, at, "brackets do not nest" if depth > 1 else "a bracket is closed that was not opened")
        if char == "," and (depth == 0 or at == len(text)):
            if depth:
                raise _fault(text, at, "a bracket is not closed")
            if at == start:
                raise _fault(text, at, "a name is missing")
            yield start, text[start:at]
            start = at + 1


def _expand_name(text: str, start: int, pattern: str, room: int) -> list[str]:
    choices: list[list[str]] = []
    count = 1
    for part in _PART.finditer(pattern):
        inside, literal = part.groups()
        if literal is not None:
            if bad := re.search(r"[\s()]", literal):
                raise _fault(text, start + part.start() + bad.start(), f"{bad.group()!r} is in no name of a node")
            choices.append([literal])
            continue
        items: list[str] = []
        for item in inside.split(","):
            items += _expand_range(text, start + part.start(), item, room // count - len(items))
        choices.append(items)
        count *= len(items)
    return ["".join(parts) for parts in product(*choices)]


def _expand_range(text: str, at: int, item: str, room: int) -> list[str]:
    found = _RANGE.fullmatch(item)
    if found is None:
        raise _fault(text, at, f"{item!r} is neither a number nor a range such as 01-08")
    low, high = found.group(1), found.group(2) or found.group(1)
    if int(high) < int(low):
        raise _fault(text, at, f"the range {item} runs backwards")
    if int(high) - int(low) >= room:
        raise _fault(text, at, f"{item} makes it more than {MAX_NAMES:,} names")
    return [f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1)]


def expand_counts(text: str) -> tuple[int, ...]:
    """Expand a list such as ``24(x5),16``: one number per node.

    Raises:
        UsageError: the text is not such a list.
    """
    counts: list[int] = []
    at = 0
    for item in text.split(","):
        found = _COUNT.fullmatch(item)
        if found is None:
            raise _fault(text, at, f"{item!r} is neither a count nor one with a repetition, such as 24(x5)")
        times = int(found.group(2) or 1)
        if times > MAX_NAMES - len(counts):
            raise _fault(text, at, f"{item} makes it more than {MAX_NAMES:,} counts")
        counts += [int(found.group(1))] * times
        at += len(item) + 1
    return tuple(counts)


def _fault(text: str, at: int, why: str) -> UsageError:
    return UsageError(f"{text!r} is not a list that Slurm writes: {why} (at character {at + 1})")
