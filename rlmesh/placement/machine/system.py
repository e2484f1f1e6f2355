"""What this machine offers to a job: CPUs, memory, NUMA nodes, GPUs. As much as this process may use, not what is
there: affinity, cpusets and quotas of control groups, Slurm's allocation and inherited masks are kept to."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlmesh.placement.machine.gpus import usable_devices
from rlmesh.placement.machine.inventory import Device, NumaNode

if TYPE_CHECKING:
    from rlmesh.placement.machine.masks import GpuFacts

__all__ = ["Machine", "numbers"]


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the kernel's files are; tests give others. ``nvml`` names another library in place of pynvml."""

    proc: Path = Path("/proc")
    cgroups: Path = Path("/sys/fs/cgroup")
    dev: Path = Path("/dev")
    sys: Path = Path("/sys")
    nvml: str = ""

    def cpu_ids(self) -> frozenset[int]:
        """The CPUs that this process may run on."""
        allowed = set(os.sched_getaffinity(0))
        for folder in self._folders("cpuset"):
            for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
                if inside := numbers(_read(folder / name)):
                    allowed = allowed & set(inside) or allowed
                    break
        return frozenset(allowed)

    def cpus(self, env: Mapping[str, str] | None = None) -> int:
        """How many of them, at most what quotas and Slurm's allocation (in ``env``) allow; at least 1."""
        limits = [quota for folder in self._folders("cpu") if (quota := _cpu_quota(folder)) is not None]
        return max(1, int(min([len(self.cpu_ids()), *limits, *_slurm_cpus(env or {})])))

    def memory_bytes(self, env: Mapping[str, str] | None = None) -> int:
        """Memory of the machine, at most the control groups' limit and Slurm's allocation (in ``env``)."""
        total = re.search(r"MemTotal:\s+(\d+) kB", (self.proc / "meminfo").read_text())
        limits = [int(total[1]) * 1024] if total else []
        for folder in self._folders("memory"):
            for name in ("memory.max", "memory.limit_in_bytes"):
                text = _read(folder / name)
                if text.isdigit():
                    limits.append(int(text))
        return min([*limits, *_slurm_memory(env or {})], default=0)

    def numa(self) -> tuple[NumaNode, ...]:
        """The NUMA nodes with the CPUs of each that this process may use; empty if there is only one."""
        allowed = self.cpu_ids()
        found = []
        for folder in (self.sys / "devices/system/node").glob("node[0-9]*"):
            cpus = tuple(cpu for cpu in numbers(_read(folder / "cpulist")) if cpu in allowed)
            memory = re.search(r"MemTotal:\s+(\d+) kB", _read(folder / "meminfo"))
            found.append(NumaNode(int(folder.name[4:]), cpus, int(memory[1]) * 1024 if memory else 0))
        found.sort(key=lambda node: node.number)
        return tuple(found) if len(found) > 1 else ()

    def devices(self, env: Mapping[str, str]) -> tuple[tuple[Device, ...], tuple[str, ...]]:
        """The GPUs and slices that a job may use under the masks in ``env``, and notes for people."""
        gpus, notes = self.gpus()
        if not gpus:
            return (), notes
        devices, said = usable_devices(gpus, env)
        return devices, (*notes, *said)

    def gpus(self) -> tuple[tuple[GpuFacts, ...], tuple[str, ...]]:
        """All GPUs that this process can open, and notes on what is not known of them."""
        if not self.nvml and not (self.proc / "driver/nvidia").exists() and not (self.dev / "dxg").exists():
            return (), ()  # no driver: pynvml need not even be imported
        from rlmesh.placement.machine.nvml import Nvml, NvmlFailed, library

        try:
            lib = library(self.nvml)
        except NvmlFailed as error:
            found = tuple(self._gpus_of_the_driver())
            return found, (f"memory, slices, NVLink and health of the GPUs are not known: {error}",) if found else ()
        try:
            read = Nvml(lib).read()
        except NvmlFailed as error:
            return (), (f"GPUs cannot be used: {error}",)
        return tuple(replace(gpu, numa=self._numa_of(gpu.bus_id)) for gpu in read), ()

    def _gpus_of_the_driver(self) -> Iterator[GpuFacts]:
        """What the driver's files tell, for machines without nvidia-ml-py."""
        from rlmesh.placement.machine.masks import GpuFacts

        for folder in sorted((self.proc / "driver/nvidia/gpus").glob("*")):
            text = _read(folder / "information")
            uuid, minor = re.search(r"GPU UUID:\s*(\S+)", text), re.search(r"Device Minor:\s*(\d+)", text)
            model = re.search(r"Model:\s*(\S.*)", text)
            if uuid and minor and (self.dev / f"nvidia{minor[1]}").exists():
                bus_id = f"0000{folder.name.upper()}"
                yield GpuFacts(
                    uuid[1], bus_id, model[1] if model else "", numa=self._numa_of(bus_id), minor=int(minor[1])
                )

    def _numa_of(self, bus_id: str) -> int | None:
        """The NUMA node that a PCI device is attached to. NVML writes domains with 8 digits, the kernel with 4."""
        domain, _, rest = bus_id.lower().partition(":")
        text = _read(self.sys / "bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node")
        return int(text) if text.isdigit() else None  # -1: the firmware does not say

    def _folders(self, controller: str) -> Iterator[Path]:
        """The control groups of this process for a controller, v1 and v2, up to their roots."""
        for line in _read(self.proc / "self/cgroup").splitlines():
            number, names, path = line.split(":", 2)
            if number == "0" and not names:
                roots = [self.cgroups, self.cgroups / "unified"]
            elif controller in names.split(","):
                roots = [self.cgroups / names, self.cgroups / controller]
            else:
                continue
            for root in dict.fromkeys(roots):
                folder = root / path.lstrip("/")
                yield folder
                yield from (parent for parent in folder.parents if parent.is_relative_to(root))


def numbers(text: str) -> tuple[int, ...]:
    """The numbers of a kernel list such as ``0-3,8``."""
    found: list[int] = []
    for item in filter(None, text.strip().split(",")):
        first, _, last = item.partition("-")
        if first.isdigit() and (last or first).isdigit():
            found += range(int(first), int(last or first) + 1)
    return tuple(found)


def _cpu_quota(folder: Path) -> float | None:
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    if not quota:
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return None  # no limit: "max" in v2, -1 in v1
    return int(quota) / int(period)


def _slurm_cpus(env: Mapping[str, str]) -> list[int]:
    """What Slurm gave this node, or this task where it started several on the node."""
    if "SLURM_JOB_ID" not in env:
        return []
    found = [env.get("SLURM_CPUS_ON_NODE", "")]
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", ""))
    if "SLURM_PROCID" in env and not re.fullmatch(r"(1(\(x\d+\))?)?", tasks):
        found.append(env.get("SLURM_CPUS_PER_TASK", ""))
    return [int(text) for text in found if text.isdigit() and int(text)]


def _slurm_memory(env: Mapping[str, str]) -> list[int]:
    """Slurm's MiB per node, or per CPU of the node; 0 is all."""
    if "SLURM_JOB_ID" not in env:
        return []
    node, cpu, cpus = (env.get(f"SLURM_{name}", "") for name in ("MEM_PER_NODE", "MEM_PER_CPU", "CPUS_ON_NODE"))
    if node.isdigit():
        return [int(node) * 2**20] if int(node) else []
    if cpu.isdigit() and cpus.isdigit() and int(cpu):
        return [int(cpu) * int(cpus) * 2**20]
    return []


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
