"""`WeightSync`: brings the weights of a source to its sinks, on all of them or on none.

::

    sync = WeightSync(RoleGroup("ACTOR"), RoleGroup("ROLLOUT"))
    future = sync.push(version)         # returns at once
    …                                   # train on, if the source is snapshotted
    future.result()                     # committed: all sinks serve it

A push has two phases. *Stage*: the source's ranks give bucket after bucket to the sinks, which verify it and keep it
beside what they serve (`double_buffer`) or write it over their weights, serving nothing meanwhile (`in_place`).
*Commit*: when every sink has everything, all flip; when all have flipped, all serve. Whatever fails before that undoes
it everywhere. The bytes go by the channels of the plan, the commands by ordinary calls.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlmesh.errors import UsageError, WeightSyncError
from rlmesh.runtime.argument_types import require, require_number, require_seconds
from rlmesh.runtime.default_runtime import default_runtime
from rlmesh.runtime.future import Future
from rlmesh.runtime.group import RoleGroup
from rlmesh.runtime.runtime import Runtime
from rlmesh.weights.manifest import Casts
from rlmesh.weights.members import MOST_VERSION
from rlmesh.weights.planning.plan import DEFAULT_BUCKET_BYTES, SyncOptions, WeightPlan
from rlmesh.weights.planning.source_state import ConfirmedVersion, Left, check, require_same
from rlmesh.weights.protocols import WeightSource
from rlmesh.weights.transfer.delivery import DeliveryFailure
from rlmesh.weights.transfer.endpoints import LocalSource, MemberEndpoint
from rlmesh.weights.transfer.sync_session import Answers, SyncSession, Timeouts

_pushes = itertools.count(1)

logger = logging.getLogger(__name__)

LEAVE_S = 0.5
"""How long an error that leaves the block of a `WeightSync` is held up."""


@dataclass(frozen=True, slots=True)
class PushReport:
    """A push that was committed.

    Attributes:
        version: what all ``sinks`` serve now.
        nbytes: bytes that each sink got.
        captured_s: from the start until the source could train on.
        staged_s: until all sinks had everything.
        seconds: until all sinks served it.
    """

    version: int
    sinks: tuple[str, ...]
    nbytes: int
    captured_s: float
    staged_s: float
    seconds: float


class WeightSync:
    """From one source to its sinks.

    Args:
        source: the role that trains (its class inherits `SendsWeights`), or a `WeightSource` of this process.
        sinks: the role that samples (`ReceivesWeights`), or several.
        snapshot: copy the weights first, so that the source may train on while they travel; otherwise the source is
            fenced: no optimizer step before the last sink has everything.
        verify: make checksums of all tensors at the source and compare them at the sinks.
        allow_cast: changes of element types that are allowed: ``{"float32": "bfloat16"}``, or True for all floats.
        channel: "auto", one for all, or a mapping from role or member: "shm", "cuda_ipc", "collective", "stream".
        bucket_bytes: what is staged and acknowledged at a time.
        bucket_timeout_s: how long a sink may take to acknowledge a bucket.
        flip_timeout_s: how long a sink's running requests may hold up a flip.
        timeout_s: how long a push may take in all.
        connect_timeout_s: how long members may take to answer when the plan is made.
        restored: the version at which the source stands, if whoever makes this has restored it: see `source_restored`.
    """

    def __init__(
        self, source: RoleGroup[Any] | WeightSource, sinks: RoleGroup[Any] | Sequence[RoleGroup[Any]], *,
        snapshot: bool = False, verify: bool = True,
        allow_cast: bool | Mapping[str, str] | Iterable[tuple[str, str]] = False,
        channel: str | Mapping[str, str] = "auto", bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        bucket_timeout_s: float = 60.0, flip_timeout_s: float = 60.0, timeout_s: float = 600.0,
        connect_timeout_s: float = 60.0, restored: int | None = None, runtime: Runtime | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        given: Any = [sinks] if isinstance(sinks, RoleGroup) else sinks
        groups = list(given) if isinstance(given, Iterable) else []
        if not groups or not all(isinstance(group, RoleGroup) for group in groups):
            raise UsageError(
                "WeightSync(source, sinks): name at least one role that receives weights, as RoleGroup('ROLLOUT'), not "
                f"{sinks!r:.80}"
            )
        for what, flag in (("snapshot", snapshot), ("verify", verify)):
            require(f"WeightSync({what}=…)", flag, bool, "True or False")
        require_number("WeightSync(bucket_bytes=…)", bucket_bytes, 1, 1 << 50)
        for what, seconds in (
            ("bucket_timeout_s", bucket_timeout_s), ("flip_timeout_s", flip_timeout_s), ("timeout_s", timeout_s),
            ("connect_timeout_s", connect_timeout_s),
        ):  # fmt: skip
            require_seconds(f"WeightSync({what}=…)", seconds)
        if runtime is not None:
            require("WeightSync(runtime=…)", runtime, Runtime, "a Runtime")
        runtime = runtime or groups[0]._runtime or default_runtime()
        self._sinks = MemberEndpoint(groups, runtime)
        self._source = (
            MemberEndpoint([source], runtime) if isinstance(source, RoleGroup) else LocalSource(source, runtime)
        )
        self._wishes = SyncOptions(
            bucket_bytes, Casts.of(allow_cast), channel, "snapshot" if snapshot else "fenced", verify
        )
        self._timeouts = Timeouts(bucket_timeout_s, flip_timeout_s, timeout_s, connect_timeout_s)
        self._clock = clock
        self._lock = threading.Lock()
        self._link: SyncSession | None = None
        self._running: threading.Thread | None = None
        self._closed = False
        self.version: int | None = None
        """What was committed last."""
        self._left: Left | None = None
        self._told: ConfirmedVersion | None = None
        if restored is not None:
            self.source_restored(restored)

    # For users.

    def plan(self) -> WeightPlan:
        """Who gets what from whom, by which channel: made now if there is none, or if members have changed,
        or what they send from or receive into."""
        with self._lock:
            self._wait_for_last()
            return self._current_link().plan

    def push(self, version: int) -> Future[PushReport]:
        """Bring the source's weights to all sinks, under this number.

        Returns when the source has been told to give its weights, so a call to it that is made afterwards (an
        optimizer step) comes after that; of a source in this process, when the weights may be changed. One push at a
        time: this one first waits for the last.

        Raises (here, or by the future):
            SourceRestarted: a rank of the source is not where the last push left it, since it restarted: what it had
                learnt is gone.
            WeightSyncError: nothing was committed; names receiver and bucket.
        """
        require_number("push(version)", version, 0, MOST_VERSION)
        with self._lock:
            self._wait_for_last()
            return self._finish_later(self._capture(version), done=True)

    def source_restored(self, version: int) -> None:
        """Say that the source stands at ``version`` now, all of its ranks as they are: the caller has put them there.

        A role says it by itself, ``send_weights(source, restored=version)``. This is for roles that do not, and for
        callers that have gone back to an earlier version than the one that was pushed last. A rank that restarts
        afterwards is refused again.
        """
        require_number("source_restored(version)", version, 0, MOST_VERSION)
        with self._lock:
            self._told = ConfirmedVersion(version, dict(self._source.incarnations()))

    def catch_up(self) -> tuple[str, ...]:
        """Bring the last committed version to the sinks that do not serve it, since they restarted or joined later;
        gives their names. The source must still have those weights.

        Raises:
            SourceRestarted: it restarted, and does not stand at that version.
            WeightSyncError: it was trained on since, as its stamp says; nothing was committed.
        """
        with self._lock:
            self._wait_for_last()
            if self.version is None:
                raise WeightSyncError("no version was committed yet: push(version) first")
            behind = self._sinks.behind(self.version, self._timeouts.connect_s)
            if behind:
                link = SyncSession.open(self._source, self._sinks, self._wishes, self._timeouts, only=behind)
                try:
                    self._check_source(link, self.version, same=True)
                    push = self._capture_over(link, self.version, self._clock(), again=True)
                    self._finish_later(push, done=False).result()
                finally:
                    link.close()
            return tuple(sorted(behind))

    def rollback(self) -> int:
        """Let all sinks serve the version before again; only `double_buffer` sinks can, until the next push.

        Raises:
            WeightSyncError: a sink could not; the others have not gone back either, or say that they have.
        """
        with self._lock:
            self._wait_for_last()
            self.version = self._sinks.rollback(self._timeouts.flip_s, self._timeouts.flip_s + self._timeouts.bucket_s)
            return self.version

    def close(self) -> None:
        """Wait for the push under way, and free what the channels hold. Sinks serve on."""
        with self._lock:
            if self._closed:
                return
            self._wait_for_last()
            self._closed = True
            self._drop_link()
        self._source.close()

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close it. After an error nobody waits for members that are busy: what is not closed by then follows."""
        if kind is None:
            self.close()
            return
        closing = threading.Thread(target=self._close_after_error, name="rlmesh-weights-close", daemon=True)
        closing.start()
        closing.join(LEAVE_S)

    def _close_after_error(self) -> None:
        try:
            self.close()
        except Exception as error:
            logger.info("a weight sync was left on an error, and not all of it could be closed: %s", error)

    # A push.

    def _wait_for_last(self) -> None:
        if self._closed:
            raise UsageError("this WeightSync is closed")
        running, self._running = self._running, None
        if running is not None and running is not threading.current_thread():
            running.join()

    def _current_link(self) -> SyncSession:
        link = self._last_link()
        return link if link is not None and link.is_open(link.ask()) else self._new_link()

    def _last_link(self) -> SyncSession | None:
        """That of the last push, if it may still do."""
        link = self._link
        if link is not None and (link.failed or not link.is_of(self._source, self._sinks)):
            self._drop_link()
        return self._link

    def _new_link(self) -> SyncSession:
        self._drop_link()
        self._link = SyncSession.open(self._source, self._sinks, self._wishes, self._timeouts)
        return self._link

    def _drop_link(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _check_source(self, link: SyncSession, version: int, *, same: bool = False) -> None:
        """Is the source where the last push left it? Asked once for each plan, and when the caller has said more.
        ``same``: it must stand at this very version.

        Raises:
            SourceRestarted: it is not.
        """
        told = self._told
        if link.checked and told is None:
            return
        left = self._left or link.left
        if self._left is None and told is None and left is not None and version < left.version:
            logger.warning(
                "version %d is pushed, but the source sent version %d last, to another WeightSync: unless it went "
                "back, as send_weights(restored=…) or source_restored() would say, these are weights of that or later",
                version, left.version,
            )  # fmt: skip
        left = link.leaves(told.version) if link.checked and told else check(left, link.standings, told, version)
        if same:
            require_same(left, version)
        self._left, link.checked, self._told = left, True, None

    def _capture(self, version: int) -> _Push:
        """Tell the source to give its weights, over the last plan if that will do."""
        began = self._clock()
        link = self._last_link()
        if link is None or not self._source.is_here:
            return self._capture_over(self._current_link(), version, began)
        # The weights stay as they are until this call returns: so they can be given once more, to those that a new plan
        # finds. Sinks that have all of them know the plan; those that get a snapshot say so while it is made.
        asked = {} if link.plan.source_mode == "fenced" else link.ask()
        push = self._capture_over(link, version, began)
        if link.has_refused(push.captures):
            asked = link.ask()
        return push if link.is_open(asked) else self._capture_over(self._new_link(), version, began)

    def _capture_over(self, link: SyncSession, version: int, began: float, *, again: bool = False) -> _Push:
        self._check_source(link, version)
        number = (secrets.randbits(31) << 20) + next(_pushes)
        return _Push(link, number, version, began, link.capture(number, version, again=again))

    def _finish_later(self, push: _Push, *, done: bool) -> Future[PushReport]:
        """``done``: then this is the version that was committed last."""
        future: Future[PushReport] = Future()
        if push.link.is_staged(push.captures):
            push.staged(self._clock())
        self._running = threading.Thread(
            target=self._finish, args=(push, future, done), name=f"rlmesh-weights-push-{push.version}", daemon=True
        )
        self._running.start()
        return future

    def _finish(self, push: _Push, future: Future[PushReport], done: bool) -> None:
        link = push.link
        try:
            failure = None
            if push.flips is None:
                failure = link.wait_captured(push.captures)
                push.captured_s = self._clock() - push.began
                failure = link.wait_sent(push.number, failure)
                if failure is None:
                    push.staged(self._clock())
            failure = failure or link.wait_flipped(push.flips or {})
            if failure is not None:
                kept = link.abort(push.number, failure)
                raise _error(link.plan, push.version, failure, kept)
            link.conclude(push.number)
        except BaseException as error:
            link.failed = True
            future.end(None, error)
            return
        report = push.report(self._clock())
        if done:
            self.version, self._left = push.version, link.leaves(push.version)
        future.end(report, None)


@dataclass(eq=False)
class _Push:
    """One under way. ``began`` and the like are the clock's seconds."""

    link: SyncSession
    number: int
    version: int
    began: float
    captures: Answers
    flips: Answers | None = None
    captured_s: float = 0.0
    staged_s: float = 0.0

    def staged(self, now: float) -> None:
        """All sinks have everything: tell them to flip."""
        self.staged_s = now - self.began
        self.captured_s = self.captured_s or self.staged_s
        self.flips = self.link.flip(self.number, self.version)

    def report(self, now: float) -> PushReport:
        plan = self.link.plan
        names = tuple(sink.name for sink in plan.sinks)
        return PushReport(self.version, names, plan.nbytes, self.captured_s, self.staged_s, now - self.began)


def _error(
    plan: WeightPlan, version: int, failure: DeliveryFailure, kept: Mapping[str, int | str | None]
) -> WeightSyncError:
    """Who failed, where and how, what the others serve, and what to do."""
    of_sink = {name: route.channel for route in plan.routes for name in route.sinks}
    is_sink = failure.member in of_sink
    where = f" in bucket {failure.bucket} of {len(plan.buckets)}" if failure.bucket >= 0 else ""
    by = f" (by {of_sink[failure.member]})" if is_sink and where else ""
    others = []
    for name, now in kept.items():
        if isinstance(now, str):
            others.append(f"{name} did not answer ({now})")
        else:
            others.append(f"{name} serves nothing until it is pushed to" if now is None else f"{name} keeps {now}")
    text = (
        f"version {version} was not committed: {'receiver' if is_sink else 'source'} {failure.member} failed{where}"
        f"{by}: {failure.kind}: {failure.error}. {'; '.join(others)}. The next push makes a new plan"
    )
    error = WeightSyncError(text)
    error.version = version
    error.receiver = failure.member if is_sink else None
    error.bucket = failure.bucket if failure.bucket >= 0 else None
    return error
