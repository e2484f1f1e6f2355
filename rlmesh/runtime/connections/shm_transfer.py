"""Passes large buffers between processes of one node through shared memory.

After the handshake each side sends the place of its shared memory (`ShmPlace`). If the places are equal, a packet
carries references (`BufferRef`) to frames in shared memory instead of their bytes, and the receiver releases them
(`SlotReleases`) when its last array or tensor over them is gone.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rlmesh.errors import SlotGone, WireError
from rlmesh.memory.attach import writable
from rlmesh.memory.exchange import MemoryExchange
from rlmesh.memory.layout import Descriptor, SlotRelease, owner_name
from rlmesh.runtime.connections.pool_trimmer import PoolTrimmer
from rlmesh.wire.envelope import Buffer, BufferRef, Frames, ShmPlace, SlotReleases

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
        job_id: part of the segments' names, by which the job's guardian finds leftover segments.
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
