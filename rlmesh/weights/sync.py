"""`WeightSync`: transfers the weights of a source to its sinks, to all of them or to none.

::

    sync = WeightSync(RoleGroup("ACTOR"), RoleGroup("ROLLOUT"))
    future = sync.push(version)         # returns at once
    …                                   # train on, if the source is snapshotted
    future.result()                     # committed: all sinks serve this version

A push has two phases. *Stage*: the source's ranks send bucket after bucket to the sinks, which verify it and store it
beside the weights in use (`double_buffer`) or overwrite these, serving nothing meanwhile (`in_place`). *Commit*: when
every sink has everything, all flip; when all have flipped, all serve. A failure before that undoes the push on all
sinks. Bytes are sent by the channels of the plan, commands by ordinary calls.
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
from rlmesh.weights.members import MOST_VERSION, Endpoint, Incarnations, LocalSource, MemberEndpoint
from rlmesh.weights.planning.plan import DEFAULT_BUCKET_BYTES, SyncOptions, WeightPlan
from rlmesh.weights.planning.source_state import ConfirmedVersion, LastCommit, check, require_same
from rlmesh.weights.protocols import WeightSource
from rlmesh.weights.transfer.delivery import DeliveryFailure
from rlmesh.weights.transfer.sync_session import Answers, SyncSession, Timeouts

_pushes = itertools.count(1)

logger = logging.getLogger(__name__)

CLOSE_AFTER_ERROR_S = 0.5
"""Time by which closing may delay an error that leaves the block of a `WeightSync`."""


@dataclass(frozen=True, slots=True)
class PushReport:
    """A committed push.

    Attributes:
        version: the version that all ``sinks`` serve now.
        nbytes: the number of bytes that each sink received.
        captured_s: seconds from the start until the source could train on.
        staged_s: seconds until all sinks had everything.
        seconds: seconds until all sinks served it.
    """

    version: int
    sinks: tuple[str, ...]
    nbytes: int
    captured_s: float
    staged_s: float
    seconds: float


class WeightSync:
    """Transfers weights from one source to its sinks.

    Args:
        source: the role that trains (its class inherits `SendsWeights`), or a `WeightSource` of this process.
        sinks: the role that samples (`ReceivesWeights`), or several.
        snapshot: copy the weights first, so that the source may train on during the transfer; otherwise the source is
            fenced: no optimizer step before the last sink has everything.
        verify: make checksums of all tensors at the source and compare them at the sinks.
        allow_cast: allowed changes of element types: ``{"float32": "bfloat16"}``, or True for all float types.
        channel: "auto", one channel for all, or role or member → channel: "shm", "cuda_ipc", "collective", "stream".
        bucket_bytes: the amount that is staged and acknowledged at a time.
        bucket_timeout_s: deadline of a sink's acknowledgement of a bucket.
        flip_timeout_s: limit for a sink's running requests to delay a flip.
        timeout_s: deadline of a whole push.
        connect_timeout_s: deadline of members' answers when the plan is made.
        restored: the version that the source has, if the caller has restored it: see `source_restored`.
        wait_for_restarts: a push waits for sinks that restart, at most ``connect_timeout_s`` seconds. False: it leaves
            them out, unless all of them restart; they serve nothing before a later push or `catch_up`.
    """

    def __init__(
        self, source: RoleGroup[Any] | WeightSource, sinks: RoleGroup[Any] | Sequence[RoleGroup[Any]], *,
        snapshot: bool = False, verify: bool = True,
        allow_cast: bool | Mapping[str, str] | Iterable[tuple[str, str]] = False,
        channel: str | Mapping[str, str] = "auto", bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        bucket_timeout_s: float = 60.0, flip_timeout_s: float = 60.0, timeout_s: float = 600.0,
        connect_timeout_s: float = 60.0, restored: int | None = None, wait_for_restarts: bool = True,
        runtime: Runtime | None = None, clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        given: Any = [sinks] if isinstance(sinks, RoleGroup) else sinks
        groups = list(given) if isinstance(given, Iterable) else []
        if not groups or not all(isinstance(group, RoleGroup) for group in groups):
            raise UsageError(
                "WeightSync(source, sinks): name at least one role that receives weights, as RoleGroup('ROLLOUT'), not "
                f"{sinks!r:.80}"
            )
        for what, flag in (("snapshot", snapshot), ("verify", verify), ("wait_for_restarts", wait_for_restarts)):
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
        self._source: Endpoint = (
            MemberEndpoint([source], runtime) if isinstance(source, RoleGroup) else LocalSource(source, runtime)
        )
        self._options = SyncOptions(
            bucket_bytes, Casts.of(allow_cast), channel, "snapshot" if snapshot else "fenced", verify
        )
        self._timeouts = Timeouts(bucket_timeout_s, flip_timeout_s, timeout_s, connect_timeout_s)
        self._waits = wait_for_restarts
        self._clock = clock
        self._lock = threading.Lock()
        self._session: SyncSession | None = None
        self._running: threading.Thread | None = None
        self._closed = False
        self.version: int | None = None
        """The version that was committed last."""
        self._served: Incarnations = {}
        """The sinks that got that version, and the incarnation of each."""
        self._last_commit: LastCommit | None = None
        self._confirmed: ConfirmedVersion | None = None
        if restored is not None:
            self.source_restored(restored)

    def plan(self) -> WeightPlan:
        """The routes, channels and buckets; a new plan is made if there is none, or if members, sources or sinks have
        changed.

        Raises:
            WeightSyncError: see `push`.
        """
        with self._lock:
            self._wait_for_last()
            return self._open_session().plan

    def push(self, version: int) -> Future[PushReport]:
        """Transfer the source's weights to all sinks, as this version.

        Returns when the command to send is on its way, so that a later call to the source (an optimizer step) runs
        after it; with a source in this process, when the weights may be changed. One push runs at a time: this one
        first waits for the last.

        Raises (here, or by the future):
            SourceRestarted: a rank of the source restarted and lost its training since the last push.
            WeightSyncError: nothing was committed; names receiver and bucket.
        """
        require_number("push(version)", version, 0, MOST_VERSION)
        with self._lock:
            self._wait_for_last()
            return self._finish_later(self._capture(version), newest=True)

    def source_restored(self, version: int) -> None:
        """State that all current ranks of the source have ``version`` now, since the caller has restored them.

        A role states it by ``send_weights(source, restored=version)``. This method is for roles that do not, and for
        callers that have gone back to an earlier version than the last push. A rank that restarts afterwards is
        refused again.
        """
        require_number("source_restored(version)", version, 0, MOST_VERSION)
        with self._lock:
            self._confirmed = ConfirmedVersion(version, dict(self._source.incarnations()))

    @property
    def served(self) -> tuple[str, ...]:
        """Names of the sinks that got the last committed version, without those that have ended since, as far as this
        process knows. Asks nobody."""
        served = self._served
        return tuple(name for name, now in self._sinks.present().items() if served.get(name) == now)

    @property
    def returned(self) -> tuple[str, ...]:
        """Names of the sinks that lack the last committed version, since they restarted or joined, and that could get
        it now, by `catch_up`. Asks nobody."""
        served, present = self._served, self._sinks.present() if self.version is not None else {}
        return tuple(name for name, now in present.items() if served.get(name) != now)

    def catch_up(self) -> tuple[str, ...]:
        """Push the last committed version to the sinks that do not serve it, since they restarted or joined later;
        returns their names. The source must still have these weights.

        Raises:
            SourceRestarted: the source restarted, and does not have that version.
            WeightSyncError: the weights have changed since, as the source's stamp shows; nothing was committed.
        """
        with self._lock:
            self._wait_for_last()
            if self.version is None:
                raise WeightSyncError("no version was committed yet: push(version) first")
            members = self._taking_part()
            behind = self._sinks.behind(members, self.version, self._timeouts.connect_s)
            self._served = {name: now for name, now in members.items() if name not in behind}
            if behind:
                session = SyncSession.open(self._source, self._sinks, self._options, self._timeouts, only=behind)
                try:
                    self._check_source(session, self.version, same=True)
                    push = self._capture_over(session, self.version, self._clock(), again=True)
                    self._finish_later(push, newest=False).result()
                finally:
                    session.close()
            return tuple(sorted(behind))

    def rollback(self) -> int:
        """Let all sinks serve the previous version again; returns it. Only `double_buffer` sinks can, until the next
        push.

        Raises:
            WeightSyncError: a sink could not; the text says what the others serve.
        """
        with self._lock:
            self._wait_for_last()
            self.version = self._sinks.rollback(self._timeouts.flip_s, self._timeouts.flip_s + self._timeouts.bucket_s)
            return self.version

    def close(self) -> None:
        """Wait for the push under way, and free the channels. Sinks continue to serve."""
        with self._lock:
            if self._closed:
                return
            self._wait_for_last()
            self._closed = True
            self._drop_session()
        if isinstance(self._source, LocalSource):
            self._source.close_weights_source()

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; after an error, members that are busy are closed in the background."""
        if kind is None:
            self.close()
            return
        closing = threading.Thread(target=self._close_after_error, name="rlmesh-weights-close", daemon=True)
        closing.start()
        closing.join(CLOSE_AFTER_ERROR_S)

    def _close_after_error(self) -> None:
        try:
            self.close()
        except Exception as error:
            logger.info("a weight sync was left on an error, and not all of it could be closed: %s", error)

    def _wait_for_last(self) -> None:
        if self._closed:
            raise UsageError("this WeightSync is closed")
        running, self._running = self._running, None
        if running is not None and running is not threading.current_thread():
            running.join()

    def _open_session(self) -> SyncSession:
        """The session of the last push if all members still have it, else a new one."""
        session = self._last_session()
        return session if session is not None and session.is_open(session.ask()) else self._new_session()

    def _last_session(self) -> SyncSession | None:
        """The session of the last push, if it has not failed and its members are the current ones."""
        session = self._session
        if session is not None and (
            session.failed
            or not session.is_of(self._source, self._sinks)
            or set(session.sink_names) != self._taking_part().keys()
        ):
            self._drop_session()
        return self._session

    def _new_session(self) -> SyncSession:
        self._drop_session()
        members = self._taking_part()
        self._session = SyncSession.open(self._source, self._sinks, self._options, self._timeouts, only=members)
        return self._session

    def _taking_part(self) -> Incarnations:
        """The sinks of the next push, and the incarnation of each."""
        return (self._sinks.incarnations() if self._waits else self._sinks.present()) or self._sinks.incarnations()

    def _drop_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _check_source(self, session: SyncSession, version: int, *, same: bool = False) -> None:
        """Check that the source has the version of the last push: once per session, and after `source_restored`.

        Args:
            same: it must have ``version`` itself.

        Raises:
            SourceRestarted: it has another version.
        """
        confirmed = self._confirmed
        if session.checked and confirmed is None:
            return
        last = self._last_commit or session.last_commit
        if self._last_commit is None and confirmed is None and last is not None and version < last.version:
            logger.warning(
                "version %d is pushed, but the source sent version %d last, to another WeightSync: unless it went "
                "back, as send_weights(restored=…) or source_restored() would say, these are weights of that or later",
                version, last.version,
            )  # fmt: skip
        if session.checked and confirmed is not None:
            last = session.commit_of(confirmed.version)
        else:
            last = check(last, session.rank_states, confirmed, version)
        if same:
            require_same(last, version)
        self._last_commit, session.checked, self._confirmed = last, True, None

    def _capture(self, version: int) -> _Push:
        """Tell the source to send its weights, over the last session if it is still valid."""
        began = self._clock()
        session = self._last_session()
        if session is None or not self._source.is_local:
            return self._capture_over(self._open_session(), version, began)
        # A local source's weights do not change until this call returns, so they can be sent again over a new session.
        # Sinks that take a fenced push show by this that they still have the session. With a snapshot nothing shows it
        # yet: ask them while the snapshot is made.
        asked = {} if session.plan.source_mode == "fenced" else session.ask()
        push = self._capture_over(session, version, began)
        if session.has_refused(push.captures):
            asked = session.ask()
        return push if session.is_open(asked) else self._capture_over(self._new_session(), version, began)

    def _capture_over(self, session: SyncSession, version: int, began: float, *, again: bool = False) -> _Push:
        self._check_source(session, version)
        number = (secrets.randbits(31) << 20) + next(_pushes)
        return _Push(session, number, version, began, session.capture(number, version, again=again))

    def _finish_later(self, push: _Push, *, newest: bool) -> Future[PushReport]:
        """Finish the push on a thread; ``newest``: its version becomes the last committed one."""
        future: Future[PushReport] = Future()
        if push.session.is_staged(push.captures):
            push.staged(self._clock())
        self._running = threading.Thread(
            target=self._finish, args=(push, future, newest), name=f"rlmesh-weights-push-{push.version}", daemon=True
        )
        self._running.start()
        return future

    def _finish(self, push: _Push, future: Future[PushReport], newest: bool) -> None:
        session = push.session
        try:
            failure = None
            if push.flips is None:
                failure = session.wait_captured(push.captures)
                push.captured_s = self._clock() - push.began
                failure = session.wait_sent(push.number, failure)
                if failure is None:
                    push.staged(self._clock())
            failure = failure or session.wait_flipped(push.flips or {})
            if failure is not None:
                served = session.abort(push.number, failure)
                raise _error(session.plan, push.version, failure, served)
            session.conclude(push.number)
        except BaseException as error:
            session.failed = True
            future.end(None, error)
            return
        report = PushReport(
            push.version, session.sink_names, session.nbytes, push.captured_s, push.staged_s, self._clock() - push.began
        )
        if newest:
            self.version, self._last_commit = push.version, session.commit_of(push.version)
        self._served = {**({} if newest else self._served), **session.sinks}
        future.end(report, None)


@dataclass(eq=False)
class _Push:
    """A push under way; times are seconds of the clock."""

    session: SyncSession
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
        self.flips = self.session.flip(self.number, self.version)


def _error(
    plan: WeightPlan, version: int, failure: DeliveryFailure, served: Mapping[str, int | str | None]
) -> WeightSyncError:
    """An error that names the failed member, the bucket and the cause, and the versions that the others serve."""
    of_sink = {name: route.channel for route in plan.routes for name in route.sinks}
    is_sink = failure.member in of_sink
    where = f" in bucket {failure.bucket} of {len(plan.buckets)}" if failure.bucket >= 0 else ""
    by = f" (by {of_sink[failure.member]})" if is_sink and where else ""
    others = []
    for name, now in served.items():
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
