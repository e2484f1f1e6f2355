"""Text of others for people and files: what a terminal would obey is shown, what UTF-8 lacks is escaped.

Names, log lines and messages come from users' code, and from whoever can write into a log. Control characters among
them (escape sequences, returns, backspaces, direction overrides) become ``\\x1b``, ``\\r``, ``\\u202e``: seen, not
obeyed. Half of an emoji, which UTF-8 cannot encode, becomes ``\\ud83d``.
"""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["encodable", "json_text", "shorten", "shown"]

# C0 but for tab and line end, DEL, C1, overrides and isolates of the writing direction, line separators, surrogates.
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


# Colours and weights, but nothing that hides text.
_STYLE = re.compile(r"\x1b\[(?!(?:\d+;)*0*8[;m])[\d;]*m")


def shown(text: str, *, lines: bool = False, styles: bool = False) -> str:
    """``text`` as it may go to a terminal.

    Args:
        text: of anybody.
        lines: line ends stay, else they are shown too.
        styles: escape sequences of colours and weights stay, for what understands those and no others.
    """
    if text.isprintable():
        return text
    if styles and (kept := _STYLE.findall(text)):
        parts = [shown(part, lines=lines) for part in _STYLE.split(text)]
        return "".join(part + style for part, style in zip(parts, [*kept, ""], strict=True))
    text = _OBEYED.sub(_escape, text)
    return text if lines else text.replace("\n", "\\n")


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return {"\r": "\\r"}.get(match[0]) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")


def encodable(text: str) -> str:
    """``text`` with what UTF-8 cannot encode as escapes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()
    return text


def json_text(value: Any, *, indent: int | None = None) -> str:
    """``value`` as JSON that can be encoded; characters stay as they are where that is possible."""
    separators = (",", ":") if indent is None else None
    return encodable_json(json.dumps(value, ensure_ascii=False, indent=indent, separators=separators))


def encodable_json(text: str) -> str:
    """JSON with surrogates as JSON escapes them, which gives them back to whoever reads it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return re.sub("[\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)
    return text


def shorten(lines: list[str], most: int, rest: str = "") -> list[str]:
    """At most so many lines: the first ones, and more of the last, where a traceback says what it is about."""
    if len(lines) <= most:
        return lines
    head = max(1, most // 3)
    tail = most - head - 1
    left = len(lines) - head - tail
    return [*lines[:head], f"… {left} more lines{f' in {rest}' if rest else ''} …", *lines[len(lines) - tail :]]
