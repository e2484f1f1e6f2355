"""`SyncSession`: a connected plan, and the commands of a push over it.

A session is valid for one set of members. When a member restarts or joins, or a push fails, the session is dropped and
the next push opens another. Nothing else is needed for late joiners: a sink without a committed push serves nothing.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Collection, Mapping
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any

from rlmesh.errors import WeightSyncError
from rlmesh.runtime.future import Future
from rlmesh.runtime.process import clock
from rlmesh.weights.members import Endpoint, Incarnations
from rlmesh.weights.planning.plan import Participant, SyncOptions, WeightPlan, make_plan
from rlmesh.weights.planning.source_state import LastCommit, RankState, last_commit_of
from rlmesh.weights.transfer.delivery import DeliveryFailure, wait_as_last_time
from rlmesh.weights.transfer.sender import RouteStart
from rlmesh.wire.envelope import ANY_INCARNATION

logger = logging.getLogger(__name__)

ABORT_S = 0.4
"""Time for the sinks that did not fail to go back and for the source to close its channels, together; the failed sink
is not waited for."""

Answers = Mapping[str, Future[Any]]


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts in seconds; see `WeightSync`."""

    bucket_s: float
    flip_s: float
    push_s: float
    connect_s: float


class SyncSession:
    """See the module. Use `open` to make one.

    Attributes:
        id: names the session in commands.
        failed: a push has failed: the session must not be used again.
        checked: the source's version was checked, or confirmed by the caller.
        rank_states: source rank → its state when the session was opened.
        last_commit: the last commit, as the members recorded it.
        nbytes: the number of bytes that each sink receives.
    """

    def __init__(
        self, plan: WeightPlan, source: Endpoint, sinks: Endpoint, timeouts: Timeouts, members: Incarnations,
        verify: bool,
    ) -> None:  # fmt: skip
        self.id, self.plan, self.failed, self.checked = secrets.token_hex(8), plan, False, False
        self._verify = verify
        self._closed = False
        self._source, self._sinks = source, sinks
        self._timeouts, self._members = timeouts, members
        self._source_names = [member.name for member in plan.sources]
        self.sink_names = tuple(member.name for member in plan.sinks)
        self._alone = len(self.sink_names) == 1
        self.rank_states = {m.name: m.rank_state or RankState(m.incarnation) for m in plan.sources}
        commits = [sink.last_commit for sink in plan.sinks if sink.last_commit is not None]
        self.last_commit = last_commit_of(commits, self.rank_states)
        self._ranks = {name: rank.incarnation for name, rank in self.rank_states.items()}
        self.nbytes = plan.nbytes
        self._began: dict[str, float] = {}
        self._durations: dict[str, float] = {}

    @classmethod
    def open(
        cls, source: Endpoint, sinks: Endpoint, options: SyncOptions, timeouts: Timeouts, *,
        only: Collection[str] | None = None,
    ) -> SyncSession:  # fmt: skip
        """Ask all members for a description, make the plan, and connect the channels.

        Args:
            only: names of the sinks that take part; None: all.

        Raises:
            WeightSyncError: members do not fit, do not answer or cannot connect; nothing is left behind.
        """
        members = {**source.incarnations(), **sinks.incarnations()}
        names = [name for name in sinks.incarnations() if only is None or name in only]
        limit = timeouts.connect_s
        sources = _describe(source, list(source.incarnations()), "weights_source_describe", members, limit)
        targets = _describe(sinks, names, "weights_sink_describe", members, limit)
        session = cls(make_plan(sources, targets, options), source, sinks, timeouts, members, options.verify)
        try:
            session._connect()
        except BaseException:
            session.close()
            raise
        return session

    @property
    def sinks(self) -> Incarnations:
        """The sinks that take part, and the incarnation of each."""
        return {name: self._members[name] for name in self.sink_names}

    def is_of(self, source: Endpoint, sinks: Endpoint) -> bool:
        """True if the members are still those for which the plan was made."""
        return self._members == {**source.incarnations(), **sinks.incarnations()}

    def ask(self) -> Answers:
        """Ask all members whether they still have this session; a member with a new source or sink does not."""
        limit = min(self._timeouts.connect_s, self._timeouts.bucket_s)
        return {
            **self._to_sources("weights_source_has", self.id, timeout_s=limit),
            **self._to_sinks("weights_sink_has", self.id, timeout_s=limit),
        }

    def is_open(self, answers: Answers) -> bool:
        """True if no member has answered `ask` that it lacks this session. Members without an answer do not count: if
        one is gone, the push fails there."""
        return all(answer.exception() is not None or answer.result() for answer in answers.values())

    def _to_sources(self, method: str, *args: Any, timeout_s: float) -> dict[str, Future[Any]]:
        command, members = self._source.command, self._members
        return {n: command(n, method, *args, timeout_s=timeout_s, incarnation=members[n]) for n in self._source_names}

    def _to_sinks(self, method: str, *args: Any, timeout_s: float) -> dict[str, Future[Any]]:
        command, members = self._sinks.command, self._members
        return {n: command(n, method, *args, timeout_s=timeout_s, incarnation=members[n]) for n in self.sink_names}

    def _connect(self) -> None:
        plan, limit, members = self.plan, self._timeouts.connect_s, self._members
        buckets = {name: plan.by_rank[name] for name in self._source_names}
        keep = plan.source_mode == "snapshot"
        routes: dict[str, list[RouteStart]] = {name: [] for name in self._source_names}
        for route in plan.routes:
            sinks = {sink: members[sink] for sink in route.sinks}
            placement = plan.on_gpus(route), plan.on_one_gpu(route), plan.shares_events(route)
            routes[route.source].append(RouteStart(route.channel, sinks, *placement))
        opening = {
            name: self._source.command(
                name, "weights_open", self.id, buckets[name], routes[name], keep, self._timeouts.bucket_s,
                self._verify, plan.sharded, timeout_s=limit, incarnation=members[name],
            )
            for name in self._source_names
        }  # fmt: skip
        attaching = [
            (sink, self._sinks.command(
                sink, "weights_attach", opened, buckets[name], timeout_s=limit, incarnation=members[sink]
            ))
            for name, answer in opening.items()
            for sink, opened in _result(answer, name, "open its channels").items()
        ]  # fmt: skip
        connecting = self._to_sources("weights_connect", self.id, timeout_s=limit)
        for name, answer in (*attaching, *connecting.items()):
            _result(answer, name, "connect to its channel")

    # A push.

    def capture(self, push: int, version: int, *, again: bool = False) -> Answers:
        """Tell all ranks of the source to send their weights; ``again``: once more, unchanged, as this version."""
        limits = self._timeouts
        self._began["capture"] = time.perf_counter()
        return self._to_sources(
            "weights_capture", self.id, push, version, limits.flip_s, limits.bucket_s, again, timeout_s=limits.push_s
        )

    def wait_captured(self, captures: Answers) -> DeliveryFailure | None:
        """Wait until the weights may change; returns the first failure."""
        self._wait_as_last_time("capture", captures)
        return _first_failure(captures)

    def wait_sent(self, push: int, failure: DeliveryFailure | None) -> DeliveryFailure | None:
        """Wait until the sinks have a snapshot; returns the first failure."""
        if self.plan.source_mode != "snapshot":
            return failure
        sent = self._to_sources("weights_sent", self.id, push, timeout_s=self._timeouts.push_s)
        return failure or _first_failure(sent)

    def has_refused(self, captures: Answers) -> bool:
        """True if a member has answered that it cannot take part; lost and late members have not."""
        failure = _first_failure({name: answer for name, answer in captures.items() if answer.done()})
        return failure is not None and failure.kind == WeightSyncError.__name__

    def is_staged(self, captures: Answers) -> bool:
        """True if every sink has everything already, since a fenced source in this process has sent its weights."""
        fenced = self.plan.source_mode == "fenced"
        return fenced and all(answer.done() for answer in captures.values()) and _first_failure(captures) is None

    def flip(self, push: int, version: int) -> Answers:
        """Tell all sinks to flip; everything is staged everywhere."""
        limit = self._timeouts.flip_s
        self._began["flip"] = time.perf_counter()
        return self._to_sinks(
            "weights_flip", push, version, limit, self._alone, [version, self._ranks],
            timeout_s=limit + self._timeouts.bucket_s,
        )  # fmt: skip

    def commit_of(self, version: int) -> LastCommit:
        """The record of a commit of ``version`` over this session."""
        return LastCommit(version, self._ranks)

    def wait_flipped(self, flips: Answers) -> DeliveryFailure | None:
        """Wait until all sinks have flipped; returns the first failure."""
        self._wait_as_last_time("flip", flips)
        failure: DeliveryFailure | None = None
        for name, answer in flips.items():
            error = answer.exception()
            if error is not None:
                failure = failure or DeliveryFailure.of(name, -1, error)
        return failure

    def _wait_as_last_time(self, what: str, answers: Answers) -> None:
        """Wait for a single answer; see `delivery.wait_as_last_time`."""
        if len(answers) == 1:
            answer = next(iter(answers.values()))
            wait_as_last_time(answer, self._durations.get(what))
            answer.exception()
            self._durations[what] = time.perf_counter() - self._began[what]

    def conclude(self, push: int) -> None:
        """Let all sinks serve, after all have flipped, and wait until they do.

        A sink that does not get the command serves nothing until the next push, nor does one that dies and restarts.
        With a single sink nothing is to be done: it serves since it flipped.
        """
        if self._alone:
            return
        concluding = self._to_sinks("weights_conclude", push, timeout_s=self._timeouts.bucket_s)
        for name, answer in concluding.items():
            error = answer.exception()
            if error is not None:
                self.failed = True
                logger.warning("%s has the new weights but does not serve them until the next push: %s", name, error)

    def abort(self, push: int, failure: DeliveryFailure) -> dict[str, int | str | None]:
        """Let all sinks go back, and close the channels. Returns, for each sink but the one that failed, the version
        that it serves (None: none), or the type of the error if it did not answer."""
        self.failed = True
        aborting = self._to_sinks("weights_abort", self.id, push, timeout_s=self._timeouts.connect_s)
        deadline = clock.now() + ABORT_S
        served: dict[str, int | str | None] = {}
        for name, answer in aborting.items():
            if name == failure.member:
                continue
            try:
                served[name] = answer.result(timeout=_remaining(deadline))
            except Exception as error:
                served[name] = type(error).__name__
        self._closed = True
        self._close_sources(_remaining(deadline))
        return served

    def close(self) -> None:
        """Free the channels."""
        if self._closed:
            return
        self._closed = True
        # Sinks first: the source frees its memory after they have closed it.
        limit = self._timeouts.connect_s
        detaching = self._to_sinks("weights_detach", self.id, timeout_s=limit)
        wait(detaching.values(), ABORT_S if self.failed else limit)
        self._close_sources(ABORT_S if self.failed else limit)

    def _close_sources(self, wait_s: float) -> None:
        """Close all ranks of the source; a rank that does not answer in time closes later, or is dead."""
        wait(self._to_sources("weights_close", self.id, timeout_s=self._timeouts.connect_s).values(), wait_s)


def _remaining(deadline: float) -> float:
    return max(0.0, deadline - clock.now())


def _describe(
    side: Endpoint, names: list[str], method: str, members: Incarnations, timeout_s: float
) -> list[Participant]:
    asked = {
        n: side.command(n, method, timeout_s=timeout_s, incarnation=members.get(n, ANY_INCARNATION)) for n in names
    }
    return [_result(answer, name, "say what weights it has") for name, answer in asked.items()]


def _result(answer: Future[Any], name: str, what: str) -> Any:
    try:
        return answer.result()
    except Exception as error:
        raise WeightSyncError(f"{name} could not {what}: {type(error).__name__}: {error}") from error


def _first_failure(answers: Answers) -> DeliveryFailure | None:
    found: DeliveryFailure | None = None
    for name, answer in answers.items():
        try:
            failure: DeliveryFailure | None = answer.result()
        except Exception as error:
            found = found or DeliveryFailure.of(name, -1, error)
        else:
            found = found or failure
    return found
