"""On a machine with GPUs: the inventory is what CUDA shows, and members get the GPUs that the plan names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rlmesh import DLJobBuilder, RoleGroup, current_worker, rpc
from rlmesh.placement.machine.gpus import usable_devices
from rlmesh.placement.machine.nvml import Nvml, library
from rlmesh.placement.machine.system import Machine
from rlmesh.testing.cuda_sees import cuda_sees, masks

pytestmark = pytest.mark.skipif(not Path("/proc/driver/nvidia/version").exists(), reason="no NVIDIA driver")

ROOT = str(Path(__file__).parents[2])

if Path("/proc/driver/nvidia/version").exists():
    Machine().gpus()  # NVML keeps descriptors once it was open: they are there before the first test


class Looker:
    """Looks through torch, which the plan's mask must have reached, and uses what it was given."""

    def setup(self) -> None:
        import torch

        self.tensor = torch.ones(1024, device="cuda")

    @rpc
    def look(self) -> dict[str, Any]:
        import torch

        return {
            "uuids": [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(torch.cuda.device_count())],
            "sum": float(self.tensor.sum()),
            "mask": os.environ["CUDA_VISIBLE_DEVICES"],
            "rank": current_worker().rank,
        }


class Reader:
    def run(self) -> None:
        found = RoleGroup[Looker]("GPUS").call(Looker.look).result()
        own = os.environ.get("CUDA_VISIBLE_DEVICES")
        (current_worker().run_dir / "looks.json").write_text(json.dumps([found, own]))


def test_the_inventory_is_what_cuda_shows() -> None:
    devices, notes = Machine().devices({})
    assert notes == ()
    assert [device.uuid for device in devices] == cuda_sees(None)
    assert all(device.memory_bytes > 2**30 and device.model and device.bus_id for device in devices)
    assert all(not device.fault for device in devices)


def test_masks_are_read_as_cuda_reads_them() -> None:
    gpus = Machine().gpus()[0]
    everything = [device.uuid for device in usable_devices(gpus, {})[0]]
    wrong = {}
    for mask in masks(everything):
        env = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **({} if mask is None else {"CUDA_VISIBLE_DEVICES": mask})}
        read, seen = [device.uuid for device in usable_devices(gpus, env)[0]], cuda_sees(mask)
        if read != seen:
            wrong[mask] = {"read": read, "CUDA": seen}
    assert wrong == {}


def test_news_of_gpus_can_be_waited_for() -> None:
    uuids = [gpu.uuid for gpu in Machine().gpus()[0]]
    news: list[object] = []
    news.extend(Nvml(library()).watch(uuids, 0.05, lambda: len(news) >= 2))
    assert news == [None, None]


def test_members_get_the_gpus_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    count = len(Machine().devices(os.environ)[0])
    builder = DLJobBuilder()
    builder.role("TRAINER").run(Reader)
    builder.role("GPUS").run(Looker).total(count).resource(accelerator=1)
    job = builder.build()
    planned = [placement.devices[0].device.uuid for placement in job.plan().of("GPUS")]
    result = job.submit("gpus", view="none", run_dir=tmp_path / "run")
    looks, own = json.loads((Path(result.run_dir) / "looks.json").read_text())
    assert [look["uuids"] for look in looks] == [[uuid] for uuid in planned]
    assert [look["mask"] for look in looks] == planned
    assert [look["sum"] for look in looks] == [1024.0] * count
    assert own == ""
    for rank, uuid in enumerate(planned):
        assert f"GPUS:{rank}: sees {uuid}" in (Path(result.run_dir) / "logs" / f"GPUS-{rank}.log").read_text()
    print(f"{count} members with a CUDA context each: all serving after {result.status.all_serving_s:.2f} s")


def test_collocated_members_share_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    builder = DLJobBuilder()
    builder.role("TRAINER").run(Reader)
    builder.role("GPUS").run(Looker).total(2).resource(accelerator=0.5)
    result = builder.build().submit("shares", view="none", run_dir=tmp_path / "run")
    looks, _ = json.loads((Path(result.run_dir) / "looks.json").read_text())
    assert looks[0]["uuids"] == looks[1]["uuids"]
