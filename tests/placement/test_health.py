"""A GPU that goes bad is noticed at once and told once; a program's own faults are no reason to leave a GPU."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rlmesh.agent.monitoring.device_watch import DeviceWatch, gpus_of
from rlmesh.placement.machine.gpu_health import BAD_XIDS, DeviceBad, DeviceNews, Health
from rlmesh.placement.machine.gpus import usable_devices
from rlmesh.placement.machine.masks import GpuFacts
from rlmesh.placement.machine.nvml import Nvml
from rlmesh.testing import FakeGpu, FakeNvml
from tests.placement import four_gpus
from tests.placement.four_gpus import DIVIDED, SLICES

library = four_gpus.healthy
"""Set by tests; the watch finds it by its name."""


def health() -> Health:
    return Health(2, {"GPU-a": ("GPU-a",), "GPU-b": ("MIG-1", "MIG-2")})


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 63, 94])
def test_faults_of_programs_are_not_the_devices(xid: int) -> None:
    assert health().hear(DeviceNews("GPU-a", "xid", xid), 1.0) is None


@pytest.mark.parametrize("xid", sorted(BAD_XIDS))
def test_a_bad_device_is_told_once(xid: int) -> None:
    own = health()
    bad = own.hear(DeviceNews("GPU-b", "xid", xid), 5.0)
    assert bad == DeviceBad(2, ("GPU-b", "MIG-1", "MIG-2"), f"Xid {xid}, {BAD_XIDS[xid]}", 5.0)
    assert own.hear(DeviceNews("GPU-b", "xid", 79), 6.0) is None
    assert own.look([], 7.0) == [DeviceBad(2, ("GPU-a",), "NVML does not show it any more", 7.0)]


def test_other_jobs_devices_are_not_ours() -> None:
    assert health().hear(DeviceNews("GPU-z", "xid", 79), 1.0) is None


def test_looking_finds_faults_and_new_errors() -> None:
    own = health()
    assert own.look([GpuFacts("GPU-a", uncorrected=3), GpuFacts("GPU-b")], 1.0) == []
    assert own.look([GpuFacts("GPU-a", uncorrected=3), GpuFacts("GPU-b")], 2.0) == []
    found = own.look([GpuFacts("GPU-a", uncorrected=5), GpuFacts("GPU-b", fault="broken row")], 3.0)
    assert [bad.why for bad in found] == ["2 memory errors that ECC could not correct", "broken row"]
    assert found[1].describe() == "device GPU-b on node 2 is bad: broken row"


def test_slices_are_watched_by_their_gpu() -> None:
    devices, _ = usable_devices(Nvml(four_gpus.gpus).read(), {})
    assert gpus_of(devices)[DIVIDED] == SLICES
    assert len(gpus_of(devices)) == 4


@asynccontextmanager
async def watching(events: Path, look_s: float) -> AsyncIterator[tuple[FakeNvml, asyncio.Queue[DeviceBad]]]:
    global library
    library = FakeNvml([FakeGpu("GPU-a", "1"), FakeGpu("GPU-b", "2")], events)
    devices, _ = usable_devices(Nvml(library).read(), {})
    told: asyncio.Queue[DeviceBad] = asyncio.Queue()
    watch = DeviceWatch(0, devices, f"{__name__}:library", told.put, look_s=look_s)
    task = asyncio.create_task(watch.run())
    try:
        yield library, told
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert library.opened == 0


async def test_an_xid_is_told_within_a_moment(tmp_path: Path) -> None:
    async with watching(tmp_path / "events", look_s=600.0) as (fake, told):
        fake.happen("GPU-a", "xid", 31)
        fake.happen("GPU-b", "xid", 79)
        bad = await asyncio.wait_for(told.get(), 5.0)
        assert (bad.uuids, bad.why) == (("GPU-b",), "Xid 79, it has fallen off the bus")


@pytest.mark.parametrize(
    ("what", "said"), [("lost", "GPU is lost"), ("remap", "remapped"), ("ecc", "could not correct")]
)
async def test_what_has_no_news_is_seen_by_looking(tmp_path: Path, what: str, said: str) -> None:
    async with watching(tmp_path / "events", look_s=0.05) as (fake, told):
        if what == "ecc":  # errors count from the first look on, which has been when the other GPU's fault is told
            fake.happen("GPU-b", "remap")
            assert (await asyncio.wait_for(told.get(), 5.0)).uuids == ("GPU-b",)
        fake.happen("GPU-a", what, 2)
        bad = await asyncio.wait_for(told.get(), 5.0)
        assert bad.uuids == ("GPU-a",)
        assert said in bad.why


async def test_without_gpus_there_is_nothing_to_watch() -> None:
    await DeviceWatch(0, (), "", lambda bad: asyncio.sleep(0)).run()


async def test_a_library_that_does_not_start_ends_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    global library
    devices, _ = usable_devices(Nvml(FakeNvml([FakeGpu("GPU-a", "1")])).read(), {})
    library = FakeNvml([], broken=9)
    await DeviceWatch(0, devices, f"{__name__}:library", lambda bad: asyncio.sleep(0)).run()
    assert "not watched any more: NVML: Driver Not Loaded" in caplog.text
