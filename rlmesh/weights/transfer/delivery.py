"""`Delivery`: one route of one push. Announces buckets to the route's sinks and waits for their answers.

A channel whose commands carry everything (`ChannelSender.tells_only`) runs on the gathering thread: it sends one
command after the other and waits for answers when the window is full, and at the end. A channel that moves bytes runs
on its own thread, so that the next bucket is gathered meanwhile and a snapshotted source trains on. If there is no next
bucket, it runs on the waiting thread. At most ``window`` buckets of a fenced source are unanswered at a time. The first
failure ends the delivery: later buckets are dropped, and `result` says which sink failed in which bucket.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, wait
from concurrent.futures import Future as PlainFuture
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlmesh.runtime.calling.busy_poll import wait_about
from rlmesh.weights.channels.base import BucketTransfer, ChannelBroken, ChannelSender
from rlmesh.wire.envelope import ANY_INCARNATION

WINDOW = 2
REGULAR_S = 0.05
TELL_S = 0.3
"""How long the sinks may take to say what they know of a broken channel."""


class Command(Protocol):
    """How to send a command to a sink: what `RoleGroup` and `MemberHandle` do."""

    def __call__(
        self, sink: str, method: str, *args: Any, timeout_s: float, incarnation: int = ANY_INCARNATION
    ) -> PlainFuture[Any]: ...


@dataclass(frozen=True, slots=True)
class DeliveryFailure:
    """Who failed, in which bucket (-1: in none), and how. ``error`` is the text; ``kind`` the error's type."""

    member: str
    bucket: int
    kind: str
    error: str

    def to_wire(self) -> list[Any]:
        return [self.member, self.bucket, self.kind, self.error]

    @classmethod
    def of(cls, member: str, bucket: int, error: BaseException) -> DeliveryFailure:
        kind = getattr(error, "remote_type", "") or type(error).__name__
        return cls(member, bucket, kind.rpartition(".")[2], str(error) or kind)


@dataclass(frozen=True, slots=True)
class Header:
    """What every command of a push says."""

    session: str
    push: int
    version: int
    flip_s: float
    bucket_s: float


@dataclass(frozen=True, slots=True)
class _Announced:
    """A bucket that its sinks were told of; ``began`` is of `time.perf_counter`."""

    parcel: BucketTransfer
    answers: dict[str, PlainFuture[Any]]
    began: float = field(default_factory=time.perf_counter)


