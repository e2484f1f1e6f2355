"""Progress bars in logs: the last state of a line that a program has written over. No I/O.

Programs such as tqdm draw a bar by returning to the start of the line (``\\r``) and writing it again, and several bars
by moving up a line after each (``ESC [A``). The file has all of these states one after the other. A terminal shows the
last one, and so do the readers of logs.
"""

from __future__ import annotations

import re

__all__ = ["compacted", "is_bar", "is_overwritten", "last_state"]

UP = b"\x1b[A"
_MOVES = re.compile(rb"\x1b\[\d*[AK]")
"""Control codes that move up a line or clear it, which are invisible."""


def last_state(line: bytes) -> bytes:
    """A line as a terminal shows it, given without its line feed: the text after the last return to its start. Empty if
    that was cleared."""
    if b"\r" not in line and UP not in line:
        return line
    last = next((state for state in reversed(line.split(b"\r")) if state), b"")
    return _MOVES.sub(b"", last).rstrip(b" ")


def is_bar(half: bytes) -> bool:
    """True if an unfinished line is being written over."""
    return b"\r" in half.rstrip(b"\r")


def is_overwritten(line: bytes) -> bool:
    """True if the next line replaces this one, since the program moved the cursor up."""
    return line.endswith(UP)


def compacted(half: bytes) -> bytes:
    """The unfinished line without its earlier states: a bar may be drawn for hours."""
    if b"\r" not in half:
        return half
    body = half.rstrip(b"\r")
    end = b"\r" if len(body) < len(half) else b""
    _, back, last = body.rpartition(b"\r")
    return back + last + end
