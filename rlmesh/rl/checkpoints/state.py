"""The trainer's part of a checkpoint: states of its objects as JSON and arrays, and the seeds of random generators.

Reading it cannot run code: values are JSON, and arrays have NumPy's own format without pickles.
"""

from __future__ import annotations

import io
import json
import math
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from rlmesh.errors import UsageError

__all__ = [
    "EncodedState",
    "Stateful",
    "decoded",
    "encoded",
    "has_record",
    "restore_states",
    "seed_generators",
    "seeded_generators",
    "states_of",
]

ARRAY, BYTES, TUPLE = "\0array", "\0bytes", "\0tuple"


@runtime_checkable
class Stateful(Protocol):
    """An object of the trainer whose state belongs to a checkpoint, such as a buffer or a controller of the KL
    penalty.

    A state is a mapping of texts to numbers, texts, truth values, None, bytes, NumPy arrays, and lists, tuples and
    mappings of these.

    Some objects have a durable record of their own, such as a ledger. They may define ``go_back(step)``, which
    continues after a step without a checkpoint; their state is then in checkpoints only, and is not written after each
    step. If an object has ``make_durable()``, which returns a future, a checkpoint counts only when this future is
    done. An object with ``dispensable = True`` begins anew if a checkpoint of an earlier version has no state for it.
    """

    def state(self) -> Mapping[str, Any]:
        """Everything that the object needs to continue exactly. The trainer calls this between two steps."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a state. May be called at any time, and more than once.

        Raises:
            UsageError: the state is of another kind of object.
        """
        ...


@dataclass(frozen=True, slots=True)
class EncodedState:
    """A state as bytes.

    Attributes:
        text: JSON, with references to arrays.
        arrays: an npz file with one array per dtype, in which all arrays follow each other; empty without arrays.
    """

    text: bytes
    arrays: bytes

    @property
    def size_bytes(self) -> int:
        """The length of both."""
        return len(self.text) + len(self.arrays)


def encoded(state: Mapping[str, Any]) -> EncodedState:
    """Encode a state as bytes, which later changes of its objects do not alter.

    Raises:
        UsageError: a value has a type that a state cannot have; the message says where.
    """
    arrays = _Arrays({}, {})
    text = json.dumps(_plain(state, "state", arrays)).encode()
    if not arrays.parts:
        return EncodedState(text, b"")
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **{dtype: np.concatenate(parts) for dtype, parts in arrays.parts.items()})
    return EncodedState(text, file.getvalue())


def decoded(state: EncodedState) -> dict[str, Any]:
    """Decode a state.

    Raises:
        ValueError: the bytes are no encoded state.
    """
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    if state.arrays:
        with np.load(io.BytesIO(state.arrays), allow_pickle=False) as file:
            arrays = dict(file)
    found: dict[str, Any] = _whole(json.loads(state.text), arrays)
    return found


@dataclass(frozen=True, slots=True)
class _Arrays:
    """Arrays by dtype, flat, and the number of items of each dtype."""

    parts: dict[str, list[np.ndarray[Any, Any]]]
    lengths: dict[str, int]

    def add(self, array: np.ndarray[Any, Any]) -> list[Any]:
        """The reference to a copy of an array: dtype, first item, shape."""
        dtype = array.dtype.str
        start = self.lengths.get(dtype, 0)
        self.parts.setdefault(dtype, []).append(array.reshape(-1))
        self.lengths[dtype] = start + array.size
        return [dtype, start, list(array.shape)]


def _plain(value: Any, where: str, arrays: _Arrays) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bytes):
        return {BYTES: arrays.add(np.frombuffer(value, np.uint8))}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return {ARRAY: arrays.add(value)}
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise UsageError(f"{where} has the key {wrong[0]!r:.80}: the keys of a state are texts")
        return {key: _plain(each, f"{where}[{key!r}]", arrays) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_plain(each, f"{where}[{place}]", arrays) for place, each in enumerate(value)]
        return {TUPLE: items} if isinstance(value, tuple) else items
    raise UsageError(
        f"{where} is a {type(value).__name__}: a state has numbers, texts, None, bytes, NumPy arrays, and lists, "
        "tuples and mappings of these (tensor.numpy() makes an array of a tensor)"
    )


def _whole(value: Any, arrays: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_whole(each, arrays) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, inner),) = value.items()
        if key in (ARRAY, BYTES):
            dtype, start, shape = inner
            found = arrays[dtype][start : start + math.prod(shape)].reshape(shape)
            return found.copy() if key == ARRAY else found.tobytes()
        if key == TUPLE:
            return tuple(_whole(each, arrays) for each in inner)
    return {key: _whole(each, arrays) for key, each in value.items()}


def states_of(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The states of all objects that are `Stateful`, by name."""
    return {name: dict(part.state()) for name, part in parts.items() if isinstance(part, Stateful)}


def has_record(part: Any) -> bool:
    """True if an object has a record of its own, from which it continues after a step without a checkpoint."""
    return isinstance(part, Stateful) and callable(getattr(part, "go_back", None))


def restore_states(parts: Mapping[str, Any], states: Mapping[str, Any], where: str) -> None:
    """Restore objects from the states that `states_of` gave.

    Args:
        parts: the objects by name.
        states: by the same names.
        where: the checkpoint, for errors.

    Raises:
        UsageError: a state has no object that takes it, or an object with a state has none in the checkpoint.
    """
    takers = {name: part for name, part in parts.items() if isinstance(part, Stateful)}
    if lost := sorted(name for name, state in states.items() if state and name not in takers):
        raise UsageError(
            f"{where} has a state of {lost[0]!r}, and this run's {lost[0]} has none: go on with the settings and the "
            "code that wrote it, or begin a new run with its weights (restore=…)"
        )
    if lacking := sorted(name for name in set(takers) - set(states) if not getattr(takers[name], "dispensable", False)):
        raise UsageError(
            f"{where} has no state of {lacking[0]!r}, which this run needs: go on with the settings and the code that "
            "wrote it, or begin a new run with its weights (restore=…)"
        )
    for name, part in takers.items():
        if name in states:
            part.restore(states[name])


def seed_generators(seed: int, step: int, who: Sequence[Any]) -> None:
    """Seed the global generators of Python, NumPy and torch as a function of the run's seed, the step and ``who``.

    So random numbers, such as those of dropout, are the same in a step that is made again, whatever happened before,
    and a checkpoint needs no state of generators.

    Args:
        seed: the run's seed.
        step: the step.
        who: role and rank.
    """
    words = [zlib.crc32(str(one).encode()) for one in who]
    small, large = np.random.SeedSequence([seed, step, *words]).generate_state(2, np.uint64).tolist()
    random.seed(large)
    np.random.seed(small % 2**32)
    torch.manual_seed(large % 2**63)


@contextmanager
def seeded_generators(seed: int, who: Sequence[Any]) -> Iterator[None]:
    """A block whose random numbers are a function of ``seed`` and ``who``, as with `seed_generators`. At its end the
    generators return to their states before it."""
    states = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        try:
            seed_generators(seed, 0, who)
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
