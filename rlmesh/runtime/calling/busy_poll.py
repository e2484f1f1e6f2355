"""Busy polling: wait for a quick answer without going to sleep.

Waking up an idle core is a large part of a short call: 30 to 60 of its 150 µs on a virtual machine. An answer that the
runtime's loop reads for another thread wakes two threads, one after the other. So if only one call is in flight, and
its member answered the last call quickly, the waiting thread polls for the answer until the answer is there or is no
longer quick. A waiting loop polls between its other tasks, a plain thread without a pause. Calls to the job's own
processes (``@master``, ``@agent``) do not count as in flight: some of them wait there until something happens.

A thread other than the runtime's own reads the connection in place of the loop (`StreamLink.read_here`). It takes only
a packet with a single answer whose value lies in the packet; the loop reads everything else.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future as PlainFuture
from concurrent.futures import wait
from typing import Any

from rlmesh.errors import MalformedFrame
from rlmesh.runtime.calling.pending import PendingCall
from rlmesh.runtime.future import Future
from rlmesh.runtime.serving.reply_backlog import LARGE_BYTES
from rlmesh.runtime.transport.base import Link
from rlmesh.runtime.transport.stream import StreamLink
from rlmesh.wire.envelope import Frames, Message, Reply, TakenReplies, unpack


class BusyPoll:
    """The busy polling of one runtime: for one call at a time, from any thread.

    Args:
        thread: the thread of the runtime's loop.
        limit_s: an answer that takes longer is not polled for, nor is the next answer of that member.
        is_alone: True if no other call to a member is in flight.
        on_reply: handles an answer.
    """

    def __init__(
        self, thread: int, limit_s: float, is_alone: Callable[[PendingCall], bool],
        on_reply: Callable[[Link, Reply, Frames], None],
    ) -> None:  # fmt: skip
        self.limit_s = limit_s
        self._thread, self._limit_ns = thread, int(limit_s * 1e9)
        self._is_alone, self._on_reply = is_alone, on_reply
        self._call: PendingCall | None = None
        self.turns = 0
        """The number of looks so far."""

    def await_answer(self, call: PendingCall) -> None:
        """Poll for the answer of a call that was sent, on the running loop if there is one."""
        loop = asyncio._get_running_loop()
        if loop is not None and self._is_quick(call) and self._may_poll(call):
            self._begin(call, 0)
            loop.call_soon(self._turn, call, loop)

    def block(self, call: PendingCall, due_s: float | None = None) -> None:
        """Poll on a plain thread until the call has ended or is no longer quick.

        Args:
            due_s: the expected duration of the whole call, whatever the member's last call took.
        """
        if not (due_s is not None or self._is_quick(call)) or not self._may_poll(call):
            return
        self._begin(call, int((due_s or 0) * 1e9))
        try:
            while self._goes_on(call):
                self._look(call)
                os.sched_yield()  # With few cores, the callee may need this one.
        finally:
            self._call = None

    def _is_quick(self, call: PendingCall) -> bool:
        return call.peer is not None and 0 < call.peer.answer_ns < self._limit_ns

    def _begin(self, call: PendingCall, due_ns: int) -> None:
        call.poll_until_ns = call.started_ns + due_ns + self._limit_ns
        self._call = call

    def _may_poll(self, call: PendingCall) -> bool:
        peer = call.peer
        return (
            # If a loop was stopped while it polled, its call is still set, although nobody polls for it.
            (self._call is None or not self._goes_on(self._call))
            and peer is not None
            and self._is_alone(call)
            and (threading.get_ident() == self._thread or isinstance(peer.channel.link, StreamLink))
        )

    def _goes_on(self, call: PendingCall) -> bool:
        peer = call.peer
        return peer is not None and call.call_id in peer.pending and time.perf_counter_ns() < call.poll_until_ns

    def _turn(self, call: PendingCall, loop: asyncio.AbstractEventLoop) -> None:
        if threading.get_ident() != self._thread:
            self._look(call)  # The runtime's own loop reads the socket between its turns.
        else:
            self.turns += 1
        if self._goes_on(call):
            os.sched_yield()  # As in `block`.
            loop.call_soon(self._turn, call, loop)
        else:
            self._call = None

    def _look(self, call: PendingCall) -> None:
        self.turns += 1
        assert call.peer is not None
        link = call.peer.channel.link
        answer = link.read_here(_single_answer) if isinstance(link, StreamLink) else None
        if answer is not None:
            reply, frames = answer
            assert isinstance(reply, Reply)
            channel = call.peer.channel
            self._on_reply(link, reply, frames)
            if len(frames[0]) >= LARGE_BYTES and (count := channel.backlog.on_received(frames)):
                channel.send(TakenReplies(count), [])


def _single_answer(packet: Frames) -> Message | None:
    """The only message of a packet, if it is an answer whose value lies in the packet and not in shared memory."""
    if len(packet) != 2:
        return None
    try:
        messages = unpack(packet)
    except MalformedFrame:
        return None  # The packet may refer to shared memory: the loop reads it.
    return messages[0] if len(messages) == 1 and type(messages[0][0]) is Reply else None


def wait_about(answer: PlainFuture[Any], seconds: float) -> None:
    """Block until a call is over whose usual duration is known.

    Sleeps until shortly before the answer is due and polls for it then, instead of being woken by the thread that reads
    the answer.

    Args:
        seconds: the expected duration of the whole call.
    """
    call = answer._origin if isinstance(answer, Future) else None
    poll = call.table.busy_poll if isinstance(call, PendingCall) else None
    if isinstance(call, PendingCall) and isinstance(poll, BusyPoll):
        try:
            # Sleep until two wake-ups before the answer is due: each takes up to about `limit_s`.
            answer.exception(max(0.0, seconds - 2 * poll.limit_s - call.age_s()))
        except TimeoutError:
            poll.block(call, seconds)
    if not answer.done():
        wait([answer])
