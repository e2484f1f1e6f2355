"""Watches the GPUs of a node for the agent: events of NVML, and periodic reads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from rlmesh.placement.machine.gpu_health import DeviceBad, DeviceEvent, Health
from rlmesh.placement.machine.inventory import GPU, MIG, Device
from rlmesh.runtime.process.clock import epoch

if TYPE_CHECKING:
    from rlmesh.placement.machine.nvml import Nvml

__all__ = ["DeviceWatch", "gpus_of"]

logger = logging.getLogger(__name__)

WAIT_S = 0.25
"""Seconds of one wait for an event; ending the watch takes at most as long."""
LOOK_S = 10.0
"""Seconds between reads, which find faults that send no event, such as a GPU that is gone."""


def gpus_of(devices: Sequence[Device]) -> dict[str, tuple[str, ...]]:
    """The GPUs to watch, each with its devices (itself or its MIG parts); empty if all devices are virtual."""
    found: dict[str, tuple[str, ...]] = {}
    for device in devices:
        if device.kind == GPU:
            found[device.uuid] = (device.uuid,)
        elif device.kind == MIG:
            found[device.parent] = (*found.get(device.parent, ()), device.uuid)
    return found


class DeviceWatch:
    """Calls ``tell`` once for each GPU found bad. NVML is used on threads only, since it may block.

    Args:
        node_rank: the rank of the node.
        devices: the devices that the node has registered with.
        nvml: the library to use in place of pynvml.
        tell: a coroutine function that takes the fault.
    """

    def __init__(
        self,
        node_rank: int,
        devices: Sequence[Device],
        nvml: str,
        tell: Callable[[DeviceBad], Awaitable[None]],
        *,
        clock: Callable[[], float] = epoch,
        look_s: float = LOOK_S,
    ) -> None:
        self._gpus = gpus_of(devices)
        self._health = Health(node_rank, self._gpus)
        self._nvml, self._tell, self._clock, self._look_s = nvml, tell, clock, look_s
        self._closing = False

    async def run(self) -> None:
        """Watch until cancelled, or until NVML fails."""
        if not self._gpus:
            return
        from rlmesh.placement.machine.nvml import Nvml, NvmlFailed, library

        queue: asyncio.Queue[DeviceEvent | None] = asyncio.Queue()
        listener: asyncio.Task[None] | None = None
        try:
            reader = Nvml(library(self._nvml))
            loop = asyncio.get_running_loop()
            listener = asyncio.create_task(asyncio.to_thread(self._listen, reader, loop, queue))
            await self._watch(reader, queue)
            await listener
        except NvmlFailed as error:
            logger.warning("the GPUs of this node are not watched any more: %s", error)
        finally:
            self._closing = True
            if listener is not None:
                await asyncio.shield(asyncio.wait([listener]))

    def _listen(self, reader: Nvml, loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[DeviceEvent | None]) -> None:
        """Put events of NVML into the queue, then None. Runs on a thread, which opens NVML and closes it."""
        try:
            for event in reader.watch(self._gpus, WAIT_S, lambda: self._closing):
                if event is not None:
                    loop.call_soon_threadsafe(queue.put_nowait, event)
        finally:
            loop.call_soon_threadsafe(queue.put_nowait, None)

    async def _watch(self, reader: Nvml, queue: asyncio.Queue[DeviceEvent | None]) -> None:
        while True:
            gpus = await asyncio.to_thread(reader.read)
            for bad in self._health.look(gpus, self._clock()):
                await self._tell(bad)
            look_at = asyncio.get_running_loop().time() + self._look_s
            while (left_s := look_at - asyncio.get_running_loop().time()) > 0:
                try:
                    event = await asyncio.wait_for(queue.get(), left_s)
                except TimeoutError:
                    break
                if event is None:
                    return
                await self._judge(event)

    async def _judge(self, event: DeviceEvent) -> None:
        bad = self._health.judge(event, self._clock())
        if bad is not None:
            await self._tell(bad)
        elif event.kind == "xid":
            logger.info("GPU %s had Xid %d, which does not stop its use", event.uuid, event.xid)
