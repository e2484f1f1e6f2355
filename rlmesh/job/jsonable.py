"""Conversion of any user configuration to plain JSON values, for printing a job. Never fails; types are lost."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence, Set
from enum import Enum
from pathlib import PurePath
from typing import Any

from pydantic import BaseModel

__all__ = ["jsonable"]

_MAX_DEPTH = 32


def jsonable(value: Any, depth: int = _MAX_DEPTH) -> Any:
    """Return ``value`` as dicts, lists, text, numbers and None.

    Mappings, namespaces, dataclasses, pydantic models and OmegaConf objects become dicts. Other objects become their
    ``repr``; so do objects nested deeper than 32 levels, which also ends cycles.
    """
    if isinstance(value, Enum):
        return value.value if isinstance(value.value, str | int) else value.name
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth == 0:
        return "…"
    plain = _plain(value)
    if isinstance(plain, Mapping):
        return {_key(key): jsonable(item, depth - 1) for key, item in plain.items()}
    if isinstance(plain, Set):
        return sorted((jsonable(item, depth - 1) for item in plain), key=str)
    if isinstance(plain, Sequence) and not isinstance(plain, str | bytes | bytearray):
        return [jsonable(item, depth - 1) for item in plain]
    if isinstance(plain, float):  # an array or tensor of one number
        return plain if math.isfinite(plain) else str(plain)
    return plain if isinstance(plain, str | int) else repr(value)


def _key(key: Any) -> str:
    return str(jsonable(key)) if isinstance(key, Enum) else str(key)


def _plain(value: Any) -> Any:
    """Return one level of ``value`` as a mapping, a sequence or text, if it has such a form."""
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, argparse.Namespace):
        return vars(value)
    if isinstance(value, BaseModel):
        return {name: getattr(value, name) for name in type(value).model_fields}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    omegaconf = sys.modules.get("omegaconf")  # without the loaded module there are no such values
    if omegaconf is not None and isinstance(value, omegaconf.DictConfig | omegaconf.ListConfig):
        try:
            return omegaconf.OmegaConf.to_container(value, resolve=True)
        except omegaconf.errors.OmegaConfBaseException:
            return omegaconf.OmegaConf.to_container(value, resolve=False)
    if hasattr(value, "dtype") and hasattr(value, "tolist"):  # arrays and tensors
        return value.tolist()
    return value
