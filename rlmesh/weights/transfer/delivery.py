"""`Delivery`: one route of one push. Announces buckets to the route's sinks and waits for their answers.

If the channel's commands carry everything (`ChannelSender.tells_only`), the gathering thread sends one command after
the other, and waits for answers when the window is full and at the end. A channel that moves bytes gets a thread of its
own, so that the next bucket is gathered meanwhile and a snapshotted source trains on; for a single bucket the waiting
thread moves the bytes. At most ``window`` buckets of a fenced source are unanswered at a time. The first failure ends
the delivery: later buckets are dropped, and `result` names the failed sink and bucket.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlmesh.runtime.calling.busy_poll import wait_about
from rlmesh.runtime.calling.gathering import gather
from rlmesh.runtime.future import Future
from rlmesh.weights.channels.base import BucketTransfer, ChannelBroken, ChannelSender
from rlmesh.wire.envelope import ANY_INCARNATION

WINDOW = 2
REGULAR_S = 0.05
CAUSE_S = 0.3
"""Time for the sinks to report why a channel broke."""


class Command(Protocol):
    """Sends a command to a member, as `MemberHandle` does."""

    def __call__(
        self, member: str, method: str, *args: Any, timeout_s: float, incarnation: int = ANY_INCARNATION
    ) -> Future[Any]: ...


@dataclass(frozen=True, slots=True)
class DeliveryFailure:
    """The failed member, the bucket (-1: none), the error's type ``kind`` and its text ``error``."""

    member: str
    bucket: int
    kind: str
    error: str

    @classmethod
    def of(cls, member: str, bucket: int, error: BaseException) -> DeliveryFailure:
        kind = getattr(error, "remote_type", "") or type(error).__name__
        return cls(member, bucket, kind.rpartition(".")[2], str(error) or kind)


@dataclass(frozen=True, slots=True)
class Header:
    """The fields that all commands of a push carry."""

    session: str
    push: int
    version: int
    flip_s: float
    bucket_s: float


@dataclass(frozen=True, slots=True)
class _Announced:
    """A bucket that was announced to its sinks; ``began`` is a time of `time.perf_counter`."""

    transfer: BucketTransfer
    answers: dict[str, Future[Any]]
    began: float = field(default_factory=time.perf_counter)


