"""Large buffers between processes of one node: shared memory instead of bytes in the packet.

Each side says after the greeting where its shared memory lies (`Shares`); if both say the same, the frames of
messages that lie in shared memory are lent: the packet carries where they are (`Loan`), and the borrower gives
them back (`GiveBacks`) when its last array or tensor over them is gone.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rlmesh.errors import WireError
from rlmesh.memory.attach import writable
from rlmesh.memory.exchange import MemoryExchange
from rlmesh.memory.layout import Descriptor, GiveBack
from rlmesh.wire.envelope import Buffer, Frames, GiveBacks, Loan, Shares

if TYPE_CHECKING:
    from rlmesh.runtime.channel import Channel


class _Gone:
    """In the place of a message whose buffers cannot be had: decoding it raises."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return _raise_gone, (self.text,)


def _raise_gone(text: str) -> None:
    raise WireError(f"the shared memory of the message cannot be read: {text}")


class Lending:
    """The shared memory of one runtime, as its channels use it.

    Args:
        name: the runtime's; part of its segments' names, for people.
        node_rank: the node's; part of the names, by which each node's guardian knows its own.
        key: the job's secret; without a ``job_id`` segments are named for its hash.
        job_id: the job's, by which its guardian finds segments that were left.
        post: runs a function on the runtime's loop.
    """

    def __init__(self, name: str, key: bytes, job_id: str | None, node_rank: int, post: Callable[..., None]) -> None:
        job = job_id or "k" + hashlib.blake2b(key, digest_size=6).hexdigest()
        plain = re.sub("[^A-Za-z0-9_]", ".", name)
        owner = f"n{node_rank}-{plain}-{os.getpid()}-{id(self) & 0xFFFF:x}"
        self._post = post
        self._woken = False
        self.exchange = MemoryExchange(job, owner, wake=self._wake)

    def capture(self, buffers: Sequence[memoryview]) -> Sequence[Buffer]:
        """Frames of an argument's or a result's large buffers; from any thread."""
        return self.exchange.capture(buffers)

    def announce(self, channel: Channel) -> None:
        channel.send(Shares(self.exchange.place), [])

    def on_shares(self, channel: Channel, shares: Shares) -> None:
        if shares.place == self.exchange.place:
            channel.lend = lambda frame: self._lend(frame, channel)

    def _lend(self, frame: memoryview, channel: Channel) -> Loan | None:
        found = self.exchange.lend(frame, channel)
        return Loan(*found) if found is not None else None

    def borrow(self, payload: Sequence[Buffer | Loan], channel: Channel) -> Frames:
        """The frames of a message, with what was lent in its place. If that is not there (its owner died, or it
        cannot be mapped), decoding the message raises, and so only this message fails."""
        loans = [frame for frame in payload if type(frame) is Loan]
        try:
            views = iter(self.exchange.borrow([Descriptor(*loan) for loan in loans], channel))
        except (WireError, OSError) as error:
            return [pickle.dumps(_Gone(f"{type(error).__name__}: {error}"))]
        return [writable(next(views)) if type(frame) is Loan else frame for frame in payload]  # type: ignore[misc]

    def on_give_backs(self, channel: Channel, message: GiveBacks) -> None:
        self.exchange.give_back([GiveBack.parse(item) for item in message.items], channel)

    def lost(self, channel: Channel) -> None:
        self.exchange.peer_lost(channel)

    def trim(self) -> None:
        """Give memory that nobody used for a while back to the system; may block for 0.2 s per GiB."""
        self.exchange.trim()

    def close(self) -> None:
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
