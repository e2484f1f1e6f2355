"""`Receiver`: executes the commands of a push at one sink, one at a time, and sets what its gate serves.

The module has no RPC: `rlmesh.weights.members` exports the commands, and tests call them directly.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlmesh.errors import WeightSyncError
from rlmesh.runtime.process import clock
from rlmesh.weights.channels.base import ChannelReceiver, RouteSettings, open_receiver
from rlmesh.weights.planning.buckets import Bucket, join_all
from rlmesh.weights.planning.device_location import location_of
from rlmesh.weights.planning.plan import Channel, Participant
from rlmesh.weights.planning.source_state import LastCommit
from rlmesh.weights.protocols import SINK, OpenSink, WeightSink, check_end
from rlmesh.weights.sink_state import SinkState, VersionGate
from rlmesh.weights.transfer.tensor_bytes import BucketCheck, stage_pieces

logger = logging.getLogger(__name__)

CLOSE_S = 2.0
ORDER_WAIT_S = 0.02
"""Seconds that a sink waits for the source rank that it should read first. The push ends with the last rank anyway."""

Tap = Callable[[str, int], None]
"""A hook of tests: called with the name of a step and a bucket's number; may raise, wait, or end the process."""


@dataclass(eq=False)
class _IncomingRoute:
    """A route from one rank of the source.

    Attributes:
        first: number of its first bucket, among all buckets of the session.
        next_command: (push, sequence number) of the next command: commands that are sent one after the other may
            overtake each other on their way to a thread.
    """

    settings: RouteSettings
    buckets: tuple[Bucket, ...]
    channel: ChannelReceiver
    share: tuple[int, int]
    first: int
    next_command: tuple[int, int] = (0, 0)
    positions: dict[int, int] = field(default_factory=dict)
    joined: dict[tuple[int, int], tuple[Bucket, range]] = field(default_factory=dict)
    checks: dict[tuple[int, int], BucketCheck] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.positions = {bucket.index: position for position, bucket in enumerate(self.buckets)}

    def run_of(self, index: int, count: int) -> tuple[Bucket, range]:
        """``count`` buckets from ``index`` on, joined into one, and their numbers among all buckets of the session."""
        found = self.joined.get((index, count))
        if found is None:
            at = self.positions[index]
            numbers = range(self.first + at, self.first + at + count)
            found = self.joined[index, count] = join_all(self.buckets[at : at + count]), numbers
        return found


@dataclass(eq=False)
class _ReceivingSession:
    """The routes of one session that lead to this sink, by source rank.

    Attributes:
        coming: the commands that have come and not ended: sequence number, and this sink's place in the route.
    """

    routes: dict[str, _IncomingRoute] = field(default_factory=dict)
    total: int = 0
    coming: list[tuple[int, int]] = field(default_factory=list)

    def is_next(self, push: int, place: tuple[int, int]) -> bool:
        """True if this command comes before all others, in an order in which each sink reads from another GPU.

        Each source rank names the sinks in another order, so that two sinks take the ranks in other orders too. Two
        sinks that read from one GPU at a time get half of the rate, while the links of the other GPU are idle.
        """
        if min(tuple(self.coming)) < place:
            return False
        turn, mine = place
        return turn > 0 or all(r.next_command[0] == push for r in self.routes.values() if r.share[0] < mine)


