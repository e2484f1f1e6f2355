"""Makes text of others safe for terminals and files: control characters are made visible, and surrogates are escaped.

Names, log lines and messages come from users' code, and from whoever can write into a log. Control characters
in them (escape sequences, returns, backspaces, direction overrides) become ``\\x1b``, ``\\r``, ``\\u202e``: visible
and without effect. Half of an emoji, which UTF-8 cannot encode, becomes ``\\ud83d``.
"""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["encodable", "json_text", "shorten", "shown"]

# C0 except tab and line end, DEL, C1, overrides and isolates of the writing direction, line separators, surrogates.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


# Colours and weights, except codes that hide text.
_STYLE = re.compile(r"\x1b\[(?!(?:\d+;)*0*8[;m])[\d;]*m")


def shown(text: str, *, lines: bool = False, styles: bool = False) -> str:
    """Make text safe for a terminal.

    Args:
        text: any text.
        lines: keep line ends; otherwise they are made visible too.
        styles: keep escape sequences of colours and weights, for a reader that understands no others.
    """
    if text.isprintable():
        return text
    if styles and (found := _STYLE.findall(text)):
        parts = [shown(part, lines=lines) for part in _STYLE.split(text)]
        return "".join(part + style for part, style in zip(parts, [*found, ""], strict=True))
    text = _CONTROLS.sub(_escape, text)
    return text if lines else text.replace("\n", "\\n")


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return {"\r": "\\r"}.get(match[0]) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")


def encodable(text: str) -> str:
    """Replace characters that UTF-8 cannot encode by escapes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()
    return text


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Format as JSON that can be encoded; other characters stay as they are."""
    separators = (",", ":") if indent is None else None
    return encodable_json(json.dumps(value, ensure_ascii=False, indent=indent, separators=separators))


def encodable_json(text: str) -> str:
    """Escape surrogates in JSON text, so that readers get them back."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return re.sub("[\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)
    return text


def shorten(lines: list[str], most: int, rest: str = "") -> list[str]:
    """At most ``most`` lines: the first ones, and more of the last ones, where a traceback names the error."""
    if len(lines) <= most:
        return lines
    head = max(1, most // 3)
    tail = most - head - 1
    left = len(lines) - head - tail
    return [*lines[:head], f"… {left} more lines{f' in {rest}' if rest else ''} …", *lines[len(lines) - tail :]]
