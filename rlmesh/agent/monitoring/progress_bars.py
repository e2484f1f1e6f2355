"""Progress bars in logs: what stands at the end of a line that a program has written over. Pure.

Programs such as tqdm draw a bar by going back to the start of the line (``\\r``) and writing it again, and several bars
by going up a line after each (``ESC [A``). A file has all of these states one after the other. A terminal shows the
last one, and so do the readers of logs.
"""

from __future__ import annotations

import re

__all__ = ["compacted", "is_bar", "is_overwritten", "last_state"]

UP = b"\x1b[A"
_MOVES = re.compile(rb"\x1b\[\d*[AK]")
"""Going up a line, and clearing it: what an eye does not see."""


def last_state(line: bytes) -> bytes:
    """What a terminal shows of a line, given without its line feed: what was written after the last return to its
    start. Empty where that was cleared."""
    if b"\r" not in line and UP not in line:
        return line
    last = next((state for state in reversed(line.split(b"\r")) if state), b"")
    return _MOVES.sub(b"", last).rstrip(b" ")


def is_bar(half: bytes) -> bool:
    """Whether a line that has no end yet is being written over."""
    return b"\r" in half.rstrip(b"\r")


def is_overwritten(line: bytes) -> bool:
    """Whether the next line stands in the place of this one, since the program went up again."""
    return line.endswith(UP)


def compacted(half: bytes) -> bytes:
    """The same line as far as its last state goes, without the states before: a bar may be drawn for hours."""
    if b"\r" not in half:
        return half
    body = half.rstrip(b"\r")
    end = b"\r" if len(body) < len(half) else b""
    _, back, last = body.rpartition(b"\r")
    return back + last + end
