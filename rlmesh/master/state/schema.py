"""JSON encoding and decoding of the job's state, by the types of its records. Nothing decoded is code.

The schema of a record is its class, a dataclass. Encoding follows the annotations; decoding checks each value against
them, and rejects unknown or missing fields, values of another type, and names outside of a ``Literal``.

======================================  ============================================
annotation                              JSON
======================================  ============================================
None, bool, int, float, str, Literal    itself (``NaN``, ``Infinity`` as Python's)
a dataclass                             an object, one entry per field
several dataclasses (``A | B``)         that object and its class's name under ``is``
tuple, list, set, frozenset             an array; sets in a fixed order
a mapping with texts as keys            an object
any other mapping                       an array of pairs
an ``IntEnum``                          its number
======================================  ============================================

Text that UTF-8 cannot encode (half of an emoji) is escaped as in JSON, and decoded to the same text.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

__all__ = ["SchemaError", "decode", "encode", "from_plain", "to_plain"]

TAG = "is"

Encode = Callable[[Any], Any]
Decode = Callable[[Any], Any]


class SchemaError(ValueError):
    """Stored data does not match its schema."""


def encode(value: object, kind: object) -> str:
    """Return ``value``, which is a ``kind``, as JSON in ASCII."""
    return json.dumps(to_plain(value, kind), separators=(",", ":"))


def to_plain(value: object, kind: object) -> Any:
    """Return ``value``, which is a ``kind``, as dicts, lists, texts, numbers and None."""
    return _codec(kind)[0](value)


def decode(text: object, kind: object) -> Any:
    """Return the value that ``encode`` turned into ``text``.

    Raises:
        SchemaError: the text does not match the schema.
    """
    if not isinstance(text, str):
        raise SchemaError(f"a record of {_name(kind)} is not a text but {type(text).__name__}")
    try:
        return from_plain(json.loads(text), kind)
    except SchemaError:
        raise
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"a record of {_name(kind)} cannot be read: {error}") from error


def from_plain(value: object, kind: object) -> Any:
    """Return the value that ``to_plain`` turned into ``value``.

    Raises:
        SchemaError: the value does not match the schema.
    """
    try:
        return _codec(kind)[1](value)
    except SchemaError:
        raise
    except (ValueError, TypeError, RecursionError) as error:  # also from the record's own __init__ or __post_init__
        raise SchemaError(f"a record of {_name(kind)} cannot be read: {error}") from error


def _fields_of(value: object, known: Iterable[str], where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SchemaError(f"{where} is not an object but {type(value).__name__}")
    if unknown := sorted(set(value) - set(known)):
        raise SchemaError(f"{where} has unknown fields: {', '.join(unknown)}")
    if missing := sorted(set(known) - set(value)):
        raise SchemaError(f"{where} lacks fields: {', '.join(missing)}")
    return value


def _name(kind: object) -> str:
    return getattr(kind, "__name__", str(kind))


@cache
def _codec(kind: Any) -> tuple[Encode, Decode]:
    """Return encoder and decoder of a type. Those of dataclass fields are looked up on first use."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in _PLAIN:
        return _same, _PLAIN[kind]
    if origin is typing.Literal:
        return _same, _one_of(arguments)
    if origin in (typing.Union, types.UnionType):
        return _union(arguments)
    if origin is tuple:
        return _tuple(arguments)
    if origin in (list, set, frozenset):
        return _collection(origin, arguments[0])
    if origin in (dict, Mapping):
        return _mapping(*arguments)
    if isinstance(kind, type) and issubclass(kind, enum.IntEnum):
        return int, lambda value: kind(_integer(value))
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _dataclass(kind)
    raise TypeError(f"{kind!r} has no form in the job's state")


def _same(value: Any) -> Any:
    return value


def _of_type(kind: type, name: str) -> Decode:
    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise SchemaError(f"{name} was expected, not {value!r:.80}")
        return value

    return check


_integer = _of_type(int, "a whole number")


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise SchemaError(f"a number was expected, not {value!r:.80}")
    return float(value)


