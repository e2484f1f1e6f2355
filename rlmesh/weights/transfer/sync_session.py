"""`SyncSession`: a plan that is connected, and the commands of a push over it.

A link is good for one set of members: when one restarts or joins, or when a push fails, it is dropped and the next push
makes another. That is all there is to joining late: a sink that is in no committed push serves nothing.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future as PlainFuture
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any

from rlmesh.errors import WeightSyncError
from rlmesh.runtime.process import clock
from rlmesh.weights.planning.plan import Participant, SyncOptions, WeightPlan, make_plan
from rlmesh.weights.planning.source_state import Left, Standing, left_of
from rlmesh.weights.transfer.delivery import DeliveryFailure, wait_as_last
from rlmesh.weights.transfer.endpoints import Bound, Endpoint, Incarnations, party_of
from rlmesh.weights.transfer.sender import RouteStart

logger = logging.getLogger(__name__)

ABORT_S = 0.4
"""How long the sinks that did not fail may take to go back, and the source to close its channels, together; a failed
sink is told and not waited for."""

Answers = Mapping[str, PlainFuture[Any]]


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds; see `WeightSync`."""

    bucket_s: float
    flip_s: float
    push_s: float
    connect_s: float


class SyncSession:
    """See the module. Made by `open`."""

    def __init__(
        self, session: str, plan: WeightPlan, source: Endpoint, sinks: Endpoint, timeouts: Timeouts,
        members: Incarnations, verify: bool,
    ) -> None:  # fmt: skip
        self._verify = verify
        self.session, self.plan, self.failed = session, plan, False
        self._closed = False
        self._source, self._sinks = Bound(source, members), Bound(sinks, members)
        self._timeouts, self._members = timeouts, members
        self._source_names = [party.name for party in plan.sources]
        self._sink_names = [party.name for party in plan.sinks]
        self._alone = len(self._sink_names) == 1
        self.standings = {party.name: party.standing or Standing(party.incarnation) for party in plan.sources}
        self.left = left_of([party.left for party in plan.sinks if party.left is not None], self.standings)
        """What the last commit left, as the members remember it."""
        self.checked = False
        """The source is where the last push left it, or was said to be elsewhere."""
        self._began: dict[str, float] = {}
        self._took: dict[str, float] = {}

    @classmethod
    def open(
        cls,
        source: Endpoint,
        sinks: Endpoint,
        wishes: SyncOptions,
        timeouts: Timeouts,
        *,
        only: Collection[str] | None = None,
    ) -> SyncSession:
        """Ask everybody, make the plan, and connect the channels.

        Raises:
            WeightSyncError: they do not fit, or somebody could not be asked or connected; nothing is left behind.
        """
        members = {**source.incarnations(), **sinks.incarnations()}
        wanted = [name for name in sinks.incarnations() if only is None or name in only]
        bound = Bound(source, members), Bound(sinks, members)
        sources = _ask(bound[0], list(source.incarnations()), "weights_source_describe", timeouts.connect_s)
        targets = _ask(bound[1], wanted, "weights_sink_describe", timeouts.connect_s)
        plan = make_plan(sources, targets, wishes)
        link = cls(secrets.token_hex(8), plan, source, sinks, timeouts, members, wishes.verify)
        try:
            link._connect()
        except BaseException:
            link.close()
            raise
        return link

    def is_of(self, source: Endpoint, sinks: Endpoint) -> bool:
        """Are the members still those that the plan was made for?"""
        return self._members == {**source.incarnations(), **sinks.incarnations()}

    def ask(self) -> Answers:
        """Ask everybody whether they still know of it: one that sends from or receives into something new does not."""
        limit = min(self._timeouts.connect_s, self._timeouts.bucket_s)
        ends = (self._source, self._source_names, "source"), (self._sinks, self._sink_names, "sink")
        return {
            name: end.call(name, f"weights_{kind}_has", self.session, timeout_s=limit)
            for end, names, kind in ends
            for name in names
        }

    def is_open(self, asked: Answers) -> bool:
        """Do they? Who does not answer is left to the push, which says so."""
        return all(answer.exception() is not None or answer.result() for answer in asked.values())

    def _connect(self) -> None:
        plan, limit = self.plan, self._timeouts.connect_s
        cut = {name: [bucket.to_wire() for bucket in plan.by_rank[name]] for name in self._source_names}
        keep = plan.source_mode == "snapshot"
        starting = {
            name: [
                RouteStart(
                    r.channel,
                    {sink: self._members[sink] for sink in r.sinks},
                    plan.on_gpus(r),
                    plan.on_one_gpu(r),
                    plan.shares_events(r),
                )
                for r in plan.routes
                if r.source == name
            ]
            for name in self._source_names
        }
        opening = {
            name: self._source.call(
                name, "weights_open", self.session, cut[name],
                starting[name], keep, self._timeouts.bucket_s, self._verify, plan.sharded, timeout_s=limit,
            )
            for name in self._source_names
        }  # fmt: skip
        attaching = [
            (sink, self._sinks.call(sink, "weights_attach", opened, cut[name], timeout_s=limit))
            for name, answer in opening.items()
            for sink, opened in _result(answer, name, "open its channels").items()
        ]
        connecting = [
            (name, self._source.call(name, "weights_connect", self.session, timeout_s=limit))
            for name in self._source_names
        ]
        for name, answer in (*attaching, *connecting):
            _result(answer, name, "connect to its channel")

    # A push.

    def capture(self, push: int, version: int, *, again: bool = False) -> Answers:
        """Tell all ranks of the source to give their weights; ``again``: those that they gave as this version."""
        limits = self._timeouts
        self._began["capture"] = time.perf_counter()
        return {
            name: self._source.call(
                name, "weights_capture", self.session, push, version, limits.flip_s, limits.bucket_s, again,
                timeout_s=limits.push_s,
            )
            for name in self._source_names
        }  # fmt: skip

    def wait_captured(self, captures: Answers) -> DeliveryFailure | None:
        self._wait_as_last("capture", captures)
        return _first_failure(captures)

    def wait_sent(self, push: int, failure: DeliveryFailure | None) -> DeliveryFailure | None:
        """With a snapshot: until the sinks have it."""
        if self.plan.source_mode != "snapshot":
            return failure
        limit = self._timeouts.push_s
        sent = {
            n: self._source.call(n, "weights_sent", self.session, push, timeout_s=limit) for n in self._source_names
        }
        return failure or _first_failure(sent)

    def has_refused(self, captures: Answers) -> bool:
        """Has a member said that it cannot take part? Those that are lost or late have not."""
        failure = _first_failure({name: answer for name, answer in captures.items() if answer.done()})
        return failure is not None and failure.kind == WeightSyncError.__name__

    def is_staged(self, captures: Answers) -> bool:
        """Has every sink everything by now? So it is where the source is fenced and gives its weights in this call."""
        fenced = self.plan.source_mode == "fenced"
        return fenced and all(answer.done() for answer in captures.values()) and _first_failure(captures) is None

    def flip(self, push: int, version: int) -> Answers:
        """Everything is staged everywhere: let all sinks flip."""
        limit = self._timeouts.flip_s
        self._began["flip"] = time.perf_counter()
        return {
            name: self._sinks.call(
                name, "weights_flip", push, version, limit, self._alone, self.leaves(version).to_wire(),
                timeout_s=limit + self._timeouts.bucket_s,
            )
            for name in self._sink_names
        }  # fmt: skip

    def leaves(self, version: int) -> Left:
        """What a commit of ``version`` over this plan leaves."""
        return Left(version, {name: rank.incarnation for name, rank in self.standings.items()})

    def wait_flipped(self, flips: Answers) -> DeliveryFailure | None:
        self._wait_as_last("flip", flips)
        failure: DeliveryFailure | None = None
        for name, answer in flips.items():
            try:
                answer.result()
            except Exception as error:
                failure = failure or DeliveryFailure.of(name, -1, error)
        return failure

    def _wait_as_last(self, what: str, answers: Answers) -> None:
        """For an answer that comes alone: see `delivery.wait_as_last`."""
        if len(answers) == 1:
            answer = next(iter(answers.values()))
            wait_as_last(answer, self._took.get(what))
            if not answer.done():
                wait([answer])
            self._took[what] = time.perf_counter() - self._began[what]

    def conclude(self, push: int) -> None:
        """All have flipped: let them serve, and wait until they do. A sink that dies now is one that restarts and
        serves nothing; one that does not hear it serves nothing either. One that is alone serves already."""
        if self._alone:
            return
        limit = self._timeouts.bucket_s
        told = {name: self._sinks.call(name, "weights_conclude", push, timeout_s=limit) for name in self._sink_names}
        for name, answer in told.items():
            error = answer.exception()
            if error is not None:
                self.failed = True
                logger.warning("%s has the new weights but does not serve them until the next push: %s", name, error)

    def abort(self, push: int, failure: DeliveryFailure) -> dict[str, int | str | None]:
        """Let all sinks go back, and close the channels; what each serves then, or why that is not known."""
        self.failed = True
        aborted = {
            name: self._sinks.call(name, "weights_abort", self.session, push, timeout_s=self._timeouts.connect_s)
            for name in self._sink_names
        }
        deadline = clock.now() + ABORT_S
        kept: dict[str, int | str | None] = {}
        for name, answer in aborted.items():
            if name == failure.member:
                continue
            try:
                kept[name] = answer.result(timeout=_left(deadline))
            except Exception as error:
                kept[name] = type(error).__name__
        self._closed = True
        self._close_sources(_left(deadline))
        return kept

    def close(self) -> None:
        """Free what the channels hold."""
        if self._closed:
            return
        self._closed = True
        # Sinks let go first: what they have open of the source's memory is freed after that.
        limit = self._timeouts.connect_s
        detaching = [self._sinks.call(n, "weights_detach", self.session, timeout_s=limit) for n in self._sink_names]
        wait(detaching, ABORT_S if self.failed else limit)
        self._close_sources(ABORT_S if self.failed else self._timeouts.connect_s)

    def _close_sources(self, wait_s: float) -> None:
        """Tell all ranks of the source; one that does not answer in time does it later, or is dead."""
        limit = self._timeouts.connect_s
        closing = [self._source.call(n, "weights_close", self.session, timeout_s=limit) for n in self._source_names]
        wait(closing, wait_s)


def _left(deadline: float) -> float:
    return max(0.0, deadline - clock.now())


def _ask(end: Bound, names: list[str], method: str, timeout_s: float) -> list[Participant]:
    asked = {name: end.call(name, method, timeout_s=timeout_s) for name in names}
    return [party_of(_result(answer, name, "say what weights it has")) for name, answer in asked.items()]


def _result(answer: PlainFuture[Any], name: str, what: str) -> Any:
    try:
        return answer.result()
    except Exception as error:
        raise WeightSyncError(f"{name} could not {what}: {type(error).__name__}: {error}") from error


def _first_failure(answers: Answers) -> DeliveryFailure | None:
    found: DeliveryFailure | None = None
    for name, answer in answers.items():
        try:
            wire = answer.result()
        except Exception as error:
            found = found or DeliveryFailure.of(name, -1, error)
        else:
            found = found or (DeliveryFailure(*wire) if wire is not None else None)
    return found
