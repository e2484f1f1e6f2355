"""The agent's side of device leases: members that wait for their turn. `LeaseTable` decides."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from rlmesh.placement.device_leases import LeaseAnswer, LeaseTable, MemberKey
from rlmesh.runtime.process import clock

__all__ = ["DeviceLeaseServer"]


class DeviceLeaseServer:
    """The leases of one node's devices. Belongs to one event loop."""

    def __init__(self, clock_: Callable[[], float] = time.monotonic) -> None:
        self._table = LeaseTable()
        self._clock = clock_
        self._waiting: dict[MemberKey, asyncio.Future[None]] = {}

    async def take(self, key: MemberKey, together: Mapping[MemberKey, Sequence[str]], timeout_s: float) -> LeaseAnswer:
        """Wait until the member has its devices; ``together`` as in `LeaseTable.ask`. Cancel to leave the queue."""
        devices = tuple(together[key])
        began = self._clock()
        if not any(together.values()):
            return LeaseAnswer(True)
        if key in self._table.ask(key, together, began):
            return LeaseAnswer(True, devices)
        turn = self._waiting.setdefault(key, asyncio.get_running_loop().create_future())
        try:
            async with clock.timeout(timeout_s):
                await asyncio.shield(turn)
        except TimeoutError:
            if not turn.done():
                why = self._table.why_not(key, self._clock())
                self.give_back(key)
                return LeaseAnswer(False, devices, self._clock() - began, why)
        except asyncio.CancelledError:
            if self._waiting.get(key) is turn:  # else the member gave up its place, and may have a new one
                self.give_back(key)
            raise
        return LeaseAnswer(True, devices, self._clock() - began)

    def give_back(self, key: MemberKey) -> None:
        """Release the devices or the place in the queue of a member."""
        self._drop(key)
        self._wake(self._table.give_back(key, self._clock()))

    def gone(self, key: MemberKey) -> None:
        """Release everything of a member whose process has ended."""
        self._drop(key)
        self._wake(self._table.gone(key, self._clock()))

    def _drop(self, key: MemberKey) -> None:
        if (turn := self._waiting.pop(key, None)) is not None and not turn.done():
            turn.cancel()

    def _wake(self, got: Iterable[MemberKey]) -> None:
        for key in got:
            if (turn := self._waiting.pop(key, None)) is not None and not turn.done():
                turn.set_result(None)
