"""Large buffers between processes of one node: shared memory instead of bytes in the packet.

Each side says after the greeting where its shared memory lies (`Shares`); if both say the same, the frames of
messages that lie in shared memory are lent: the packet carries where they are (`BufferRef`), and the borrower gives
them back (`GiveBacks`) when its last array or tensor over them is gone.
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
from rlmesh.memory.layout import Descriptor, LoanReturn, owner_name
from rlmesh.runtime.connections.pool_trimmer import Trimmer
from rlmesh.wire.envelope import Buffer, BufferRef, Frames, GiveBacks, Shares

if TYPE_CHECKING:
    from rlmesh.runtime.connections.channel import Channel


_numbers = itertools.count()
"""Of the runtimes of this process."""


class _Gone:
    """In the place of a message whose buffers cannot be had: decoding it raises."""

    def __init__(self, error: WireError) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Callable[[WireError], None], tuple[WireError]]:
        return _raise_gone, (self.error,)


def _raise_gone(error: WireError) -> None:
    raise error


def _not_there(error: WireError | OSError, sender: str) -> WireError:
    """What whoever decodes the message is told."""
    if isinstance(error, SlotGone):
        return SlotGone(
            f"{error}, before this process ({os.getpid()}) could hold what {sender} sent. Nothing of it can be read "
            "any more: make the call again once the lender is back, or ask whoever made the value"
        )
    if isinstance(error, OSError):
        return WireError(
            f"shared memory that {sender} sent cannot be opened here: {error}. Too many files or mappings? See "
            "`ulimit -n` and vm.max_map_count"
        )
    return error


class Lending:
    """The shared memory of one runtime, as its channels use it.

    Args:
        name: the runtime's; part of its segments' names, for people.
        node_rank: the node's; part of the names, by which each node's guardian knows its own.
        key: the job's secret; without a ``job_id`` segments are named for its hash.
        job_id: the job's, by which its guardian finds segments that were left.
        loop: the runtime's.
        post: runs a function on it.
        on_loop: is the calling thread the loop's?
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
        """Equal at a peer: it can open this runtime's segments, and does. (Who does not know the job's name, a tool
        that only has its key, opens none of them.)"""
        self._trimmer = Trimmer(self.exchange, loop, post)

    def capture(self, buffers: Sequence[memoryview]) -> Sequence[Buffer]:
        """Frames of an argument's or a result's large buffers; from any thread."""
        frames = self.exchange.capture(buffers)
        self._trimmer.want()
        return frames

    def announce(self, channel: Channel) -> None:
        channel.send(Shares(self.place), [])

    def on_shares(self, channel: Channel, shares: Shares) -> None:
        if shares.place == self.place:
            channel.lend = lambda frame: self._lend(frame, channel)

    def _lend(self, frame: memoryview, channel: Channel) -> BufferRef | None:
        found = self.exchange.lend(frame, channel)
        return BufferRef(*found) if found is not None else None

    def borrow(self, payload: Sequence[Buffer | BufferRef], channel: Channel) -> Frames:
        """The frames of a message, with what was lent in its place. If that is not there (its owner died, or it
        cannot be mapped), decoding the message raises, and so only this message fails."""
        loans = [frame for frame in payload if type(frame) is BufferRef]
        try:
            views = iter(self.exchange.borrow([Descriptor(*loan) for loan in loans], channel))
        except (WireError, OSError) as error:
            return [pickle.dumps(_Gone(_not_there(error, channel.peer_name)))]
        self._trimmer.want()
        return [writable(next(views)) if type(frame) is BufferRef else frame for frame in payload]  # type: ignore[misc]

    def on_give_backs(self, channel: Channel, message: GiveBacks) -> None:
        self.exchange.give_back([LoanReturn.parse(item) for item in message.items], channel)

    def lost(self, channel: Channel) -> None:
        self.exchange.peer_lost(channel)

    def close(self) -> None:
        self._trimmer.close()
        self.exchange.close()

    def _wake(self) -> None:
        # Called by the garbage collector too, on any thread and at any moment.
        if not self._woken:
            self._woken = True
            self._post(self._send_give_backs)

    def _send_give_backs(self) -> None:
        self._woken = False
        owed: Any
        for channel, owed in self.exchange.take_give_backs().items():
            channel.send(GiveBacks(tuple(tuple(item) for item in owed)), [])  # type: ignore[attr-defined]
