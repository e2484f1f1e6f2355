"""Faulty networks: packets that are lost, late, duplicated or out of order, and connections that go silent.

::

    plan = FaultPlan(seed=7, drop=0.01, delay_s=(0.0, 0.2))
    options = NetworkOptions(transports={"unix": faulty(unix, plan)})

A transport guarantees that packets of a link arrive in order and whole, or that the link is lost. TCP and Unix sockets
keep this guarantee; a plan breaks it on purpose. Under every plan, each call must end by its deadline, with its own
correct answer or with an error, and the runtime must continue to work.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

from rlmesh.errors import UsageError
from rlmesh.runtime.argument_types import require
from rlmesh.runtime.transport.base import Link, PacketReceiver, Rejection, Transport, TransportFactory
from rlmesh.wire.envelope import Frames

REORDER_LIMIT_S = 0.05
"""A packet that is held back for reordering is sent after this time, if no packet has overtaken it."""


@dataclass(frozen=True)
class FaultPlan:
    """Faults of sent packets. The same seed and the same packets give the same faults.

    Attributes:
        seed: of all random decisions.
        drop: share of packets that are lost.
        duplicate: share of packets that arrive twice.
        reorder: share of packets that the next packet of their link overtakes.
        delay_s: range of the packets' delay; their order is kept.
        half_open: share of packets after which their link silently drops all packets in that direction.
        alter: share of packets with one changed byte in their headers.
        spare: number of first packets per link and direction without faults; 2 spare the handshake.
        done: number of injected faults, by kind.
    """

    seed: int = 0
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    delay_s: tuple[float, float] = (0.0, 0.0)
    half_open: float = 0.0
    alter: float = 0.0
    spare: int = 2
    done: Counter[str] = field(default_factory=Counter, compare=False)

    def __post_init__(self) -> None:
        require("FaultPlan(seed=…)", self.seed, int, "a number")
        require("FaultPlan(spare=…)", self.spare, int, "a number of packets")
        for name in ("drop", "duplicate", "reorder", "half_open", "alter"):
            if not isinstance(share := getattr(self, name), int | float) or not 0 <= share <= 1:
                raise UsageError(f"FaultPlan({name}={share!r}): it is a share of the packets, 0 to 1")
        times: Any = self.delay_s
        if not isinstance(times, tuple) or len(times) != 2 or not all(isinstance(t, int | float) for t in times):
            raise UsageError(f"FaultPlan(delay_s={times!r}): it is a pair of times, such as (0.0, 0.2)")
        if not 0 <= times[0] <= times[1] < inf:
            raise UsageError(f"FaultPlan(delay_s={times!r}): the first time is 0 or more, the second one not smaller")


def faulty(factory: TransportFactory, plan: FaultPlan) -> TransportFactory:
    """A transport with the faults of ``plan``, in both directions of the links of its runtime."""
    numbers = itertools.count()

    def make(
        receiver: PacketReceiver, loop: asyncio.AbstractEventLoop, post: Callable[..., None], key: bytes
    ) -> Transport:
        return _FaultyTransport(factory, plan, numbers, receiver, loop, post, key)

    return make


class _FaultyLink:
    """A link that applies the plan to packets before it sends them."""

    def __init__(
        self, inner: Link, plan: FaultPlan, number: int, loop: asyncio.AbstractEventLoop, post: Callable[..., None]
    ) -> None:
        self.inner = inner
        self.thread_safe, self.chunk_bytes, self.here = inner.thread_safe, inner.chunk_bytes, inner.here
        self._plan, self._loop, self._post = plan, loop, post
        self._random = random.Random(f"{plan.seed}/{number}")
        self._sent = 0
        self._silent = self._closed = False
        self._queue: deque[Frames] = deque()
        self._due_s = 0.0
        self._held_back: Frames | None = None

    @property
    def peer(self) -> str:
        return self.inner.peer

    def send(self, frames: Frames) -> None:
        self._sent += 1
        if self._sent <= self._plan.spare:
            self.inner.send(frames)
        else:
            self._post(self._apply_plan, frames)

    def trust(self) -> None:
        self.inner.trust()

    def close(self) -> None:
        self._closed = True
        self.inner.close()

    # On the loop.

    def _apply_plan(self, frames: Frames) -> None:
        plan = self._plan
        drop, duplicate, reorder, half_open, alter = (self._random.random() for _ in range(5))
        self._silent = self._silent or half_open < plan.half_open
        if self._silent or drop < plan.drop:
            plan.done["half-open" if self._silent else "drop"] += 1
            return
        if alter < plan.alter:
            plan.done["alter"] += 1
            headers = bytearray(frames[0])
            headers[self._random.randrange(len(headers))] ^= self._random.randrange(1, 256)
            frames = [bytes(headers), *frames[1:]]
        if reorder < plan.reorder and self._held_back is None:
            plan.done["reorder"] += 1
            self._held_back = frames
            self._loop.call_later(REORDER_LIMIT_S, self._release)
            return
        self._schedule(frames)
        if duplicate < plan.duplicate:
            plan.done["duplicate"] += 1
            self._schedule(frames)
        self._release()

    def _release(self) -> None:
        frames, self._held_back = self._held_back, None
        if frames is not None:
            self._schedule(frames)

    def _schedule(self, frames: Frames) -> None:
        wait_s = self._random.uniform(*self._plan.delay_s)
        if wait_s > 0:
            self._plan.done["delay"] += 1
        self._due_s = max(self._due_s, self._loop.time() + wait_s)
        self._queue.append(frames)
        self._loop.call_at(self._due_s, self._send_next)

    def _send_next(self) -> None:
        frames = self._queue.popleft()
        if not self._closed:
            self.inner.send(frames)


class _FaultyTransport:
    """Wraps a transport, and forwards between it and its runtime."""

    def __init__(
        self, factory: TransportFactory, plan: FaultPlan, numbers: itertools.count[int], receiver: PacketReceiver,
        loop: asyncio.AbstractEventLoop, post: Callable[..., None], key: bytes,
    ) -> None:  # fmt: skip
        self._inner = factory(self, loop, post, key)
        self._plan, self._numbers, self._receiver, self._loop, self._post = plan, numbers, receiver, loop, post
        self._links: dict[Link, _FaultyLink] = {}

    def bind(self, address: str) -> str:
        return self._inner.bind(address)

    def connect(self, endpoint: str) -> Link:
        return self._outer(self._inner.connect(endpoint))

    def idle(self) -> bool:
        return self._inner.idle()

    def close(self, linger_s: float) -> None:
        self._inner.close(linger_s)

    def forked(self) -> None:
        self._inner.forked()

    def on_packet(self, link: Link, frames: Frames) -> None:
        self._receiver.on_packet(self._outer(link), frames)

    def on_rejected(self, link: Link, detail: str, reason: Rejection | None = None) -> None:
        self._receiver.on_rejected(self._outer(link, keep=False), detail, reason)

    def on_lost(self, link: Link, reason: str) -> None:
        self._receiver.on_lost(self._outer(link, keep=False), reason)

    def on_refused(self, peer: str, reason: Rejection, detail: str) -> None:
        self._receiver.on_refused(peer, reason, detail)

    def _outer(self, link: Link, *, keep: bool = True) -> _FaultyLink:
        found = self._links.get(link)
        if found is None:
            found = _FaultyLink(link, self._plan, next(self._numbers), self._loop, self._post)
            self._links[link] = found
        if not keep:
            del self._links[link]
        return found
