"""`Receiver`: a sink's end. Takes the commands of a push, one after the other, and tells the gate what may be served.

Nothing here knows of RPC: `members` exports it, and tests call it as it is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from rlmesh.errors import WeightSyncError
from rlmesh.runtime.process import clock
from rlmesh.weights.channels.base import ChannelReceiver, RouteSettings
from rlmesh.weights.channels.registry import open_inlet
from rlmesh.weights.planning.buckets import Bucket, join_all
from rlmesh.weights.planning.device_location import place_of
from rlmesh.weights.planning.plan import Channel
from rlmesh.weights.planning.sink_state import SinkState
from rlmesh.weights.planning.source_state import Left
from rlmesh.weights.protocols import SINK, OpenSink, WeightSink, check_end
from rlmesh.weights.transfer.bucket_check import BucketCheck
from rlmesh.weights.transfer.staging import stage_pieces
from rlmesh.weights.version_gate import VersionGate

logger = logging.getLogger(__name__)

CLOSE_S = 2.0

Tap = Callable[[str, int], None]
"""Called with the name of a step and a bucket's number; for tests, which raise, wait or die in it."""


P = ParamSpec("P")
R = TypeVar("R")


def _command(method: Callable[Concatenate[Receiver, P], R]) -> Callable[Concatenate[Receiver, P], R]:
    """One at a time, on whatever threads they come."""

    @wraps(method)
    def one_at_a_time(self: Receiver, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._commands:
            return method(self, *args, **kwargs)

    return one_at_a_time


@dataclass(eq=False)
class _IncomingRoute:
    """From one rank of the source.

    Attributes:
        first: its buckets are counted from there on, among all of the session.
        turn: which command of which push comes next: commands that are sent one after the other may overtake each
            other on their way to a thread.
    """

    settings: RouteSettings
    buckets: tuple[Bucket, ...]
    inlet: ChannelReceiver
    share: tuple[int, int]
    first: int
    turn: tuple[int, int] = (0, 0)
    positions: dict[int, int] = field(default_factory=dict)
    joined: dict[tuple[int, int], Bucket] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.positions = {bucket.index: position for position, bucket in enumerate(self.buckets)}

    def bucket(self, index: int, count: int) -> Bucket:
        """So many buckets from that one on, as one."""
        found = self.joined.get((index, count))
        if found is None:
            at = self.positions[index]
            found = self.joined[index, count] = join_all(self.buckets[at : at + count])
        return found

    def numbers(self, index: int, count: int) -> range:
        """What these buckets are among all of the session."""
        at = self.first + self.positions[index]
        return range(at, at + count)


@dataclass(eq=False)
class _ReceivingSession:
    """One plan of one `WeightSync`, as this sink sees it: a route from each rank of the source that sends to it."""

    routes: dict[str, _IncomingRoute] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(len(route.buckets) for route in self.routes.values())


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
        check_end(sink, SINK, "weight sink", "ModuleSink(model) or ArraySink(arrays)")
        self.sink, self.who, self.incarnation = sink, who, incarnation
        gate: VersionGate | None = getattr(sink, "gate", None)
        self.gate = gate or VersionGate(who)
        self.gate.who = who
        self.state = SinkState(sink.mode, self.gate.version)
        self.tap: Tap = tap or (lambda step, bucket: None)
        self._node = node
        self._sessions: dict[str, _ReceivingSession] = {}
        self._commands = threading.Condition()
        """Held by the command that runs. It is reentrant."""
        self._alone: tuple[int, float] | None = None
        """The push that it concluded by itself, as the only sink, and how long its requests may hold up a flip."""
        self.left: Left | None = None
        """What the last commit left of the source; for a `WeightSync` that does not know, since its process is new."""
        self._leaving: Left | None = None
        self._left_before: Left | None = None

    @property
    def version(self) -> int | None:
        """What is served now; None: nothing."""
        return self.gate.version

    def serving(self, timeout_s: float = 60.0) -> AbstractContextManager[int]:
        """See `VersionGate.serving`."""
        return self.gate.serving(timeout_s)

    # Commands of a plan.

    @_command
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
            "takes_parts": isinstance(self.sink, OpenSink) and self.sink.takes_parts(),
            "left": self.left.to_wire() if self.left is not None else None,
        }

    @_command
    def attach(
        self, settings: RouteSettings, channel: Channel, buckets: Sequence[Any], info: Mapping[str, Any]
    ) -> None:
        """Connect to a channel."""
        self._use_device()
        inlet = open_inlet(channel, settings, self.who, info)
        cut = tuple(Bucket.from_wire(bucket) for bucket in buckets)
        session = self._sessions.setdefault(settings.session, _ReceivingSession())
        share = settings.sinks.index(self.who), len(settings.sinks)
        session.routes[settings.source] = _IncomingRoute(settings, cut, inlet, share, session.total)

    def has(self, session: str) -> bool:
        """Is it connected to this plan? Not after a restart, nor when a role has said anew where weights go."""
        return session in self._sessions

    @_command
    def detach(self, session: str) -> None:
        self._leave(session)
        self._commands.notify_all()

    def _leave(self, session: str) -> None:
        gone = self._sessions.pop(session, None)
        for route in gone.routes.values() if gone is not None else ():
            route.inlet.close()

    def close(self) -> None:
        """Leave all plans; waits for the command that runs, but not for ever."""
        mine = self._commands.acquire(timeout=CLOSE_S)
        for session in list(self._sessions):
            self._leave(session)
        if mine:
            self._commands.notify_all()
            self._commands.release()

    # Commands of a push.

    def stage(
        self, session: str, push: int, version: int, source: str, turn: int, buckets: tuple[int, int], payload: Any,
        checksums: Sequence[int], flip_s: float,
    ) -> None:  # fmt: skip
        """Take and verify one bucket of a rank of the source, or several as one; the first of a push begins it.

        Args:
            turn: the how-manieth command of the push and of this rank it is, from 0 on.
            buckets: number of the first, and how many.
            checksums: of its entries; see `BucketTransfer`.
        """
        with self._commands:
            found = self._find(session)
            route = found.routes[source]
            came = clock.wait_for(
                self._commands,
                lambda: not turn or route.turn == (push, turn) or self._sessions.get(session) is not found,
                route.settings.timeout_s,
            )
            if not came:
                raise WeightSyncError(f"the command before bucket {buckets[0]} did not come to {self.who}")
            self._find(session)
            try:
                self._stage(found, route, push, version, buckets, payload, checksums, flip_s)
            finally:
                route.turn = push, turn + 1
                self._commands.notify_all()

    def _stage(
        self, found: _ReceivingSession, route: _IncomingRoute, push: int, version: int, buckets: tuple[int, int],
        payload: Any, checksums: Sequence[int], flip_s: float,
    ) -> None:  # fmt: skip
        self._use_device()
        if self.state.push != push or self.state.phase != "staging":
            self._begin(found, push, version, flip_s)
        index, count = buckets
        bucket = route.bucket(index, count)
        for number in range(index, index + count):
            self.tap("stage", number)
        self._take(route, bucket, payload, checksums)
        route.inlet.done()
        self.state = self.state.add(push, *route.numbers(index, count))
        for number in range(index, index + count):
            self.tap("staged", number)

    def _take(self, route: _IncomingRoute, bucket: Bucket, payload: Any, checksums: Sequence[int]) -> None:
        inlet = route.inlet
        pieces = inlet.take(bucket, payload, route.settings.timeout_s)
        check = None
        if route.settings.verify:
            check = BucketCheck(bucket, pieces, lambda: inlet.checksums(checksums), route.share)
        stage_pieces(self.sink, bucket, pieces, keep=inlet.keeps, check=check, ready=inlet.ready)

    def _begin(self, session: _ReceivingSession, push: int, version: int, flip_s: float) -> None:
        self.abort(self.state.push)
        self._heed_gate()
        self._alone = None
        if self.sink.mode == "in_place":
            self.gate.close(f"version {version} is being written over version {self.state.version}", flip_s)
            self.gate.set_version(None, f"a push of version {version} overwrote its weights and was not concluded")
        self.state = self.state.begin(push, version, session.total)
        self.sink.begin(version)
        for route in session.routes.values():
            route.inlet.settle()

    @_command
    def flip(
        self, push: int, version: int, flip_s: float, alone: bool = False, left: Sequence[Any] | None = None
    ) -> None:
        """Use the new weights, but serve nobody before `conclude`: another sink may still fail. A sink that is alone
        concludes at once. ``left``: what the commit leaves, see `Left`."""
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
        self._leaving = Left(*left) if left is not None else None
        if alone:
            self.conclude(push)
            self._alone = push, flip_s

    @_command
    def conclude(self, push: int) -> None:
        """All sinks have flipped: serve."""
        self.state = self.state.conclude(push)
        self._left_before, self.left = self.left, self._leaving
        self.gate.set_version(self.state.version)
        conclude = getattr(self.sink, "conclude", None)
        if conclude is not None:
            conclude(self.state.version)
        self.gate.open()

    @_command
    def abort(self, push: int | None) -> None:
        """Go back to what was before the push, if it is this one's that is under way."""
        if self._alone is not None and self._alone[0] == push:
            # It concluded, but too late: its coordinator has given the push up.
            self._unconclude(self._alone[1])
        if push is None or self.state.push != push:
            return
        flipped = self.state.phase == "flipped"
        self.state = self.state.abort()
        self._undo(flipped=flipped)

    def _unconclude(self, flip_s: float) -> None:
        self._alone = None
        self.left = self._left_before
        try:
            self.rollback(flip_s)
        except Exception as error:
            logger.warning("%s cannot go back from version %s, whose push failed, and serves nothing until the next "
                           "push: %s", self.who, self.state.version, error)  # fmt: skip
            self.state = SinkState(self.sink.mode)
            self.gate.set_version(None, "a push that was under way failed")

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

    @_command
    def rollback(self, flip_s: float) -> int | None:
        """Serve the version before again."""
        self._heed_gate()
        self._alone = None
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

    def _find(self, session: str) -> _ReceivingSession:
        found = self._sessions.get(session)
        if found is None:
            raise WeightSyncError(
                f"{self.who} knows nothing of this weight sync: it has restarted or called receive_weights() since, "
                "or was left out of the plan. The next push makes a new plan"
            )
        return found
