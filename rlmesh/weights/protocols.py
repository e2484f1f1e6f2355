"""What a trainer must give and what an engine must take: `WeightSource` and `WeightSink`.

Both are small on purpose: an engine of your own needs the six methods of `WeightSink`, and nothing else of rlmesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from rlmesh.weights.manifest import Manifest
from rlmesh.weights.plan import Mode

Framework = Literal["numpy", "torch"]


class WeightSource(Protocol):
    """Weights that are trained here, whole or as a shard of them."""

    device: str
    """Where they are: ``cpu`` or ``cuda:0``."""
    lasting: bool
    """`gather` gives the weights themselves, which stay where they are; not what it makes for the occasion."""

    def manifest(self) -> Manifest:
        """All tensors, whole: the same on every rank."""
        ...

    def gather(self, names: Sequence[str]) -> AbstractContextManager[Mapping[str, Any]]:
        """These tensors, whole, for as long as the block lasts. Where they are sharded this is a collective step: all
        ranks enter with the same names in the same order."""
        ...

    def stamp(self) -> object:
        """A value that changes when the weights do: a fenced push fails if it is another one at its end."""
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
