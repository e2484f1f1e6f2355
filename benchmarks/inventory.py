"""What rlmesh finds out about a machine with GPUs, and whether that is right: ``python benchmarks/inventory.py``.

Prints the inventory, each form of CUDA_VISIBLE_DEVICES as rlmesh reads it beside what CUDA itself shows, and what
the looks cost. Exit code 1 if rlmesh and CUDA disagree anywhere.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rlmesh.placement.binding import Binding, ranges
from rlmesh.placement.machine.affinity import bind, memory_nodes
from rlmesh.placement.machine.gpus import usable_devices
from rlmesh.placement.machine.nvml import Nvml, library
from rlmesh.placement.machine.system import Machine
from rlmesh.testing.cuda_sees import cuda_sees, masks


def main() -> int:
    machine = Machine()
    gpus, notes = machine.gpus()
    print(f"kernel {platform.release()}, Python {platform.python_version()}")
    print(f"CPUs {ranges(sorted(machine.cpu_ids()))}: {machine.cpus(os.environ)} may be used")
    print(f"memory {machine.memory_bytes(os.environ) / 2**30:.1f} GiB")
    folder = Path("/sys/devices/system/node")
    print(f"NUMA files: {'yes' if folder.exists() else 'none'}; nodes told apart: {len(machine.numa())}")
    for note in notes:
        print(f"note: {note}")
    if not gpus:
        print("no GPU")
        return 1
    lib = library()
    with Nvml(lib).opened():
        print(f"driver {lib.nvmlSystemGetDriverVersion()}, nvidia-ml-py {getattr(lib, '__version__', '?')}")
    devices, _ = usable_devices(gpus, {})
    of = {gpu.uuid: gpu for gpu in gpus}
    for device in devices:
        gpu = of[device.parent or device.uuid]
        links = ", ".join(f"{count} NVLinks to {short(uuid)}" for uuid, count in device.links) or "no NVLink"
        print(
            f"{device.index} {short(device.uuid)} {device.kind} {device.model} {device.memory_bytes / 2**20:.0f} MiB "
            f"at {device.bus_id}, /dev/nvidia{gpu.minor}, NUMA {device.numa}, MIG {'on' if gpu.mig else 'off'}, "
            f"{links}, {gpu.uncorrected} uncorrected errors, fault: {device.fault or 'none'}"
        )
    wrong = compare([device.uuid for device in devices])
    costs(machine, lib, [gpu.uuid for gpu in gpus])
    memory_policy()
    return int(wrong > 0)


def compare(uuids: list[str]) -> int:
    """Each mask beside what CUDA shows; the number of differences."""
    gpus = Machine().gpus()[0]
    print("CUDA_VISIBLE_DEVICES  rlmesh  CUDA")
    wrong = 0
    for mask in masks(uuids):
        env = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **({} if mask is None else {"CUDA_VISIBLE_DEVICES": mask})}
        read = [uuids.index(device.uuid) for device in usable_devices(gpus, env)[0]]
        there = [uuids.index(uuid) for uuid in cuda_sees(mask)]
        wrong += read != there
        text = "(unset)" if mask is None else repr(mask)
        for n, uuid in enumerate(uuids):
            text = text.replace(uuid, f"<UUID {n}>").replace(uuid.upper(), f"<UUID {n} in capitals>")
            text = text.replace(uuid.lower(), f"<UUID {n} in small letters>")
            text = text.replace(uuid[:12], f"<12 letters of UUID {n}>").replace(uuid[:5], f"<5 letters of UUID {n}>")
        print(f"  {text:44} {read!s:10} {there!s:10} {'' if read == there else 'DIFFERENT'}")
    return wrong


def costs(machine: Machine, lib: object, uuids: list[str]) -> None:
    print(f"inventory by NVML: {timed(lambda: Nvml(lib).read()) * 1000:.0f} ms")
    print(f"inventory of the machine: {timed(lambda: machine.devices(os.environ)) * 1000:.0f} ms")
    began = time.perf_counter()
    for news in Nvml(lib).watch(uuids, 0.1, lambda: False):
        print(f"watch for news: first answer after {time.perf_counter() - began:.2f} s: {news}")
        break


def memory_policy() -> None:
    before = os.sched_getaffinity(0)
    failed = bind(Binding(tuple(sorted(before)), (0,)))
    print(f"memory policy of NUMA node 0: {'; '.join(failed) or f'set, read back as {memory_nodes()}'}")


def timed(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best


def short(uuid: str) -> str:
    return f"{uuid[:8]}…"


if __name__ == "__main__":
    sys.exit(main())