class Receiver:
    """One sink and its gate.

    Args:
        sink: the weights.
        who: the member's name.
        incarnation: the number of the member's restarts.
        node: the name of its node; None: this machine's.
        tap: see `Tap`.

    Raises:
        UsageError: ``sink`` lacks methods or attributes of a `WeightSink`.
    """

    def __init__(
        self, sink: WeightSink, who: str, *, incarnation: int = 0, node: str | None = None, tap: Tap | None = None
    ) -> None:
        check_end(sink, SINK, "weight sink", "ModuleSink(model) or ArraySink(arrays)")
        self.sink, self.who, self.incarnation = sink, who, incarnation
        self._open_sink = sink if isinstance(sink, OpenSink) else None
        gate: VersionGate | None = getattr(sink, "gate", None)
        self.gate = gate or VersionGate(who)
        self.gate.who = who
        self.state = SinkState(sink.mode, self.gate.version)
        self.tap = tap
        self._node = node
        self._sessions: dict[str, _ReceivingSession] = {}
        self._lock = threading.RLock()
        """Held by the command that runs."""
        self._changed = threading.Condition(self._lock)
        self._concluded_alone: tuple[int, float] | None = None
        """The push that this sink concluded itself, as the only sink, and the flip timeout in seconds."""
        self.last_commit: LastCommit | None = None
        """The last commit here; a `WeightSync` of a restarted process asks for it."""
        self._coming_commit: LastCommit | None = None
        self._commit_before: LastCommit | None = None

    @property
    def version(self) -> int | None:
        """The version that is served; None: no version is."""
        return self.gate.version

    def serving(self, timeout_s: float = 60.0) -> AbstractContextManager[int]:
        """See `VersionGate.serving`."""
        return self.gate.serving(timeout_s)

    # Commands of a session.

    def describe(self) -> Participant:
        with self._lock:
            return Participant(
                self.who, self.incarnation, location_of(self.sink.device, self._node), self.sink.manifest(),
                self.sink.mode, takes_parts=self._open_sink is not None and self._open_sink.takes_parts(),
                version=self.gate.version, last_commit=self.last_commit,
            )  # fmt: skip

    def attach(
        self, settings: RouteSettings, channel: Channel, buckets: tuple[Bucket, ...], info: Mapping[str, Any]
    ) -> None:
        """Connect to the channel of a route."""
        with self._lock:
            self._use_device()
            receiver = open_receiver(channel, settings, self.who, info)
            session = self._sessions.setdefault(settings.session, _ReceivingSession())
            share = settings.sinks.index(self.who), len(settings.sinks)
            session.routes[settings.source] = _IncomingRoute(settings, buckets, receiver, share, session.total)
            session.total = sum(len(route.buckets) for route in session.routes.values())

    def has(self, session: str) -> bool:
        """True if the sink is attached to this session; false after a restart or a new ``receive_weights()``."""
        return session in self._sessions

    def detach(self, session: str) -> None:
        """Close the channels of a session."""
        with self._lock:
            self._leave(session)
            self._changed.notify_all()

    def _leave(self, session: str) -> None:
        gone = self._sessions.pop(session, None)
        for route in gone.routes.values() if gone is not None else ():
            route.channel.close()

    def close(self) -> None:
        """Leave all sessions; waits for the command that runs, at most `CLOSE_S` seconds."""
        locked = self._lock.acquire(timeout=CLOSE_S)
        for session in list(self._sessions):
            self._leave(session)
        if locked:
            self._changed.notify_all()
            self._lock.release()

    # Commands of a push.

    def stage(
        self, session: str, push: int, version: int, source: str, turn: int, buckets: tuple[int, int], payload: Any,
        checksums: Sequence[int], flip_s: float,
    ) -> None:  # fmt: skip
        """Take and verify one bucket, or several joined ones, of a source rank; the first bucket begins the push.

        Args:
            turn: zero-based sequence number of the command, per push and source rank.
            buckets: number of the first bucket, and how many.
            checksums: of the entries; see `BucketTransfer`.

        Raises:
            WeightSyncError: the session is unknown, an earlier command did not arrive, or checksums differ.
            ChannelBroken: the bytes did not arrive.
        """
        found = self._find(session)
        route = found.routes[source]
        place = turn, route.share[0]
        found.coming.append(place)  # before the lock: who holds it next decides by what has come
        with self._lock:
            try:
                if turn and route.next_command != (push, turn):
                    arrived = clock.wait_for(
                        self._changed,
                        lambda: route.next_command == (push, turn) or self._sessions.get(session) is not found,
                        route.settings.timeout_s,
                    )
                    if not arrived:
                        raise WeightSyncError(f"the command before bucket {buckets[0]} did not come to {self.who}")
                if route.settings.on_gpu and len(found.routes) > 1:
                    clock.wait_for(self._changed, lambda: found.is_next(push, place), ORDER_WAIT_S)
                self._find(session)
                try:
                    self._stage(found, route, push, version, buckets, payload, checksums, flip_s)
                finally:
                    route.next_command = push, turn + 1
            finally:
                found.coming.remove(place)
                self._changed.notify_all()

    def _stage(
        self, session: _ReceivingSession, route: _IncomingRoute, push: int, version: int, buckets: tuple[int, int],
        payload: Any, checksums: Sequence[int], flip_s: float,
    ) -> None:  # fmt: skip
        self._use_device()
        if self.state.push != push or self.state.phase != "staging":
            self._begin(session, push, version, flip_s)
        bucket, numbers = route.run_of(*buckets)
        if self.tap is not None:
            self._tap("stage", *buckets)
        self._take(route, bucket, payload, checksums)
        route.channel.done()
        self.state = self.state.add(push, *numbers)
        if self.tap is not None:
            self._tap("staged", *buckets)

    def _take(self, route: _IncomingRoute, bucket: Bucket, payload: Any, checksums: Sequence[int]) -> None:
        """Take, verify and stage a bucket. No reference to its pieces may be left when ``done`` is called."""
        channel, run = route.channel, (bucket.index, bucket.count)
        pieces = channel.take(bucket, payload, route.settings.timeout_s)
        check = route.checks.get(run) if route.settings.verify else None
        if route.settings.verify and check is None:
            check = route.checks[run] = BucketCheck(bucket, pieces, route.share)
        stage_pieces(
            self.sink, self._open_sink, bucket, pieces, keep=channel.keeps, check=check,
            sent=partial(channel.checksums, checksums) if channel.late else checksums,
            ready=channel.ready if channel.late else None,
        )  # fmt: skip

    def _tap(self, step: str, bucket: int = -1, count: int = 1) -> None:
        if self.tap is not None:
            for number in range(bucket, bucket + count):
                self.tap(step, number)

    def _begin(self, session: _ReceivingSession, push: int, version: int, flip_s: float) -> None:
        if self.state.push is not None:
            self.abort(self.state.push)
        self._adopt_gate_version()
        self._concluded_alone = None
        if self.sink.mode == "in_place":
            self.gate.close(f"version {version} is being written over version {self.state.version}", flip_s)
            self.gate.set_version(None, f"a push of version {version} overwrote its weights and was not concluded")
        self.state = self.state.begin(push, version, session.total)
        self.sink.begin(version)
        for route in session.routes.values():
            route.channel.settle()

    def flip(
        self, push: int, version: int, flip_s: float, alone: bool = False, left: Sequence[Any] | None = None
    ) -> None:
        """Use the new weights, but serve no request before `conclude`: another sink may still fail.

        Args:
            flip_s: how long running requests may delay the flip, in seconds.
            alone: this is the only sink, which concludes at once.
            left: fields of the `LastCommit` to record when this push is committed.
        """
        with self._lock:
            flipped = self.state.flip(push)
            self._tap("flip")
            self.gate.close(f"the flip to version {version} is not concluded", flip_s)
            try:
                self.sink.flip(version)
            except BaseException:
                self.state = self.state.abort()
                self._undo(flipped=False)
                raise
            self.state = flipped
            self._coming_commit = LastCommit(*left) if left is not None else None
            if alone:
                self.conclude(push)
                self._concluded_alone = push, flip_s

    def conclude(self, push: int) -> None:
        """All sinks have flipped: serve the new version."""
        with self._lock:
            self.state = self.state.conclude(push)
            self._commit_before, self.last_commit = self.last_commit, self._coming_commit
            self.gate.set_version(self.state.version)
            conclude = getattr(self.sink, "conclude", None)
            if conclude is not None:
                conclude(self.state.version)
            self.gate.open()

    def abort(self, push: int | None) -> None:
        """Return to the state before the push, if it is the push under way."""
        with self._lock:
            if self._concluded_alone is not None and self._concluded_alone[0] == push:
                # This sink concluded too late: the coordinator has given the push up.
                self._unconclude(self._concluded_alone[1])
            if push is None or self.state.push != push:
                return
            flipped = self.state.phase == "flipped"
            self.state = self.state.abort()
            self._undo(flipped=flipped)

    def _unconclude(self, flip_s: float) -> None:
        self._concluded_alone = None
        self.last_commit = self._commit_before
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
            # The sink's contents are unknown: no weights are better than unknown ones.
            logger.exception("%s could not go back to version %s and serves nothing until the next push", self.who,
                             self.state.version)  # fmt: skip
            self.state = SinkState(self.sink.mode)
        if self.sink.mode == "in_place":
            self.state = SinkState("in_place")
        why = "a push that was under way failed" if self.state.version is None else ""
        self.gate.set_version(self.state.version, why)
        self.gate.open()

    def rollback(self, flip_s: float) -> int | None:
        """Serve the version before the last committed one again; returns it.

        Raises:
            WeightSyncError: there is none, or running requests took longer than ``flip_s`` seconds.
        """
        with self._lock:
            self._adopt_gate_version()
            self._concluded_alone = None
            back = self.state.rollback()
            self.gate.close(f"going back to version {back.version}", flip_s)
            try:
                self.sink.rollback()
                self.state = back
            except BaseException:
                self.state = SinkState(self.sink.mode)  # the sink's contents are unknown
                raise
            finally:
                self.gate.set_version(self.state.version, "going back to an earlier version failed")
                self.gate.open()
            return back.version

    def _adopt_gate_version(self) -> None:
        """Forget the earlier versions if the engine gave its weights up by itself, for instance to sleep."""
        if self.state.phase == "idle" and self.state.version != self.gate.version:
            self.state = SinkState(self.sink.mode, self.gate.version)

    def _use_device(self) -> None:
        """Make the sink's GPU the current one of this thread: memory is opened for the current GPU."""
        if self.sink.device.startswith("cuda"):
            import torch

            torch.cuda.set_device(torch.device(self.sink.device))

    def _find(self, session: str) -> _ReceivingSession:
        found = self._sessions.get(session)
        if found is None:
            raise WeightSyncError(
                f"{self.who} does not take part in this weight sync: it has restarted, called receive_weights(), or "
                "was left out of the plan. The next push makes a new plan"
            )
        return found
