"""Waiting for a quick answer without going to sleep.

A core that has gone idle needs longer to wake than most short calls take: 30 to 60 µs on a virtual machine, of 150. And
an answer that the runtime's loop reads for another thread wakes two threads, one after the other. So whoever waits for
the only call on its way, of a member whose last answer was quick, looks for the answer itself, until it is there or no
longer quick: a loop between its other tasks, which run meanwhile as ever, a plain thread without a pause. Calls to the
job's master and agents do not count: some wait there until something happens.

Where the waiting thread is not the runtime's own, it reads the connection in the loop's place (`StreamLink.read_here`),
and takes nothing but a lone answer that carries its value with it; everything else stays with the loop.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import TYPE_CHECKING

from rlmesh.errors import MalformedFrame
from rlmesh.runtime.transport.stream import StreamLink
from rlmesh.wire.envelope import Frames, Message, Reply, TakenReplies, unpack

if TYPE_CHECKING:
    from rlmesh.runtime.calling.pending import PendingCall


class BusyPoll:
    """Of one runtime. From any thread; one call is waited for in this way at a time.

    Args:
        thread: the runtime's loop runs there.
        limit_s: an answer that takes longer is not waited for in this way, nor is the next one of that member.
    """

    def __init__(self, thread: int, limit_s: float) -> None:
        self.limit_s = limit_s
        self._thread, self._limit_ns = thread, int(limit_s * 1e9)
        self._call: PendingCall | None = None
        self.turns = 0
        """How often somebody looked."""

    def await_answer(self, call: PendingCall) -> None:
        """The call, which was sent, is awaited on the running loop, if there is one."""
        loop = asyncio._get_running_loop()
        if loop is not None and self._is_quick(call) and self._may_poll(call):
            self._begin(call, 0)
            loop.call_soon(self._turn, call, loop)

    def block(self, call: PendingCall, due_s: float | None = None) -> None:
        """A plain thread waits for the call: returns when it has ended, or is no longer quick.

        Args:
            due_s: the answer is expected so long after the call was made, whatever its member took for the last one.
        """
        if not (due_s is not None or self._is_quick(call)) or not self._may_poll(call):
            return
        self._begin(call, int((due_s or 0) * 1e9))
        try:
            while self._goes_on(call):
                self._look(call)
                os.sched_yield()  # On few cores, to whoever makes the answer.
        finally:
            self._call = None

    def _is_quick(self, call: PendingCall) -> bool:
        return call.peer is not None and 0 < call.peer.answer_ns < self._limit_ns

    def _begin(self, call: PendingCall, due_ns: int) -> None:
        call.look_until_ns = call.started_ns + due_ns + self._limit_ns
        self._call = call

    def _may_poll(self, call: PendingCall) -> bool:
        peer = call.peer
        return (
            (self._call is None or not self._goes_on(self._call))  # A loop that was stopped leaves its call here.
            and peer is not None
            and call.table.is_alone(call)
            and (threading.get_ident() == self._thread or isinstance(peer.channel.link, StreamLink))
        )

    def _goes_on(self, call: PendingCall) -> bool:
        peer = call.peer
        return peer is not None and call.call_id in peer.pending and time.perf_counter_ns() < call.look_until_ns

    def _turn(self, call: PendingCall, loop: asyncio.AbstractEventLoop) -> None:
        if threading.get_ident() != self._thread:
            self._look(call)  # Otherwise the loop itself looks, between its turns.
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
        answer = link.read_here(_lone_answer) if isinstance(link, StreamLink) else None
        if answer is not None:
            reply, frames = answer
            assert isinstance(reply, Reply)
            channel = call.peer.channel
            call.table.on_reply(link, reply, frames)
            if count := channel.backlog.took(frames):
                channel.send(TakenReplies(count), [])


def _lone_answer(packet: Frames) -> Message | None:
    """The only message of a packet, if it is an answer whose value lies in the packet and not in shared memory."""
    if len(packet) != 2:
        return None
    try:
        messages = unpack(packet)
    except MalformedFrame:
        return None  # Or it lends something. The loop looks closer.
    return messages[0] if len(messages) == 1 and type(messages[0][0]) is Reply else None