_PLAIN: dict[Any, Decode] = {
    int: _integer,
    str: _of_type(str, "a text"),
    bool: _of_type(bool, "true or false"),
    float: _number,
    type(None): _of_type(type(None), "null"),
}


def _one_of(choices: tuple[Any, ...]) -> Decode:
    def check(value: Any) -> Any:
        if value not in choices:
            raise SchemaError(f"one of {', '.join(map(str, choices))} was expected, not {value!r:.80}")
        return value

    return check


def _union(kinds: tuple[Any, ...]) -> tuple[Encode, Decode]:
    others = tuple(kind for kind in kinds if kind is not type(None))
    if len(others) == 1:
        inner_encode, inner_decode = _codec(others[0])
        if inner_encode is _same:
            return _same, lambda value: None if value is None else inner_decode(value)
        return (
            lambda value: None if value is None else inner_encode(value),
            lambda value: None if value is None else inner_decode(value),
        )
    by_name = {kind.__name__: kind for kind in others}

    def encode_one(value: Any) -> Any:
        return {TAG: type(value).__name__, **_codec(by_name[type(value).__name__])[0](value)}

    def decode_one(value: Any) -> Any:
        name = value.get(TAG) if isinstance(value, dict) else None
        if not isinstance(name, str) or name not in by_name:
            raise SchemaError(f"one of {', '.join(by_name)} was expected, not {value!r:.80}")
        return _codec(by_name[name])[1]({key: item for key, item in value.items() if key != TAG})

    return encode_one, decode_one


def _items(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise SchemaError(f"an array was expected, not {value!r:.80}")
    return value


def _tuple(kinds: tuple[Any, ...]) -> tuple[Encode, Decode]:
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return _collection(tuple, kinds[0])
    codecs = [_codec(kind) for kind in kinds]

    def decode_all(value: Any) -> Any:
        items = _items(value)
        if len(items) != len(codecs):
            raise SchemaError(f"{len(codecs)} items were expected, not {len(items)}")
        return tuple(one(item) for (_, one), item in zip(codecs, items, strict=True))

    return lambda value: [one(item) for (one, _), item in zip(codecs, value, strict=True)], decode_all


def _collection(make: Any, kind: Any) -> tuple[Encode, Decode]:
    one_encode, one_decode = _codec(kind)

    def encode_all(value: Any) -> Any:
        items = list(value) if one_encode is _same else [one_encode(item) for item in value]
        # Items of one type; None may be among them.
        return sorted(items, key=_order) if make in (set, frozenset) else items

    return encode_all, lambda value: make(one_decode(item) for item in _items(value))


def _order(item: Any) -> str:
    return json.dumps(item, sort_keys=True)


def _mapping(key: Any, kind: Any) -> tuple[Encode, Decode]:
    (key_encode, _), (one_encode, one_decode) = _codec(key), _codec(kind)
    if key is str:

        def decode_object(value: Any) -> Any:
            if not isinstance(value, dict):
                raise SchemaError(f"an object was expected, not {value!r:.80}")
            return {name: one_decode(item) for name, item in value.items()}

        return lambda value: {name: one_encode(item) for name, item in value.items()}, decode_object
    pair = _tuple((key, kind))[1]
    return (
        lambda value: [[key_encode(name), one_encode(item)] for name, item in value.items()],
        lambda value: dict(pair(item) for item in _items(value)),
    )


def _dataclass(kind: type) -> tuple[Encode, Decode]:
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    codecs: dict[str, tuple[Encode, Decode]] = {}

    def prepared() -> dict[str, tuple[Encode, Decode]]:
        if not codecs:  # on first use, because a class may refer to itself
            codecs.update({name: _codec(hints[name]) for name in names})
        return codecs

    def encode_fields(value: Any) -> Any:
        return {
            name: getattr(value, name) if one is _same else one(getattr(value, name))
            for name, (one, _) in prepared().items()
        }

    def decode_fields(value: Any) -> Any:
        values = _fields_of(value, names, kind.__name__)
        return kind(**{name: one(values[name]) for name, (_, one) in prepared().items()})

    return encode_fields, decode_fields
