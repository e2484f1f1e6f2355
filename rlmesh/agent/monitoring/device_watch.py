"""Watches the GPUs of a node, for the agent: what NVML tells of them by itself, and what a look shows now and then."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from rlmesh.placement.machine.gpu_health import DeviceBad, DeviceNews, Health
from rlmesh.placement.machine.inventory import GPU, MIG, Device
from rlmesh.runtime.process.clock import epoch

if TYPE_CHECKING:
    from rlmesh.placement.machine.nvml import Nvml

__all__ = ["DeviceWatch", "gpus_of"]

logger = logging.getLogger(__name__)

WAIT_S = 0.25
"""How long one wait for news takes; the end of the watch takes as long at most."""
LOOK_S = 10.0
"""News come at once; what has no news of its own, such as a GPU that is gone, is looked for this often."""


def gpus_of(devices: Sequence[Device]) -> dict[str, tuple[str, ...]]:
    """The GPUs to watch, with the devices that are parts of them; empty if all are virtual."""
    found: dict[str, tuple[str, ...]] = {}
    for device in devices:
        if device.kind == GPU:
            found[device.uuid] = (device.uuid,)
        elif device.kind == MIG:
            found[device.parent] = (*found.get(device.parent, ()), device.uuid)
    return found


class DeviceWatch:
    """Calls ``tell`` once for each GPU that is found to be bad. NVML is used on threads only, since it may block.

    Args:
        node_rank: the node's.
        devices: those that the node has registered with.
        nvml: library in place of pynvml.
        tell: takes what was found; it is awaited.
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
        """Watch until cancelled, or until NVML does not work any more."""
        if not self._gpus:
            return
        from rlmesh.placement.machine.nvml import Nvml, NvmlFailed, library

        heard: asyncio.Queue[DeviceNews | None] = asyncio.Queue()
        listener: asyncio.Task[None] | None = None
        try:
            reader = Nvml(library(self._nvml))
            loop = asyncio.get_running_loop()
            listener = asyncio.create_task(asyncio.to_thread(self._listen, reader, loop, heard))
            await self._watch(reader, heard)
            await listener
        except NvmlFailed as error:
            logger.warning("the GPUs of this node are not watched any more: %s", error)
        finally:
            self._closing = True
            if listener is not None:
                await asyncio.shield(asyncio.wait([listener]))

    def _listen(self, reader: Nvml, loop: asyncio.AbstractEventLoop, heard: asyncio.Queue[DeviceNews | None]) -> None:
        """On a thread of its own, which opens NVML and closes it. The last thing heard is None."""
        try:
            for news in reader.watch(self._gpus, WAIT_S, lambda: self._closing):
                if news is not None:
                    loop.call_soon_threadsafe(heard.put_nowait, news)
        finally:
            loop.call_soon_threadsafe(heard.put_nowait, None)

    async def _watch(self, reader: Nvml, heard: asyncio.Queue[DeviceNews | None]) -> None:
        while True:
            gpus = await asyncio.to_thread(reader.read)
            for bad in self._health.look(gpus, self._clock()):
                await self._tell(bad)
            look_at = asyncio.get_running_loop().time() + self._look_s
            while (left_s := look_at - asyncio.get_running_loop().time()) > 0:
                try:
                    news = await asyncio.wait_for(heard.get(), left_s)
                except TimeoutError:
                    break
                if news is None:
                    return
                await self._judge(news)

    async def _judge(self, news: DeviceNews) -> None:
        bad = self._health.hear(news, self._clock())
        if bad is not None:
            await self._tell(bad)
        elif news.kind == "xid":
            logger.info("GPU %s had Xid %d, which is no reason not to use it", news.uuid, news.xid)
