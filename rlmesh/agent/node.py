"""What this machine offers to a job: CPUs, memory, devices. As much as this process may use, not what is there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlmesh.agent.protocol import AgentConfig
from rlmesh.placement.inventory import Device, NodeInfo

__all__ = ["Machine", "machine_id", "node_info"]


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the kernel's files are; tests give others."""

    proc: Path = Path("/proc")
    cgroups: Path = Path("/sys/fs/cgroup")
    dev: Path = Path("/dev")

    def cpus(self) -> int:
        """CPUs of the affinity mask, at most what the control groups' quota allows, at least 1."""
        count = len(os.sched_getaffinity(0))
        quotas = [quota for folder in self._folders("cpu") if (quota := _cpu_quota(folder)) is not None]
        return max(1, int(min([count, *quotas])))

    def memory_bytes(self) -> int:
        """Memory of the machine, at most the control groups' limit."""
        total = re.search(r"MemTotal:\s+(\d+) kB", (self.proc / "meminfo").read_text())
        limits = [int(total[1]) * 1024] if total else []
        for folder in self._folders("memory"):
            for name in ("memory.max", "memory.limit_in_bytes"):
                text = _read(folder / name)
                if text.isdigit():
                    limits.append(int(text))
        return min(limits, default=0)

    def gpus(self, mask: str | None) -> tuple[Device, ...]:
        """The NVIDIA GPUs that this process can open and that ``CUDA_VISIBLE_DEVICES`` does not hide."""
        found = []
        for folder in sorted((self.proc / "driver/nvidia/gpus").glob("*")):
            text = _read(folder / "information")
            uuid, minor = re.search(r"GPU UUID:\s*(\S+)", text), re.search(r"Device Minor:\s*(\d+)", text)
            if uuid and minor and (self.dev / f"nvidia{minor[1]}").exists():
                found.append(uuid[1])
        shown = range(len(found)) if mask is None else _visible(mask, found)
        return tuple(Device(index, found[place], "gpu") for index, place in enumerate(shown))

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


def _cpu_quota(folder: Path) -> float | None:
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    if not quota:
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return None  # no limit: "max" in v2, -1 in v1
    return int(quota) / int(period)


def _visible(mask: str, uuids: list[str]) -> list[int]:
    """Places of the devices that a mask names; as CUDA does, the first unknown one ends the list."""
    shown: list[int] = []
    for item in filter(None, (part.strip() for part in mask.split(","))):
        place = int(item) if item.isdigit() else next((n for n, u in enumerate(uuids) if u.startswith(item)), -1)
        if not 0 <= place < len(uuids):
            break
        shown.append(place)
    return shown


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def machine_id() -> str:
    """Equal in two processes if the process numbers of one mean the same to the other: same kernel, same namespace.
    Two machines may have the same host name, and containers usually do."""
    boot = _read(Path("/proc/sys/kernel/random/boot_id"))
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"


def node_info(config: AgentConfig, endpoint: str, machine: Machine | None = None) -> NodeInfo:
    """What the agent registers with. ``config.virtual_devices`` replaces the machine's own devices."""
    machine = machine or Machine()
    if config.virtual_devices is None:
        devices = machine.gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    else:
        devices = tuple(Device(index, f"virtual-{index}") for index in range(config.virtual_devices))
    return NodeInfo(
        node_rank=config.node_rank,
        name=config.node_name,
        hostname=os.uname().nodename,
        agent_endpoint=endpoint,
        agent_pid=os.getpid(),
        cpus=machine.cpus(),
        memory_bytes=machine.memory_bytes(),
        devices=devices,
        host=config.host,
        machine=machine_id(),
    )
