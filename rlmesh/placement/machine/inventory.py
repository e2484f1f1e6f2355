"""What a node has: plain values that agents report and the planner reads."""

from __future__ import annotations

from dataclasses import dataclass

VIRTUAL = "virtual"
"""``Device.kind`` of a slot that stands for an accelerator on a machine without any."""
GPU = "gpu"
MIG = "mig"
"""``Device.kind`` of a slice of a GPU, which is a device of its own."""


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, a slice of one, or a virtual slot that stands for one on a machine without any.

    Attributes:
        index: its place on the node: GPUs in the order of their bus ids, the slices of a GPU in its place.
        uuid: what CUDA_VISIBLE_DEVICES names it by.
        kind: ``gpu``, ``mig`` or ``virtual``.
        memory_bytes: its memory; of a slice the slice's; 0 if unknown.
        bus_id: PCI address such as ``00000000:3B:00.0``; of a slice its GPU's.
        numa: NUMA node that it is attached to; None if the machine does not say.
        model: product name.
        parent: UUID of the GPU that a slice belongs to.
        links: UUID of another GPU of the node and the number of NVLinks to it.
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
    """One NUMA node: the CPUs of it that this process may use, and its memory."""

    number: int
    cpus: tuple[int, ...]
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What an agent tells the master about its node: what a job may use of it, which is not always all of it.

    Attributes:
        cpus: cores, by affinity, quota and Slurm.
        numa: its NUMA nodes; empty if unknown or if there is only one.
        notes: what was left out and why, for people.
        host: the numeric address at which the node's processes listen for those of others; empty in a job of one
            machine.
        machine: equal where processes see each other's process numbers; host names are not unique.
        group: equal for agents that share a machine, one of them per task of Slurm; empty for a machine of its own.
        agent_public: where processes of other machines reach its agent; empty in a job of one machine.
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
