"""`WeightSource` and `WeightSink`: the interfaces of trainers that give weights and of engines that take them.

An engine of your own needs the attributes and the six required methods of `WeightSink`, and nothing else of rlmesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from rlmesh.errors import UsageError
from rlmesh.weights.manifest import Manifest
from rlmesh.weights.planning.plan import Mode

if TYPE_CHECKING:
    from rlmesh.weights.planning.buckets import BucketEntry
    from rlmesh.weights.sink_state import VersionGate

Framework = Literal["numpy", "torch"]

SOURCE = ("device", "lasting", "manifest", "gather", "stamp")
SINK = ("mode", "framework", "device", "manifest", "begin", "stage", "flip", "rollback", "discard")


def check_end(end: object, needs: Sequence[str], what: str, examples: str) -> None:
    """Raises:
    UsageError: ``end`` lacks required members of a source or a sink.
    """
    if missing := [name for name in needs if not hasattr(end, name)]:
        raise UsageError(
            f"{end!r:.80} ({type(end).__name__}) is no {what}: it has no {', '.join(missing)}. Give {examples}, or an "
            "object of your own with these (docs/writing-an-engine.md)"
        )


class WeightSource(Protocol):
    """Weights that are trained in this process, whole or as a shard.

    Attributes:
        device: the device of the weights: ``cpu`` or ``cuda:0``.
        lasting: `gather` gives the weights themselves, at addresses that do not change; false if it makes copies.
    """

    device: str
    lasting: bool

    def manifest(self) -> Manifest:
        """All tensors, whole, as they are now: the same on every rank. Called at every push, so it should be cheap, and
        should return an equal manifest as long as no tensor was replaced."""
        ...

    def gather(self, names: Sequence[str]) -> AbstractContextManager[Mapping[str, Any]]:
        """The named tensors, whole, within the block. If they are sharded this is a collective step: all ranks enter
        with the same names in the same order."""
        ...

    def stamp(self) -> object:
        """A value that changes with the weights. A push fails if it changes before all is sent or, with a snapshot,
        before all is copied."""
        ...


@runtime_checkable
class ShardedSource(Protocol):
    """A `WeightSource` that can give its own shards, so that nothing is gathered."""

    def parts(self) -> Mapping[str, tuple[int, int]] | None:
        """Tensor → (first, count) of the elements on this rank, in C order; None if some tensors have no such part."""
        ...

    def shards(self, names: Sequence[str]) -> AbstractContextManager[Mapping[str, Any]]:
        """This rank's parts of the named tensors: contiguous, at lasting addresses. No collective step."""
        ...


class WeightSink(Protocol):
    """Weights that are used in this process.

    ``stage`` is called once per bucket. A ``double_buffer`` sink stores the bucket beside the weights in use; ``flip``
    swaps, and ``rollback`` swaps back. An ``in_place`` sink pauses its engine in ``begin``, overwrites the weights in
    ``stage``, and makes the engine ready in ``flip`` (caches computed by old weights must go); it cannot roll back.

    All methods are called on one thread, one after the other. An exception in any of them fails the push.

    Members below the line *optional* may be missing. A class that inherits from `WeightSink` gets their defaults.

    Attributes:
        mode: ``double_buffer`` or ``in_place``.
        framework: ``numpy`` or ``torch``: the type of the tensors that ``stage`` gets.
        device: the device of the weights: ``cpu`` or ``cuda:0``.
        gate: optional: the `VersionGate` through which the engine lets requests in; None: the receiver makes one.
    """

    mode: Mode
    framework: Framework
    device: str

    def manifest(self) -> Manifest | None:
        """The tensors that the sink takes; None: all that the source has (the engine checks names itself)."""
        ...

    def begin(self, version: int) -> None:
        """A push starts; tensors that an earlier push staged or kept for rollback are no longer needed."""
        ...

    def stage(self, tensors: Mapping[str, Any], *, keep: bool) -> None:
        """Take some tensors, by name.

        Args:
            tensors: name → tensor; tied names share one tensor.
            keep: the tensors' memory stays valid for as long as it is referred to, so the sink may use it directly;
                otherwise the memory is reused when this returns.
        """
        ...

    def flip(self, version: int) -> None:
        """All tensors are staged and verified: use them from now on."""
        ...

    def rollback(self) -> None:
        """Use the weights again that were in use before ``flip``."""
        ...

    def discard(self) -> None:
        """The push failed before ``flip``: forget the staged tensors."""
        ...

    # Optional. Hidden from type checkers, so that a sink without them is a `WeightSink` all the same.
    if not TYPE_CHECKING:
        gate: VersionGate | None = None

        def conclude(self, version: int) -> None:
            """Optional: all sinks have flipped, and requests are let in right after: resume paused requests."""

        def prepare_flip(self) -> None:
            """Optional: called while the last copies of a bucket run: do what a flip can do in advance."""

        def rooms(self, entries: Sequence[BucketEntry], *, keep: bool) -> Sequence[Any]:
            """Optional, with ``takes_parts``: see `OpenSink.rooms`."""
            return [None] * len(entries)

        def takes_parts(self) -> bool:
            """Optional, with ``rooms``: see `OpenSink.takes_parts`."""
            return False


@runtime_checkable
class OpenSink(Protocol):
    """The optional part of a `WeightSink` that lets the receiver write into the sink's memory.

    The receiver then copies and sums in one pass, and takes tensors in parts if every source rank sends its own.
    """

    def rooms(self, entries: Sequence[BucketEntry], *, keep: bool) -> Sequence[Any]:
        """Contiguous memory for each entry, in the entry's dtype; None for an entry that shall come by ``stage``.

        Args:
            keep: ``stage`` would get memory that may be used directly; false for parts of tensors.
        """
        ...

    def takes_parts(self) -> bool:
        """True if there is memory for all tensors, so that any of them may come in parts."""
        ...