class Delivery:
    """See the module.

    Args:
        outlet: the sending half of the route's channel.
        sinks: who gets the buckets, and which incarnation of it: one that has restarted knows nothing of the push.
        command: sends a command to a sink.
        header: of the push.
        source: the member that sends, for errors of its own.
        window: how many buckets may be unanswered.
        beside: what moves bytes does so on a thread of its own; otherwise in `result`.
        took: seconds until the sinks had a bucket in the last push, by its number; brought up to date.
    """

    def __init__(
        self, outlet: ChannelSender, sinks: Mapping[str, int], command: Command, header: Header, source: str, *,
        window: int = WINDOW, beside: bool = True, took: dict[int, float] | None = None,
    ) -> None:  # fmt: skip
        self._outlet, self._sinks, self._command, self._header = outlet, dict(sinks), command, header
        self._source, self._window = source, window
        self._parcels: queue.SimpleQueue[BucketTransfer | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(window)
        self._took = took if took is not None else {}
        self._unanswered: deque[_Announced] = deque()
        self._failure: DeliveryFailure | None = None
        self._turn = -1
        self._thread: threading.Thread | None = None
        self._done = False
        self._at_once = outlet.tells_only
        if beside and not self._at_once:
            self._thread = threading.Thread(target=self._run, name=f"rlmesh-weights-{source}", daemon=True)
            self._thread.start()

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def wait_for_room(self) -> None:
        """Before the next bucket is put, so that at most so many are in memory. Bounded by the buckets' deadlines."""
        if not self._at_once:
            self._room.acquire()
            return
        while self._unanswered and (len(self._unanswered) >= self._window or self._failure is not None):
            self._settle()

    def skip(self) -> None:
        """The bucket that there was room for does not come."""
        self._room.release()

    def send(self, parcel: BucketTransfer) -> None:
        if not self._at_once:
            self._parcels.put(parcel)
            return
        self._announce(parcel)
        self.settle_answered()

    def settle_answered(self) -> bool:
        """Give back the buckets to which all answers have come, as a thread of its own does at any time; whether one of
        them was a failure."""
        while self._at_once and self._unanswered and _all_done(self._unanswered[0].answers):
            self._settle()
        return self.failed

    def put_failed(self, bucket: int, error: BaseException) -> None:
        """The source itself could not make a bucket."""
        self._failure = self._failure or DeliveryFailure.of(self._source, bucket, error)

    def end(self) -> None:
        """No more buckets come."""
        self._parcels.put(None)

    def result(self) -> DeliveryFailure | None:
        """Wait for the last answer. Bounded by the deadlines of the buckets."""
        if self._thread is not None:
            self._thread.join()
        elif not self._done:
            self._run()
        return self._failure

    def _run(self) -> None:
        while (parcel := self._parcels.get()) is not None:
            if self._failure is None:
                self._announce(parcel)
            else:
                self._forget(parcel)
            while self._unanswered and (len(self._unanswered) >= self._window or self._failure is not None):
                self._settle()
        while self._unanswered:
            self._settle()
        self._done = True
        if self._failure is not None:
            self._outlet.abandon()

    def _announce(self, parcel: BucketTransfer) -> None:
        header, index = self._header, parcel.bucket.index
        answers: dict[str, PlainFuture[Any]] = {}
        self._unanswered.append(_Announced(parcel, answers))
        self._turn += 1
        try:
            for sink in self._sinks:
                answers[sink] = self._command(
                    sink, "weights_stage", header.session, header.push, header.version, self._source,
                    self._turn, (index, parcel.bucket.count), self._outlet.payload(parcel, sink), parcel.checksums,
                    header.flip_s, timeout_s=header.bucket_s, incarnation=self._sinks[sink],
                )  # fmt: skip
            self._outlet.transmit(parcel, lambda: any(_has_failed(answer) for answer in answers.values()))
        except ChannelBroken as error:
            named = DeliveryFailure.of(error.sink or self._source, index, error)
            told = self._first_told()
            self._failure = told if told is not None and told.member == (error.sink or told.member) else named
        except Exception as error:
            self._failure = DeliveryFailure.of(self._source, index, error)

    def _first_told(self) -> DeliveryFailure | None:
        """Of the oldest bucket that some sink has failed in."""
        told = (self._told(one.answers, one.parcel.bucket.index) for one in self._unanswered)
        return next((failure for failure in told if failure is not None), None)

    def _told(self, answers: dict[str, PlainFuture[Any]], bucket: int) -> DeliveryFailure | None:
        """What the sinks themselves say of a broken channel: whose own fault it is comes before those who only lost
        their connection."""
        wait(answers.values(), TELL_S, FIRST_EXCEPTION)
        failed = [(sink, answer.exception()) for sink, answer in answers.items() if _has_failed(answer)]
        told = [DeliveryFailure.of(sink, bucket, error) for sink, error in failed if error is not None]
        return min(told, key=lambda failure: failure.kind == ChannelBroken.__name__, default=None)

    def _settle(self) -> None:
        """Wait for the answers to the oldest bucket."""
        oldest = self._unanswered.popleft()
        parcel, answers, index = oldest.parcel, oldest.answers, oldest.parcel.bucket.index
        if self._failure is None:
            if len(answers) == 1:
                wait_as_last(next(iter(answers.values())), self._took.get(index))
            if not _all_done(answers):
                wait(answers.values(), return_when=FIRST_EXCEPTION)
            self._took[index] = time.perf_counter() - oldest.began
            if any(_has_failed(answer) for answer in answers.values()):
                self._failure = self._told(answers, index)
        for answer in answers.values():
            if not answer.done():
                answer.cancel()
        self._forget(parcel)

    def _forget(self, parcel: BucketTransfer) -> None:
        self._outlet.taken(parcel)
        self._room.release()


def wait_as_last(answer: PlainFuture[Any], took_s: float | None) -> None:
    """Wait for an answer that took so long in the last push: on a GPU it takes as long again, and is looked for then.
    What takes long is not regular to a fraction of a millisecond, and does not miss one."""
    if took_s is not None and took_s < REGULAR_S:
        wait_about(answer, took_s)


def _all_done(answers: Mapping[str, PlainFuture[Any]]) -> bool:
    return all(answer.done() for answer in answers.values())


def _has_failed(answer: PlainFuture[Any]) -> bool:
    return answer.done() and (answer.cancelled() or answer.exception() is not None)
