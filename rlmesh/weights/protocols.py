"""What a trainer must give and what an engine must take: `WeightSource` and `WeightSink`.

Both are small on purpose: an engine of your own needs the six methods of `WeightSink`, and nothing else of rlmesh.
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

Framework = Literal["numpy", "torch"]

SOURCE = ("device", "lasting", "manifest", "gather", "stamp")
SINK = ("mode", "framework", "device", "manifest", "begin", "stage", "flip", "rollback", "discard")


def check_end(end: object, needs: Sequence[str], what: str, examples: str) -> None:
    """Raises:
    UsageError: ``end`` lacks some of what a source or a sink has.
    """
    if missing := [name for name in needs if not hasattr(end, name)]:
        raise UsageError(
            f"{end!r:.80} ({type(end).__name__}) is no {what}: it has no {', '.join(missing)}. Give {examples}, or an "
            "object of your own with these (docs/writing-an-engine.md)"
        )


class WeightSource(Protocol):
    """Weights that are trained here, whole or as a shard of them."""

    device: str
    """Where they are: ``cpu`` or ``cuda:0``."""
    lasting: bool
    """`gather` gives the weights themselves, which stay where they are; not what it makes for the occasion."""

    def manifest(self) -> Manifest:
        """All tensors, whole, as they are now: the same on every rank. Asked at every push, so it should be cheap, and
        an equal one as long as nothing was replaced."""
        ...

    def gather(self, names: Sequence[str]) -> AbstractContextManager[Mapping[str, Any]]:
        """These tensors, whole, for as long as the block lasts. Where they are sharded this is a collective step: all
        ranks enter with the same names in the same order."""
        ...

    def stamp(self) -> object:
        """A value that changes when the weights do: a push fails if it is another one when all is sent or, with a
        snapshot, when all is copied."""
        ...


@runtime_checkable
class ShardedSource(Protocol):
    """A `WeightSource` that may give its own shards, so that nothing is gathered."""

    def parts(self) -> Mapping[str, tuple[int, int]] | None:
        """Which elements of each tensor are here, in C order: (first, how many). None: it has no such shards, or not
        of all tensors."""
        ...

    def shards(self, names: Sequence[str]) -> AbstractContextManager[Mapping[str, Any]]:
        """These tensors, as far as they are here: contiguous, and where they are for good. No collective step."""
        ...


class WeightSink(Protocol):
    """Weights that are used here.

    ``stage`` comes once per bucket. A ``double_buffer`` sink puts them beside those in use; ``flip`` swaps, and
    ``rollback`` swaps back. An ``in_place`` sink pauses its engine in ``begin``, overwrites in ``stage``, and makes
    the engine ready in ``flip`` (caches of old weights must go); it has nothing to go back to.

    All methods are called on one thread, one after the other. What they raise fails the push.

    Two more are used where a sink has them: an attribute ``gate``, the `VersionGate` that its engine lets requests in
    by (else the receiver makes one), and a method ``conclude(version)``, called when all sinks have flipped and right
    before requests are let in: kept requests go on then.
    """

    mode: Mode
    framework: Framework
    device: str
    """Where the weights are: ``cpu`` or ``cuda:0``."""

    def manifest(self) -> Manifest | None:
        """What it takes; None: whatever the source has (the engine checks names itself)."""
        ...

    def begin(self, version: int) -> None:
        """A push starts; what an earlier one staged or kept for rollback is no longer needed."""
        ...

    def stage(self, tensors: Mapping[str, Any], *, keep: bool) -> None:
        """Take some tensors, by name. With ``keep`` their memory stays valid for as long as somebody refers to it, so
        it may be used as it is; otherwise it is reused when this returns."""
        ...

    def flip(self, version: int) -> None:
        """All are staged and verified: use them from now on."""
        ...

    def rollback(self) -> None:
        """Use those again that were in use before ``flip``."""
        ...

    def discard(self) -> None:
        """The push failed before ``flip``: forget what was staged."""
        ...


@runtime_checkable
class OpenSink(Protocol):
    """A `WeightSink` whose memory may be written to by whoever receives: in one pass with the checksums, and in parts
    where every rank of the source sends its own."""

    def rooms(self, entries: Sequence[BucketEntry], *, keep: bool) -> Sequence[Any]:
        """Contiguous memory for each tensor, in the type that travels; None for what shall come by ``stage``. With
        ``keep`` that would get memory which may be used as it is; not asked for parts."""
        ...

    def takes_parts(self) -> bool:
        """Is there room for all tensors, so that any of them may come in parts?"""
        ...
