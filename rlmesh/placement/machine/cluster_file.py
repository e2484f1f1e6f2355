"""A cluster in a TOML file, for plans on machines that are not part of it.

::

    [[nodes]]
    name = "gpu"              # gpu-0, gpu-1, … if count is more than 1
    count = 125
    cpus = 128
    memory_gib = 1024
    gpus = 8
    gpu_model = "H100"
    gpu_memory_gib = 80
    numa = 2                  # NUMA nodes, among which CPUs and GPUs are divided
    nvlink = "all"            # or "pairs", "none"
    agents = 1                # or the number of tasks that Slurm starts there, each of which sees its share of the GPUs

    [[nodes]]
    name = "cpu"
    cpus = 64
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlmesh.errors import UsageError
from rlmesh.job.nearest_name import did_you_mean
from rlmesh.placement.machine.inventory import GPU, VIRTUAL, Device, NodeInfo, NumaNode

__all__ = ["nodes_of", "read_cluster"]

GIB = 2**30
LINKS = 18
"""NVLinks between two GPUs that the description links."""

DEFAULTS: dict[str, Any] = {
    "name": "node", "count": 1, "cpus": 1, "memory_gib": 0, "gpus": 0, "virtual": 0, "gpu_model": "GPU",
    "gpu_memory_gib": 0, "numa": 1, "nvlink": "all", "agents": 1,
}  # fmt: skip
NVLINK = ("all", "pairs", "none")
LEAST_ONE = ("count", "cpus", "numa", "agents")
MOST: Mapping[str, int] = {
    "count": 100_000, "cpus": 100_000, "memory_gib": 2**30, "gpus": 1024, "virtual": 100_000, "gpu_memory_gib": 2**20,
    "numa": 1024, "agents": 1024,
}  # fmt: skip
"""Largest values: larger ones are mistakes, and take long to plan for."""


def read_cluster(path: Path) -> tuple[NodeInfo, ...]:
    """Read the nodes that a file describes.

    Raises:
        UsageError: the file cannot be read, or has faults; lists all of them.
    """
    try:
        found = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"cluster file {path}: {error}") from None
    return nodes_of(found, f"cluster file {path}")


def nodes_of(described: Mapping[str, Any], where: str = "cluster") -> tuple[NodeInfo, ...]:
    """The nodes that a mapping with the TOML file's structure describes. See :func:`read_cluster`."""
    faults: list[str] = []
    groups = described.get("nodes", [])
    unknown = sorted(map(str, set(described) - {"nodes"}))
    faults += [f"{key}: there is no such key.{did_you_mean(key, ['nodes'])}" for key in unknown]
    if not isinstance(groups, list) or not groups or not all(isinstance(group, Mapping) for group in groups):
        faults.append("nodes: must be a list of tables, at least one: write [[nodes]]")
        groups = []
    nodes: list[NodeInfo] = []
    for number, group in enumerate(groups):
        wrong = _faults(group)
        faults += [f"nodes[{number}].{fault}" for fault in wrong]
        if not wrong:
            nodes += _nodes({**DEFAULTS, **group}, len(nodes))
    names = Counter(node.name for node in nodes)
    faults += [f"nodes: {name} is there twice: give each its own name" for name, count in names.items() if count > 1]
    if faults:
        raise UsageError(f"{where}: " + "; ".join(faults))
    return tuple(nodes)


def _faults(group: Mapping[str, Any]) -> list[str]:
    found = []
    for key, value in group.items():
        if key not in DEFAULTS:
            found.append(f"{key}: there is no such key.{did_you_mean(str(key), DEFAULTS)}")
        elif isinstance(DEFAULTS[key], str):
            if not isinstance(value, str) or not value:
                found.append(f"{key}={value!r}: must be text")
        elif key in ("memory_gib", "gpu_memory_gib"):
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= MOST[key]:
                found.append(f"{key}={value!r}: must be a number of GiB, at most {MOST[key]}")
        elif not isinstance(value, int) or isinstance(value, bool) or not (key in LEAST_ONE) <= value <= MOST[key]:
            found.append(f"{key}={value!r}: must be a whole number from {int(key in LEAST_ONE)} to {MOST[key]}")
    if group.get("nvlink", "all") not in NVLINK:
        found.append(f"nvlink={group['nvlink']!r}: must be one of {', '.join(NVLINK)}")
    agents = group.get("agents", 1)
    if not found and agents > 1:
        counts = {key: group.get(key, DEFAULTS[key]) for key in ("cpus", "gpus", "virtual")}
        found += [
            f"agents={agents}: {count} {key} cannot be divided evenly among them"
            for key, count in counts.items()
            if count % agents
        ]
    return found


def _nodes(group: Mapping[str, Any], first: int) -> list[NodeInfo]:
    count, cpus, domains = group["count"], group["cpus"], group["numa"]
    memory = int(group["memory_gib"] * GIB)
    borders = [cpus * i // domains for i in range(domains + 1)]
    numa = tuple(
        NumaNode(i, tuple(range(borders[i], borders[i + 1])), memory // domains) for i in range(domains)
    ) if domains > 1 else ()  # fmt: skip
    found: list[NodeInfo] = []
    for i in range(count):
        name = f"{group['name']}-{i}" if count > 1 else group["name"]
        node = NodeInfo(first + i, name, name, "", 0, cpus, memory or 2**63, _devices(group, name), numa)
        found += _shared_out(node, group["agents"], first + len(found)) if group["agents"] > 1 else [node]
    return found


def _shared_out(node: NodeInfo, agents: int, first: int) -> list[NodeInfo]:
    """Split a machine with several agents into one node per agent, each with its share."""
    real, slots = ([d for d in node.devices if (d.kind == VIRTUAL) is virtual] for virtual in (False, True))
    shares = [
        (*real[i * len(real) // agents : (i + 1) * len(real) // agents],
         *slots[i * len(slots) // agents : (i + 1) * len(slots) // agents])
        for i in range(agents)
    ]  # fmt: skip
    return [
        replace(
            node, node_rank=first + i, name=f"{node.name}.{i}", cpus=node.cpus // agents,
            memory_bytes=node.memory_bytes // agents, devices=shares[i], numa=(),
            group=node.name, machine=node.name,
        )
        for i in range(agents)
    ]  # fmt: skip


def _devices(group: Mapping[str, Any], name: str) -> tuple[Device, ...]:
    count, domains = group["gpus"], group["numa"]
    uuids = [f"GPU-{name}-{i}" for i in range(count)]
    real = tuple(
        Device(
            i, uuids[i], GPU, int(group["gpu_memory_gib"] * GIB), f"00000000:{i + 1:02X}:00.0",
            i * domains // count if domains > 1 else None, group["gpu_model"],
            links=tuple((uuids[j], LINKS) for j in range(count) if j != i and _linked(group["nvlink"], i, j)),
        )
        for i in range(count)
    )  # fmt: skip
    slots = tuple(Device(count + i, f"virtual-{i}", VIRTUAL) for i in range(group["virtual"]))
    return real + slots


def _linked(nvlink: str, i: int, j: int) -> bool:
    return nvlink == "all" or (nvlink == "pairs" and i // 2 == j // 2)
