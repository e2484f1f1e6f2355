"""`ArraySource` and `ArraySink`: weights as NumPy arrays, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, get_args

from rlmesh.errors import UsageError, WeightSyncError
from rlmesh.runtime.argument_types import require, require_choice
from rlmesh.weights.manifest import Manifest, TensorSpec
from rlmesh.weights.planning.plan import Mode
from rlmesh.weights.protocols import Framework
from rlmesh.weights.transfer.tensor_bytes import dtype_name

CHANGED = "its weights have other names, shapes or types than when the plan was made. The next push makes a new plan"


def manifest_of(arrays: Mapping[str, Any]) -> Manifest:
    """Names, shapes and types; arrays that share memory are tied.

    Raises:
        UsageError: ``arrays`` has other keys than names or other values than arrays.
        WeightSyncError: an array's elements cannot be synced.
    """
    import numpy as np

    named: Mapping[Any, Any] = arrays
    for name, array in named.items():
        if not isinstance(name, str) or not isinstance(array, np.ndarray):
            raise UsageError(
                f"weights are NumPy arrays by name; {name!r:.80} is {array!r:.80} ({type(array).__name__})"
            )
    owners: dict[object, str] = {}
    specs = []
    for name, array in arrays.items():
        key = (array.ctypes.data, array.shape, array.strides, array.dtype.str) if array.size else name
        owner = owners.setdefault(key, name)
        tie = owner if owner != name else None
        specs.append(TensorSpec(name, tuple(array.shape), dtype_name(array), alias_of=tie))
    return Manifest(tuple(specs))


def _form(array: Any) -> tuple[object, ...]:
    return array.shape, array.strides, array.dtype


def _same(arrays: Mapping[str, Any], known: Sequence[tuple[str, Any, object]]) -> bool:
    """True for the same array objects under the same names, with the same shapes and types."""
    return len(arrays) == len(known) and all(
        array is before and name == name_before and _form(array) == form
        for (name, array), (name_before, before, form) in zip(arrays.items(), known, strict=False)
    )


class ArraySource:
    """Arrays by name. Change their contents in place, and call `changed` afterwards: a push that sends the arrays
    without a snapshot (*fenced*, see `WeightSync`) fails then instead of sending mixed weights.

    Args:
        arrays: name → array of any shape and strides.
    """

    device = "cpu"
    lasting = True

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        require("ArraySource(arrays)", arrays, Mapping, "a mapping of name → NumPy array")
        self.arrays = arrays
        self._changes = 0
        self._known: list[tuple[str, Any, Any]] = []
        self._manifest = Manifest(())

    def changed(self) -> None:
        """Report a change of the contents."""
        self._changes += 1

    def manifest(self) -> Manifest:
        arrays = self.arrays
        if not self._known or not _same(arrays, self._known):
            made = manifest_of(arrays)
            self._manifest = self._manifest if made == self._manifest else made
            self._known = [(name, array, _form(array)) for name, array in arrays.items()]
        return self._manifest

    def gather(self, names: Sequence[str]) -> AbstractContextManager[Mapping[str, Any]]:
        return nullcontext({name: self.arrays[name] for name in names})

    def stamp(self) -> object:
        return self._changes


class ArraySink:
    """Arrays by name, in the attribute ``arrays``: read it anew for each request, since a flip of a `double_buffer`
    sink replaces it.

    Args:
        arrays: name → array; gives shapes, types and ties, not contents.
        mode: see `WeightSink`.
        keep_shared: use memory that the source shares directly, instead of copying it. It is read-only.
    """

    framework: Framework = "numpy"
    device = "cpu"

    def __init__(self, arrays: Mapping[str, Any], mode: Mode = "double_buffer", *, keep_shared: bool = True) -> None:
        require("ArraySink(arrays)", arrays, Mapping, "a mapping of name → NumPy array")
        require_choice("ArraySink(mode=…)", mode, get_args(Mode))
        self.arrays = dict(arrays)
        self.mode: Mode = mode
        self._describe()
        self._keep = keep_shared
        self._staged: dict[str, Any] = {}
        self._previous: dict[str, Any] = {}
        self._spare: dict[str, Any] = {}

    def manifest(self) -> Manifest:
        if not self._is_current():
            self._describe()
        return self._manifest

    def _describe(self) -> None:
        self._manifest = manifest_of(self.arrays)
        self._owners = {spec.name: spec.owner_name for spec in self._manifest}
        self._types = {name: (array.shape, array.dtype) for name, array in self.arrays.items()}

    def _is_current(self) -> bool:
        """True if the arrays that an ``in_place`` sink overwrites have the manifest's shapes and types."""
        return self.mode != "in_place" or all(
            spec.name in self.arrays
            and self.arrays[spec.name].shape == spec.shape
            and dtype_name(self.arrays[spec.name]) == spec.dtype
            for spec in self._manifest
        )

    def begin(self, version: int) -> None:
        if not self._is_current():
            raise WeightSyncError(CHANGED)
        # A new push rules out a rollback to the version before, so the copies go into that version's memory.
        self._spare = {} if self._keep else self._previous
        self._previous, self._staged = {}, {}

    def stage(self, tensors: Mapping[str, Any], *, keep: bool) -> None:
        import numpy as np

        for name, sent in tensors.items():
            owner = self._owners[name]
            if owner != name and owner in tensors:
                continue  # It comes under the name that owns the memory.
            if self.mode == "in_place":
                np.copyto(self.arrays[owner], sent, casting="unsafe")
                continue
            shape, dtype = self._types[owner]
            if keep and self._keep and sent.dtype == dtype:
                array = sent.view()
                array.flags.writeable = False
            else:
                array = self._spare.get(owner)
                if array is None:
                    array = np.empty(shape, dtype)
                np.copyto(array, sent, casting="unsafe")
            self._staged[owner] = array

    def flip(self, version: int) -> None:
        if self.mode == "in_place":
            return
        staged = {name: self._staged[owner] for name, owner in self._owners.items()}
        self._previous, self.arrays, self._staged = self.arrays, staged, {}

    def rollback(self) -> None:
        self.arrays, self._previous = self._previous, {}

    def discard(self) -> None:
        self._staged = {}