class Delivery:
    """See the module.

    Args:
        channel: the sending half of the route's channel.
        sinks: sink → incarnation: a restarted sink does not take part in the push.
        command: sends a command to a sink.
        header: of the push.
        source: the member that sends, for errors of its own.
        window: limit of unanswered buckets.
        threaded: a channel that moves bytes does so on a thread of its own; otherwise in `result`.
        durations: bucket → seconds until the sinks had it in the last push; updated.
    """

    def __init__(
        self, channel: ChannelSender, sinks: Mapping[str, int], command: Command, header: Header, source: str, *,
        window: int = WINDOW, threaded: bool = True, durations: dict[int, float] | None = None,
    ) -> None:  # fmt: skip
        self._channel, self._sinks, self._command, self._header = channel, sinks, command, header
        self._source, self._window = source, window
        self._transfers: queue.SimpleQueue[BucketTransfer | None] = queue.SimpleQueue()
        self._durations = durations if durations is not None else {}
        self._unanswered: deque[_Announced] = deque()
        self._failure: DeliveryFailure | None = None
        self._sequence_number = -1
        self._thread: threading.Thread | None = None
        self._room: threading.Semaphore | None = None
        self._done = False
        self._at_once = channel.tells_only
        if threaded and not self._at_once:
            self._room = threading.Semaphore(window)
            self._thread = threading.Thread(target=self._run, name=f"rlmesh-weights-{source}", daemon=True)
            self._thread.start()

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def wait_for_room(self) -> None:
        """Wait until the next bucket may be put, so that ``window`` buckets are in memory at most. Bounded by the
        deadlines of the buckets."""
        if self._room is not None:
            self._room.acquire()
        elif self._at_once:
            self._settle_to_window()

    def skip(self) -> None:
        """Release the room that `wait_for_room` gave: the bucket does not come."""
        if self._room is not None:
            self._room.release()

    def send(self, transfer: BucketTransfer) -> None:
        """Announce a bucket, or queue it for the thread that does."""
        if not self._at_once:
            self._transfers.put(transfer)
            return
        self._announce(transfer)
        self.settle_answered()

    def settle_answered(self) -> bool:
        """Release the buckets to which all answers have come; returns true if the delivery has failed."""
        while self._at_once and self._unanswered and _all_done(self._unanswered[0].answers):
            self._settle()
        return self.failed

    def put_failed(self, bucket: int, error: BaseException) -> None:
        """The source could not make a bucket."""
        self._failure = self._failure or DeliveryFailure.of(self._source, bucket, error)

    def end(self) -> None:
        """All buckets of the push have been given."""
        self._transfers.put(None)

    def result(self) -> DeliveryFailure | None:
        """Wait for the last answer; returns the first failure. Bounded by the deadlines of the buckets."""
        if self._thread is not None:
            self._thread.join()
        elif not self._done:
            self._run()
        return self._failure

    def _run(self) -> None:
        while (transfer := self._transfers.get()) is not None:
            if self._failure is None:
                self._announce(transfer)
            else:
                self._release(transfer)
            self._settle_to_window()
        while self._unanswered:
            self._settle()
        self._done = True
        if self._failure is not None:
            self._channel.abandon()

    def _settle_to_window(self) -> None:
        while self._unanswered and (len(self._unanswered) >= self._window or self._failure is not None):
            self._settle()

    def _announce(self, transfer: BucketTransfer) -> None:
        header, bucket = self._header, transfer.bucket
        answers: dict[str, Future[Any]] = {}
        self._unanswered.append(_Announced(transfer, answers))
        self._sequence_number += 1
        try:
            for sink, incarnation in self._sinks.items():
                answers[sink] = self._command(
                    sink, "weights_stage", header.session, header.push, header.version, self._source,
                    self._sequence_number, (bucket.index, bucket.count), self._channel.payload(transfer, sink),
                    transfer.checksums, header.flip_s, timeout_s=header.bucket_s, incarnation=incarnation,
                )  # fmt: skip
            if not self._at_once:
                self._channel.transmit(transfer, lambda: any(map(_has_failed, answers.values())))
        except ChannelBroken as error:
            named = DeliveryFailure.of(error.sink or self._source, bucket.index, error)
            reported = self._first_reported()
            same = reported is not None and reported.member == (error.sink or reported.member)
            self._failure = reported if same else named
        except Exception as error:
            self._failure = DeliveryFailure.of(self._source, bucket.index, error)

    def _first_reported(self) -> DeliveryFailure | None:
        """The failure of the oldest bucket for which a sink has reported one; None if none has."""
        reported = (self._reported(one.answers, one.transfer.bucket.index) for one in self._unanswered)
        return next((failure for failure in reported if failure is not None), None)

    def _reported(self, answers: dict[str, Future[Any]], bucket: int) -> DeliveryFailure | None:
        """The failure that the sinks report; a sink's own fault comes before a lost connection."""
        wait(answers.values(), CAUSE_S, FIRST_EXCEPTION)
        failed = [(sink, answer.exception()) for sink, answer in answers.items() if _has_failed(answer)]
        reported = [DeliveryFailure.of(sink, bucket, error) for sink, error in failed if error is not None]
        return min(reported, key=lambda failure: failure.kind == ChannelBroken.__name__, default=None)

    def _settle(self) -> None:
        """Wait for the answers to the oldest bucket, and release it."""
        oldest = self._unanswered.popleft()
        transfer, answers, index = oldest.transfer, oldest.answers, oldest.transfer.bucket.index
        if self._failure is None:
            if len(answers) == 1:
                wait_as_last_time(next(iter(answers.values())), self._durations.get(index))
            if not _all_done(answers):
                gather(tuple(answers.values())).exception()
            self._durations[index] = time.perf_counter() - oldest.began
            if any(map(_has_failed, answers.values())):
                self._failure = self._reported(answers, index)
        for answer in answers.values():
            if not answer.done():
                answer.cancel()
        self._release(transfer)

    def _release(self, transfer: BucketTransfer) -> None:
        self._channel.taken(transfer)
        self.skip()


def wait_as_last_time(answer: Future[Any], took_s: float | None) -> None:
    """Wait for an answer with the knowledge that it took ``took_s`` seconds in the last push.

    Work on a GPU takes equally long every time, so the answer is polled for at that time. Long work is not regular to
    a fraction of a millisecond, and is not polled for.
    """
    if took_s is not None and took_s < REGULAR_S:
        wait_about(answer, took_s)


def _all_done(answers: Mapping[str, Future[Any]]) -> bool:
    return all(answer.done() for answer in answers.values())


def _has_failed(answer: Future[Any]) -> bool:
    return answer.done() and (answer.cancelled() or answer.exception() is not None)
