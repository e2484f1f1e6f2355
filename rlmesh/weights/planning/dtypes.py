"""Element types by name, as torch calls them: sizes, and which casts may be allowed. Pure."""

from __future__ import annotations

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
    "complex64": 8,
}
"""Name → bytes per element of every type that weights may have."""

FLOATS = frozenset({"float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"})


def is_float(name: str) -> bool:
    """Whether values of this type may be cast to another one of these when the user allows it."""
    return name in FLOATS
