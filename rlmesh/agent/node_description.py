"""The description with which an agent registers: what its machine offers to a job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rlmesh.agent.protocol import AgentConfig
from rlmesh.placement.machine.inventory import Device, NodeInfo
from rlmesh.placement.machine.system import Machine

__all__ = ["machine_id", "node_info"]


def machine_id() -> str:
    """An identity that is equal in two processes if process numbers mean the same to both: same kernel and namespace.
    Host names do not tell this: two machines may share one, and containers usually do."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"


def node_info(
    config: AgentConfig, endpoint: str, machine: Machine | None = None, env: Mapping[str, str] | None = None,
    *, public: str = "",
) -> NodeInfo:  # fmt: skip
    """Describe what the machine offers under the masks and allocations in ``env`` (default: this process's
    environment). The agent listens at ``endpoint`` for the master and at ``public`` for processes of other machines.
    ``config.virtual_devices`` replaces the machine's own devices."""
    machine = machine or Machine(nvml=config.nvml)
    env = os.environ if env is None else env
    notes: tuple[str, ...] = ()
    if config.virtual_devices is None:
        devices, notes = machine.devices(env)
    else:
        devices = tuple(Device(index, f"virtual-{index}") for index in range(config.virtual_devices))
    return NodeInfo(
        node_rank=config.node_rank,
        name=config.node_name,
        hostname=os.uname().nodename,
        agent_endpoint=endpoint,
        agent_pid=os.getpid(),
        cpus=machine.cpus(env),
        memory_bytes=machine.memory_bytes(env),
        devices=devices,
        host=config.host,
        machine=machine_id(),
        numa=machine.numa(),
        notes=notes,
        group=config.group,
        agent_public=public,
    )
