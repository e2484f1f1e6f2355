"""Resources of a node: plain values that agents report and the planner reads."""

from __future__ import annotations

from dataclasses import dataclass

VIRTUAL = "virtual"
"""``Device.kind`` of a slot that stands for an accelerator on a machine without any."""
GPU = "gpu"
MIG = "mig"
"""``Device.kind`` of a slice of a GPU, which is a device in its own right."""


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, a slice of one, or a virtual slot that stands for one on a machine without any.

    Attributes:
        index: its position on the node: GPUs in the order of their bus ids, the slices of a GPU in its place.
        uuid: its name in CUDA_VISIBLE_DEVICES.
        kind: ``gpu``, ``mig`` or ``virtual``.
        memory_bytes: its memory; of a slice the slice's; 0 if unknown.
        bus_id: PCI address such as ``00000000:3B:00.0``; of a slice its GPU's.
        numa: NUMA node that it is attached to; None if unknown.
        model: product name.
        parent: UUID of the GPU of a slice.
        links: pairs of another GPU's UUID and the number of NVLinks to it.
        fault: why it must not be used; empty if it may.
    """

    index: int
    uuid: str
    kind: str = VIRTUAL
    memory_bytes: int = 0
    bus_id: str = ""
    numa: int | None = None
    model: str = ""
    parent: str = ""
    links: tuple[tuple[str, int], ...] = ()
    fault: str = ""


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One NUMA node: its CPUs that this process may use, and its memory."""

    number: int
    cpus: tuple[int, ...]
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """An agent's description of its node for the master: the resources that a job may use, not all that exist.

    Attributes:
        cpus: number of cores, by affinity, quota and Slurm.
        numa: its NUMA nodes; empty if unknown or if there is only one.
        notes: what was left out and why, for people.
        host: the numeric address at which the node's processes listen for those of others; empty in a job of one
            machine.
        machine: equal where processes see each other's process numbers; host names are not unique.
        group: equal for agents that share a machine, one per task of Slurm; empty for an agent alone on its machine.
        agent_public: the agent's endpoint for processes of other machines; empty in a job of one machine.
    """

    node_rank: int
    name: str
    hostname: str
    agent_endpoint: str
    agent_pid: int
    cpus: int
    memory_bytes: int
    devices: tuple[Device, ...] = ()
    numa: tuple[NumaNode, ...] = ()
    notes: tuple[str, ...] = ()
    host: str = ""
    machine: str = ""
    group: str = ""
    agent_public: str = ""
