"""The location of this process's weights, as the plan needs it. Reads the system; `plan` itself has no I/O."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from rlmesh.memory.layout import place as shm_place
from rlmesh.weights.planning.plan import DeviceLocation


def location_of(device: str, node: str | None = None) -> DeviceLocation:
    """The location of weights on ``device`` (``cpu``, ``cuda:0``) of this process.

    Args:
        node: the node's name in the job; tests pretend to have several.
    """
    here = node or f"{socket.gethostname()}/{_boot_id()}"
    try:
        # Virtual nodes of one machine share its memory, but must look as if they did not.
        shm = f"{shm_place()}/{node or ''}"
    except OSError:
        shm = f"none/{here}/{os.getpid()}"
    if device.startswith("cuda"):
        from rlmesh.weights.cuda.devices import describe_device

        uuid, peers, hidden, why_not = describe_device(device)
        return DeviceLocation(here, shm, uuid, peers, not why_not, why_not, hidden)
    return DeviceLocation(here, shm)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"
