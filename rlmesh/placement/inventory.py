"""What a node has: plain values that agents report and the planner reads."""

from __future__ import annotations

from dataclasses import dataclass

VIRTUAL = "virtual"
"""``Device.kind`` of a slot that stands for an accelerator on a machine without any."""


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or a virtual slot that stands for one on a machine without any."""

    index: int
    uuid: str
    kind: str = VIRTUAL
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What an agent tells the master about its node."""

    node_rank: int
    name: str
    hostname: str
    agent_endpoint: str
    agent_pid: int
    cpus: int
    memory_bytes: int
    devices: tuple[Device, ...] = ()
