"""Passes large buffers between processes of one node through shared memory.

After the handshake each side sends the place of its shared memory (`ShmPlace`). If the places are equal, a packet
carries references (`BufferRef`) to frames in shared memory instead of their bytes, and the receiver releases them
(`SlotReleases`) when its last array or tensor over them is gone.

`PoolTrimmer` gives idle shared memory back to the system while the runtime runs. A timer on the runtime's loop checks
every half minute. Freeing pages takes long (0.2 s per GiB), so it runs on a thread that is started for it and ends with
it: a service that embeds a runtime keeps no thread of rlmesh. The timer runs only while there is shared memory.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rlmesh.errors import SlotGone, WireError
from rlmesh.memory.attach import writable
from rlmesh.memory.exchange import MemoryExchange
from rlmesh.memory.layout import Descriptor, SlotRelease, owner_name
from rlmesh.wire.envelope import Buffer, BufferRef, Frames, ShmPlace, SlotReleases

logger = logging.getLogger(__name__)

EVERY_S = 30.0
IDLE_S = 60.0
_JOIN_S = 5.0


class Trimmed(Protocol):
    """The memory that a `PoolTrimmer` trims."""

    def is_empty(self) -> bool:
        """True if there is no memory that could become idle."""
        ...

    def has_idle(self, idle_s: float) -> bool:
        """True if `trim` would free memory. Quick."""
        ...

    def trim(self, idle_s: float) -> int:
        """Free memory that has been idle for ``idle_s``, and return its bytes. May take long."""
        ...


class PoolTrimmer:
    """The timer of a runtime.

    Args:
        loop: the runtime's loop.
        post: runs a function on the loop, from any thread.
    """

    def __init__(self, memory: Trimmed, loop: asyncio.AbstractEventLoop, post: Callable[..., None]) -> None:
        self._memory, self._loop, self._post = memory, loop, post
        self._started = self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the timer unless it runs. Thread-safe; called whenever memory comes into use."""
        if not self._started:
            self._started = True
            self._post(self._set_timer)

    def close(self) -> None:
        """Stop the timer, and wait for a trim that is running. Runs on the loop."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _set_timer(self) -> None:
        if not self._closed:
            self._timer = self._loop.call_later(EVERY_S, self._check)

    def _check(self) -> None:
        self._timer = None
        if self._memory.has_idle(IDLE_S):
            self._thread = threading.Thread(target=self._trim, name="rlmesh-trim", daemon=True)
            self._thread.start()
        else:
            self._checked()

    def _trim(self) -> None:
        try:
            nbytes = self._memory.trim(IDLE_S)
            logger.debug("%d bytes of idle shared memory went back to the system", nbytes)
        finally:
            self._post(self._trimmed)

    def _trimmed(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_JOIN_S)
        self._checked()

    def _checked(self) -> None:
        # The flag is cleared first, so that memory that comes into use meanwhile starts the timer again.
        self._started = False
        if not self._memory.is_empty():
            self.start()


if TYPE_CHECKING:
    from rlmesh.runtime.connections.channel import Channel


_numbers = itertools.count()
"""Numbers for the runtimes of this process."""


class _Gone:
    """The content of a message whose buffers cannot be opened; decoding it raises."""

    def __init__(self, error: WireError) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Callable[[WireError], None], tuple[WireError]]:
        return _raise_gone, (self.error,)


def _raise_gone(error: WireError) -> None:
    raise error


def _unavailable(error: WireError | OSError, sender: str) -> WireError:
    """The error that decoding the message raises."""
    if isinstance(error, SlotGone):
        return SlotGone(
            f"{error}, before this process ({os.getpid()}) could lock the memory that {sender} sent. Its content is "
            "lost: make the call again once the process that sent it is back, or fetch the value from its producer"
        )
    if isinstance(error, OSError):
        return WireError(
            f"shared memory that {sender} sent cannot be opened here: {error}. Too many files or mappings? See "
            "`ulimit -n` and vm.max_map_count"
        )
    return error


class ShmTransfer:
    """The shared memory of one runtime, as its channels use it.

    Args:
        name: the runtime's name; part of its segments' names, for people.
        key: the job's key; without a ``job_id`` its hash is part of the segments' names.
        job_id: part of the segments' names, by which the guardians, which clean up after crashes, find leftovers.
        node_rank: part of the segments' names, by which each node's guardian finds the segments of its node.
        loop: the runtime's loop.
        post: runs a function on the loop.
        on_loop: returns True on the loop's thread.
    """

    def __init__(
        self, name: str, key: bytes, job_id: str | None, node_rank: int, loop: asyncio.AbstractEventLoop,
        post: Callable[..., None], on_loop: Callable[[], bool],
    ) -> None:  # fmt: skip
        job = job_id or "k" + hashlib.blake2b(key, digest_size=6).hexdigest()
        owner = owner_name(node_rank, name, os.getpid(), next(_numbers))
        self._post = post
        self._woken = False
        self.exchange = MemoryExchange(job, owner, wake=self._wake, may_wait=lambda: not on_loop())
        self.place = f"{self.exchange.place}:{job}"
        """Peers with an equal value open this runtime's segments. (A tool that has the job's key but not its name opens
        none of them.)"""
        self._trimmer = PoolTrimmer(self.exchange, loop, post)

    def capture(self, buffers: Sequence[memoryview]) -> Sequence[Buffer]:
        """Frames of an argument's or a result's large buffers. Thread-safe."""
        frames = self.exchange.capture(buffers)
        self._trimmer.start()
        return frames

    def announce(self, channel: Channel) -> None:
        channel.send(ShmPlace(self.place), [])

    def on_place(self, channel: Channel, message: ShmPlace) -> None:
        if message.place == self.place:
            channel.make_ref = lambda frame: self._make_ref(frame, channel)

    def _make_ref(self, frame: memoryview, channel: Channel) -> BufferRef | None:
        found = self.exchange.add_ref(frame, channel)
        return BufferRef(*found) if found is not None else None

    def open_refs(self, payload: Sequence[Buffer | BufferRef], channel: Channel) -> Frames:
        """The frames of a message, with the referenced frames in place of the references.

        If a referenced frame is unavailable (its owner died, or it cannot be mapped), decoding the message raises, so
        that only this message fails.
        """
        refs = [frame for frame in payload if type(frame) is BufferRef]
        try:
            views = iter(self.exchange.borrow([Descriptor(*ref) for ref in refs], channel))
        except (WireError, OSError) as error:
            return [pickle.dumps(_Gone(_unavailable(error, channel.peer_name)))]
        self._trimmer.start()
        return [writable(next(views)) if type(frame) is BufferRef else frame for frame in payload]  # type: ignore[misc]

    def on_releases(self, channel: Channel, message: SlotReleases) -> None:
        self.exchange.release([SlotRelease.parse(item) for item in message.items], channel)

    def lost(self, channel: Channel) -> None:
        self.exchange.peer_lost(channel)

    def close(self) -> None:
        self._trimmer.close()
        self.exchange.close()

    def _wake(self) -> None:
        # The garbage collector may call this, on any thread and at any moment.
        if not self._woken:
            self._woken = True
            self._post(self._send_releases)

    def _send_releases(self) -> None:
        self._woken = False
        ended: Any
        for channel, ended in self.exchange.take_releases().items():
            channel.send(SlotReleases(tuple(tuple(item) for item in ended)), [])  # type: ignore[attr-defined]
