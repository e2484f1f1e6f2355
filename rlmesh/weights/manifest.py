"""`Manifest`: the tensors of a source or a sink: names, shapes, element types, ties. No I/O.

Tensors that share memory (tied embeddings) appear under each of their names; all but the first have ``alias_of``.
"""

from __future__ import annotations

import difflib
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, TypeVar

from rlmesh.errors import UsageError, WeightSyncError

T = TypeVar("T")
Kind = Literal["parameter", "buffer"]

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
"""Bytes per element of every type that weights may have, by torch's name."""

FLOATS = frozenset({"float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"})
"""Types between which casts may be allowed."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One whole tensor (not a shard). ``alias_of`` is the name under which its memory is sent, if it is tied."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind = "parameter"
    alias_of: str | None = None

    @property
    def owner_name(self) -> str:
        """The name under which this tensor's memory is sent."""
        return self.name if self.alias_of is None else self.alias_of

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        tie = f", tied to {self.alias_of}" if self.alias_of else ""
        return f"{self.name} [{', '.join(map(str, self.shape))}] {self.dtype}{tie}"


@dataclass(frozen=True)
class Manifest:
    """All tensors of one side, in order. ``excluded`` are names of its tensors that are not synced."""

    tensors: tuple[TensorSpec, ...]
    excluded: tuple[str, ...] = ()
    _by_name: dict[str, TensorSpec] = field(init=False, repr=False, compare=False, hash=False)
    _owners: dict[str, str] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        by_name = {spec.name: spec for spec in self.tensors}
        if len(by_name) != len(self.tensors):
            raise WeightSyncError(f"names appear twice: {_list(_repeated(s.name for s in self.tensors))}")
        for spec in self.tensors:
            if spec.dtype not in ITEM_BYTES:
                raise WeightSyncError(f"{spec}: elements of this type cannot be synced; known are {_list(ITEM_BYTES)}")
            owner = by_name.get(spec.owner_name)
            if owner is None or owner.alias_of is not None:
                raise WeightSyncError(f"{spec}: the name that it is tied to owns no memory")
        object.__setattr__(self, "_by_name", by_name)
        object.__setattr__(self, "_owners", {spec.name: spec.owner_name for spec in self.tensors})

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def find(self, name: str) -> TensorSpec | None:
        return self._by_name.get(name)

    def owner(self, name: str) -> TensorSpec:
        """The tensor that owns the memory of ``name``."""
        return self._by_name[self._owners[name]]

    def by_owner(self, tensors: Mapping[str, T]) -> dict[str, T]:
        """One received tensor per memory, by the owner's name; tied names have the same tensor."""
        return {self._owners[name]: tensor for name, tensor in tensors.items()}

    @property
    def nbytes(self) -> int:
        """The size of all tensors in bytes; tied ones count once."""
        return sum(spec.nbytes for spec in self.tensors if spec.alias_of is None)

    def digest(self) -> str:
        """A hash, equal for equal manifests."""
        text = repr([(s.name, s.shape, s.dtype, s.kind, s.alias_of) for s in self.tensors])
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        # Rows of plain values are pickled in a fraction of the time that thousands of tensors take.
        return _manifest_of, ([(s.name, s.shape, s.dtype, s.kind, s.alias_of) for s in self.tensors], self.excluded)


def _manifest_of(rows: Iterable[Any], excluded: tuple[str, ...]) -> Manifest:
    return Manifest(tuple(TensorSpec(*row) for row in rows), excluded)


@dataclass(frozen=True)
class Casts:
    """Allowed changes of the element type, as (from, to); ``everything`` allows all between float types."""

    pairs: frozenset[tuple[str, str]] = frozenset()
    everything: bool = False

    @classmethod
    def of(cls, allow: bool | Mapping[str, str] | Iterable[tuple[str, str]]) -> Casts:
        """Parse the option ``allow_cast``: ``True``, ``{"float32": "bfloat16"}``, or pairs.

        Raises:
            UsageError: it is none of these.
        """
        if isinstance(allow, bool):
            return cls(everything=allow)
        given: Any = allow
        listed = given.items() if isinstance(given, Mapping) else given
        pairs: list[Any] = list(listed) if isinstance(listed, Iterable) else [listed]
        for pair in pairs:
            if not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(of, str) for of in pair):
                raise UsageError(f"allow_cast={allow!r:.80}: write True, {{'float32': 'bfloat16'}}, or pairs of types")
        return cls(frozenset(pairs))

    def allow(self, source: str, sink: str) -> bool:
        if source == sink:
            return True
        return (source, sink) in self.pairs or (self.everything and {source, sink} <= FLOATS)


NO_CASTS = Casts()


def misfits(source: Manifest, sink: Manifest, casts: Casts) -> list[str]:
    """The faults that keep these two from fitting together, one line each.

    A sink may have separate memory for names that the source ties; the reverse is refused, since the source's two
    tensors could differ and the sink has memory for one.
    """
    faults = _name_faults(source, sink)
    owners: dict[str, TensorSpec] = {}
    for mine in sink:
        theirs = source.find(mine.name)
        if theirs is None:
            continue
        if theirs.shape != mine.shape:
            faults.append(f"{mine.name}: the source has shape {_shape(theirs)}, the sink {_shape(mine)}")
        if not casts.allow(theirs.dtype, mine.dtype):
            advice = (
                f"; allow it with allow_cast={{{theirs.dtype!r}: {mine.dtype!r}}}"
                if {theirs.dtype, mine.dtype} <= FLOATS
                else ""
            )
            faults.append(f"{mine.name}: the source has {theirs.dtype}, the sink {mine.dtype}{advice}")
        tie = sink.owner(mine.name).name
        owner = source.owner(mine.name)
        if owners.setdefault(tie, owner).name != owner.name:
            faults.append(
                f"{mine.name}: tied to {tie} at the sink, but the source has two tensors, {owners[tie].name} and "
                f"{owner.name}: they could differ. Tie them at the source, or untie them at the sink"
            )
    return faults


def _name_faults(source: Manifest, sink: Manifest) -> list[str]:
    here, there = [s.name for s in source], [s.name for s in sink]
    missing = [name for name in there if source.find(name) is None]
    more = [name for name in here if sink.find(name) is None]
    faults = []
    if missing:
        near = difflib.get_close_matches(missing[0], here, n=1)
        hint = f"; the nearest name there is {near[0]!r}" if near else ""
        kept = sorted(set(missing) & set(source.excluded))
        if kept:
            hint += f"; the source excludes {_list(kept)}"
        faults.append(f"the source has no {_list(missing)}, which the sink needs{hint}")
    if more:
        kept = sorted(set(more) & set(sink.excluded))
        hint = f"; the sink excludes {_list(kept)}" if kept else ""
        faults.append(f"the sink has no {_list(more)}, which the source has{hint}")
    return faults


def _shape(spec: TensorSpec) -> str:
    return f"[{', '.join(map(str, spec.shape))}]"


def _list(names: Iterable[str], most: int = 8) -> str:
    shown = list(names)
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]
