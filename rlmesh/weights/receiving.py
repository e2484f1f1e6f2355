"""`Receiver`: a sink's end. Takes the commands of a push, one after the other, and tells the gate what may be served.

Nothing here knows of RPC: `members` exports it, and tests call it as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from rlmesh.errors import WeightSyncError
from rlmesh.weights.channels.base import Inlet, RouteSettings
from rlmesh.weights.channels.registry import open_inlet
from rlmesh.weights.gate import VersionGate
from rlmesh.weights.pieces import checksums_of, is_torch, tensor_of
from rlmesh.weights.places import place_of
from rlmesh.weights.plan import Bucket, Channel
from rlmesh.weights.protocols import WeightSink
from rlmesh.weights.states import SinkState

logger = logging.getLogger(__name__)

Tap = Callable[[str, int], None]
"""Called with the name of a step and a bucket's number; for tests, which raise, wait or die in it."""


@dataclass(eq=False)
class _Session:
    """One plan of one `WeightSync`, as this sink sees it."""

    settings: RouteSettings
    channel: str
    buckets: tuple[Bucket, ...]
    inlet: Inlet


class Receiver:
    """One sink and its gate.

    Args:
        sink: the weights.
        who: the member's name.
        incarnation: how often it was restarted.
        node: its node's name, if it is not this machine's.
        tap: see `Tap`.
    """

    def __init__(
        self, sink: WeightSink, who: str, *, incarnation: int = 0, node: str | None = None, tap: Tap | None = None
    ) -> None:
        self.sink, self.who, self.incarnation = sink, who, incarnation
        gate: VersionGate | None = getattr(sink, "gate", None)
        self.gate = gate or VersionGate(who)
        self.gate.who = who
        self.state = SinkState(sink.mode, self.gate.version)
        self.tap: Tap = tap or (lambda step, bucket: None)
        self._node = node
        self._sessions: dict[str, _Session] = {}

    @property
    def version(self) -> int | None:
        """What is served now; None: nothing."""
        return self.gate.version

    def serving(self, timeout_s: float = 60.0) -> AbstractContextManager[int]:
        """See `VersionGate.serving`."""
        return self.gate.serving(timeout_s)

    # Commands of a plan.

    def describe(self) -> dict[str, Any]:
        manifest = self.sink.manifest()
        place = place_of(self.sink.device, self._node)
        return {
            "name": self.who,
            "incarnation": self.incarnation,
            "mode": self.sink.mode,
            "version": self.gate.version,
            "place": [place.node, place.shm, place.device, list(place.peers), place.cuda_ipc, place.why_no_ipc],
            "manifest": manifest.to_wire() if manifest is not None else None,
        }

    def attach(
        self, settings: RouteSettings, channel: Channel, buckets: Sequence[Any], info: Mapping[str, Any]
    ) -> None:
        """Connect to a channel."""
        self._use_device()
        inlet = open_inlet(channel, settings, self.who, info)
        cut = tuple(Bucket.from_wire(bucket) for bucket in buckets)
        self._sessions[settings.session] = _Session(settings, channel, cut, inlet)

    def detach(self, session: str) -> None:
        gone = self._sessions.pop(session, None)
        if gone is not None:
            gone.inlet.close()

    def close(self) -> None:
        for session in list(self._sessions):
            self.detach(session)

    # Commands of a push.

    def stage(
        self, session: str, push: int, version: int, index: int, payload: Any, checksums: Sequence[int], flip_s: float
    ) -> None:
        """Take and verify one bucket; the first one of a push begins it."""
        found = self._find(session)
        self._use_device()
        if self.state.push != push or self.state.phase != "staging":
            self._begin(found, push, version, flip_s)
        self.tap("stage", index)
        bucket = found.buckets[index]
        self._take(found, bucket, payload, checksums)
        found.inlet.done()
        self.state = self.state.add(push, index)
        self.tap("staged", index)

    def _take(self, found: _Session, bucket: Bucket, payload: Any, checksums: Sequence[int]) -> None:
        pieces = found.inlet.take(bucket, payload, found.settings.timeout_s)
        stage_summed = getattr(self.sink, "stage_summed", None)
        on_gpu = stage_summed is not None and any(is_torch(piece) and piece.is_cuda for piece in pieces)
        if found.settings.verify and not on_gpu:
            self._verify(bucket, checksums, checksums_of(pieces))
        tensors = {}
        for entry, piece in zip(bucket.entries, pieces, strict=True):
            tensor = tensor_of(piece, entry.dtype, entry.shape, self.sink.framework)
            tensors.update(dict.fromkeys((entry.name, *entry.tied), tensor))
        if found.settings.verify and on_gpu and stage_summed is not None:
            # One pass: the sums are of what the sink has copied.
            sums = stage_summed(tensors)
            self._verify(bucket, checksums, [sums[entry.name] for entry in bucket.entries])
        else:
            self.sink.stage(tensors, keep=found.inlet.keeps)

    def _begin(self, session: _Session, push: int, version: int, flip_s: float) -> None:
        self.abort(self.state.push)
        self._heed_gate()
        if self.sink.mode == "in_place":
            self.gate.close(f"version {version} is being written over version {self.state.version}", flip_s)
            self.gate.set_version(None, f"a push of version {version} overwrote its weights and was not concluded")
        self.state = self.state.begin(push, version, len(session.buckets))
        self.sink.begin(version)
        session.inlet.settle()

    def _verify(self, bucket: Bucket, sent: Sequence[int], here: Sequence[int]) -> None:
        wrong = [e.name for e, a, b in zip(bucket.entries, sent, here, strict=True) if a != b]
        if wrong:
            raise WeightSyncError(
                f"bucket {bucket.index} arrived altered: the checksums of {', '.join(wrong[:5])} "
                f"({len(wrong)} of {len(bucket.entries)} tensors) are not the source's"
            )

    def flip(self, push: int, version: int, flip_s: float) -> None:
        """Use the new weights, but serve nobody before `conclude`: another sink may still fail."""
        flipped = self.state.flip(push)
        self.tap("flip", -1)
        self.gate.close(f"the flip to version {version} is not concluded", flip_s)
        try:
            self.sink.flip(version)
        except BaseException:
            self.state = self.state.abort()
            self._undo(flipped=False)
            raise
        self.state = flipped

    def conclude(self, push: int) -> None:
        """All sinks have flipped: serve."""
        self.state = self.state.conclude(push)
        self.gate.set_version(self.state.version)
        conclude = getattr(self.sink, "conclude", None)
        if conclude is not None:
            conclude(self.state.version)
        self.gate.open()

    def abort(self, push: int | None) -> None:
        """Go back to what was before the push, if it is this one's that is under way."""
        if push is None or self.state.push != push:
            return
        flipped = self.state.phase == "flipped"
        self.state = self.state.abort()
        self._undo(flipped=flipped)

    def _undo(self, *, flipped: bool) -> None:
        try:
            if flipped and self.sink.mode == "double_buffer":
                self.sink.rollback()
            self.sink.discard()
        except Exception:
            # The sink cannot say what it holds: better nothing than something unknown.
            logger.exception("%s could not go back to version %s and serves nothing until the next push", self.who,
                             self.state.version)  # fmt: skip
            self.state = SinkState(self.sink.mode)
        if self.sink.mode == "in_place":
            self.state = SinkState("in_place")
        why = "a push that was under way failed" if self.state.version is None else ""
        self.gate.set_version(self.state.version, why)
        self.gate.open()

    def rollback(self, flip_s: float) -> int | None:
        """Serve the version before again."""
        self._heed_gate()
        back = self.state.rollback()
        self.gate.close(f"going back to version {back.version}", flip_s)
        try:
            self.sink.rollback()
            self.state = back
        except BaseException:
            self.state = SinkState(self.sink.mode)  # what it holds now is not known
            raise
        finally:
            self.gate.set_version(self.state.version, "going back to an earlier version failed")
            self.gate.open()
        return back.version

    def _heed_gate(self) -> None:
        """An engine may have given its weights up by itself (to sleep): then there is nothing to go back to."""
        if self.state.phase == "idle" and self.state.version != self.gate.version:
            self.state = SinkState(self.sink.mode, self.gate.version)

    def _use_device(self) -> None:
        """Each thread has a current GPU of its own; memory is opened for that of the sink."""
        if self.sink.device.startswith("cuda"):
            import torch

            torch.cuda.set_device(torch.device(self.sink.device))
            torch.cuda.current_stream().synchronize()

    def _find(self, session: str) -> _Session:
        found = self._sessions.get(session)
        if found is None:
            raise WeightSyncError(
                f"{self.who} knows nothing of this weight sync: it has restarted since, or was left out of the plan. "
                "The next push makes a new plan"
            )
        return found
