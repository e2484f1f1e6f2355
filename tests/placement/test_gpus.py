"""Inherited masks are read as CUDA reads them, and never widened; NVML's answers become an inventory."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh.errors import PlacementError
from rlmesh.placement.demand import JobDemand, RoleDemand
from rlmesh.placement.machine.gpus import usable_devices
from rlmesh.placement.machine.inventory import NodeInfo
from rlmesh.placement.machine.masks import GpuFacts, SliceFacts, cuda_visible
from rlmesh.placement.machine.nvml import Nvml, NvmlFailed, library
from rlmesh.placement.planner import make_plan
from rlmesh.testing import FakeGpu, FakeNvml
from tests.placement import four_gpus
from tests.placement.four_gpus import DIVIDED, FAST, GIB, OTHER, SLICES, SLOW

ALIKE = [GpuFacts(f"GPU-{u}", f"00000000:0{i}:00.0", "H100") for i, u in enumerate(("ab11", "ab22", "cd33"))]


def shown(mask: str | None, gpus: list[GpuFacts] | None = None, **env: str) -> list[str]:
    masks = env if mask is None else {"CUDA_VISIBLE_DEVICES": mask, **env}
    return [device.uuid for device in usable_devices(gpus or ALIKE, masks)[0]]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (None, "ab11 ab22 cd33"), ("", ""), ("-1", ""), ("NoDevFiles", ""), ("none", ""), (",", ""),
        ("0", "ab11"), ("2,0", "cd33 ab11"), (" 1 , 2", "ab22 cd33"), ("0,-1,1", "ab11"), ("0,3,1", "ab11"),
        ("0,x,1", "ab11"), ("1,,2", "ab22"), ("1,1", ""), ("0,1,0", ""), ("+1", "ab22"), ("1x,2", "ab22 cd33"),
        ("GPU-ab11", "ab11"), ("GPU-cd", "cd33"), ("GPU-ab", ""), ("GPU-CD33,GPU-ab11", "cd33 ab11"),
        ("gpu-cd33", ""), (" GPU-cd33", ""), ("GPU-cd33, GPU-ab11", "cd33"), ("0.5", "ab11"), ("0x,1", "ab11 ab22"),
        ("GPU-cd33,1", "cd33"), ("GPU-cd33,GPU-ff,GPU-ab11", "cd33"), ("0,GPU-cd33", "ab11"), ("GPU-cd,GPU-cd33", ""),
        ("MIG-aa", ""), ("all", ""), ("-2", ""), ("-0", "ab11"), ("1 0", "ab22"), ("1;0", "ab22"), ("\t2", "cd33"),
        ("2 ,1", "cd33 ab22"), ("GPU-cd33,-1,GPU-ab11", "cd33"), ("GPU-cd33,", "cd33"), ("GPU-cd33 ,GPU-ab11", ""),
        ("\u0661", ""), ("0,\u0661", "ab11"), ("4294967296", "ab11"), ("4294967298", "cd33"),
        ("4294967295", ""), ("2147483648", ""), ("18446744073709551616", ""), ("9223372036854775809", "ab22"),
        ("-18446744073709551615", "ab22"), ("0,-4294967296", ""), ("1" * 400, ""), ("0" * 400 + "1", "ab22"),
        ("08", ""), ("010", ""), ("02", "cd33"), ("1e0", "ab22"), ("--1", ""), ("- 1", ""), ("\u00a01", ""),
        ("GPU-c-d-3-3", "cd33"), ("GPU--cd33", "cd33"), ("GPU-cd33-", "cd33"), ("GPU-cd3 ", ""), ("GPU-cd3_", ""),
        ("GPU-GPU-cd33", ""), ("GPU--", ""), ("2,1,0", "cd33 ab22 ab11"),
    ],
)  # fmt: skip
def test_cudas_mask_shows_the_devices_that_cuda_would(mask: str | None, expected: str) -> None:
    assert shown(mask) == [f"GPU-{uuid}" for uuid in expected.split()]


LONG = [
    GpuFacts("GPU-17295fbf-2f50-2cb6-ad75-d5debc2ceba4", "00000000:01:00.0", "H200"),
    GpuFacts("GPU-bccc3454-b62e-dc51-16fd-1393e9c99ebf", "00000000:02:00.0", "H200"),
]
A, B = (gpu.uuid for gpu in LONG)


@pytest.mark.case("a20")
@pytest.mark.parametrize(("mask", "expected"), [
    (f"{A} ,{B}", [0, 1]), (f"{A}x", [0]), (f"{A}00", [0]), (f"{A}-", [0]), (f"{A}\n", [0]), (f"{A} {B}", [0]),
    (f"{B},{A}", [1, 0]), (f"{B},{A},{B}", []), (f"{A},{B}", [0, 1]), (f"{A},GPU-bccd", [0]), (f"{A},GPU-", [0]),
    ("GPU-17295fbf2f502cb6ad75d5debc2ceba4", [0]), ("GPU-17295FBF2F502CB6AD75D5DEBC2CEBA4", [0]), (A[4:], []),
    ("GPU-17295fbf2f502cb6ad75d5debc2cebax", []), ("GPU-17295fbf2f502cb6ad75d5debc2ceba ", []), ("GPU-1729 ", []),
    ("GPU-17295fbf_2f50-2cb6-ad75-d5debc2ceba4", []), ("GPU-17295fbf--2f50", [0]), ("GPU-0x1729", []),
    (f"{A},-1,{B}", [0]), (f"{A},1", [0]), (f" {A}", []), (f"{B}, {A}", [1]), ("GPU-" + "-".join(A[4:]), [0]),
])  # fmt: skip
def test_uuids_are_read_as_a_real_driver_reads_them(mask: str, expected: list[int]) -> None:
    """As driver 580.159.04 showed on two H200s."""
    assert shown(mask, LONG) == [LONG[i].uuid for i in expected]


@pytest.mark.case("a20")
@pytest.mark.parametrize(("mask", "told"), [
    ("", r"no GPU is visible since CUDA_VISIBLE_DEVICES is '' \(3 GPUs are there\)"),
    ("-1", "no GPU is visible since CUDA_VISIBLE_DEVICES is '-1'"),
    ("-1,0", "no GPU is visible since CUDA_VISIBLE_DEVICES is '-1,0'"),
    ("GPU-ff", "no GPU is visible since .* is 'GPU-ff': 'GPU-ff' begins no UUID of this machine's devices"),
    ("GPU-ab", r"no GPU is visible .*'GPU-ab' begins the UUIDs of several devices \(GPU-ab11, GPU-ab22\)"),
    ("gpu-cd33", "no GPU is visible .*'gpu-cd33' is not read as a UUID.*in capitals and without a space"),
    (" GPU-cd33", "no GPU is visible .*' GPU-cd33' is not read as a UUID.*without a space"),
    ("7", "no GPU is visible .*'7' names no GPU: they are 0 to 2"),
    ("cuda:0", "no GPU is visible .*'cuda:0' is neither a number nor a UUID"),
    ("1,1", "no GPU is visible .*'1' names a device for the second time, and CUDA then shows none"),
    ("0,x,1", "'0,x,1': 'x' is neither a number nor a UUID, and CUDA reads no further: 1 of the devices count"),
    ("0,GPU-cd33", "'GPU-cd33' is a UUID in a list of numbers: 1 of the devices count"),
    ("GPU-cd33,1,GPU-ab11", "'1' is not a UUID in a list of UUIDs.*reads no further: 1 of the devices count"),
    ("GPU-cd33,MIG-aa", "'MIG-aa' begins no UUID of this machine's devices: 1 of the devices count"),
    ("GPU-", "'GPU-' has no digit of a UUID"),
])  # fmt: skip
def test_a_mask_that_shows_less_than_it_names_is_told(mask: str, told: str) -> None:
    _, (note,) = usable_devices(ALIKE, {"CUDA_VISIBLE_DEVICES": mask})
    assert re.search(told, note), note


@pytest.mark.case("a20")
@pytest.mark.parametrize("mask", ["0", "2,0", "GPU-cd33", "GPU-cd33,GPU-ab11", "0,-1", "0,", " 1 , 2"])
def test_a_mask_that_shows_what_it_names_is_not_talked_about(mask: str) -> None:
    assert usable_devices(ALIKE, {"CUDA_VISIBLE_DEVICES": mask})[1] == ()


@pytest.mark.case("a20")
@pytest.mark.parametrize("mask", ["2,0,1", "GPU-cd33,GPU-ab11,GPU-ab22"])
def test_members_get_devices_in_the_order_of_the_mask(mask: str) -> None:
    devices, _ = usable_devices(ALIKE, {"CUDA_VISIBLE_DEVICES": mask})
    assert [device.index for device in devices] == [0, 1, 2]
    roles = (RoleDemand("A", 2, accelerator_milli=1000), RoleDemand("B", 1, accelerator_milli=1000))
    plan = make_plan(JobDemand(roles), [NodeInfo(0, "n", "h", "", 1, 8, 2**36, devices)])
    given = [placement.devices[0].device.uuid for role in "AB" for placement in plan.of(role)]
    assert given == ["GPU-cd33", "GPU-ab11", "GPU-ab22"]


@pytest.mark.case("a20")
@pytest.mark.parametrize(("env", "told"), [
    ({"CUDA_VISIBLE_DEVICES": "-1"}, "node n: no GPU is visible since CUDA_VISIBLE_DEVICES is '-1' (3 GPUs are there)"),
    ({"CUDA_VISIBLE_DEVICES": "GPU-ff,0"}, "'GPU-ff' begins no UUID of this machine's devices, and CUDA reads no"),
    ({"NVIDIA_VISIBLE_DEVICES": "none"}, "no GPU is visible since NVIDIA_VISIBLE_DEVICES is 'none'"),
    ({"RLMESH_EXCLUDE_DEVICES": "gpu-"}, "RLMESH_EXCLUDE_DEVICES='gpu-': 'gpu-' is not a UUID"),
    ({"RLMESH_EXCLUDE_DEVICES": "0,1,2"}, "node n: GPU-ab22 is not used: RLMESH_EXCLUDE_DEVICES names it"),
])  # fmt: skip
def test_a_job_without_gpus_is_told_who_hides_them(env: dict[str, str], told: str) -> None:
    devices, notes = usable_devices(ALIKE, env)
    node = NodeInfo(0, "n", "h", "", 1, 8, 2**36, devices, notes=notes)
    with pytest.raises(PlacementError) as caught:
        make_plan(JobDemand((RoleDemand("A", accelerator_milli=1000),)), [node])
    assert told in str(caught.value)
    assert "no node has a GPU that it may use" in str(caught.value)


@pytest.mark.case("a20")
@pytest.mark.parametrize(("excluded", "left"), [
    ("", "ab11 ab22 cd33"), (" , ", "ab11 ab22 cd33"), ("GPU-ab11", "ab22 cd33"), ("gpu-AB", "cd33"),
    ("1", "ab11 cd33"), (" 2 , 0 ", "ab22"), ("00000000:02:00.0", "ab11 ab22"), ("0000:02:00.0", "ab11 ab22"),
    ("02:00", "ab11 ab22"), ("02:00.1", "ab11 ab22 cd33"), ("GPU-ff,9,MIG-aa", "ab11 ab22 cd33"),
])  # fmt: skip
def test_excluded_devices_are_known_and_never_used(excluded: str, left: str) -> None:
    devices, notes = usable_devices(ALIKE, {"RLMESH_EXCLUDE_DEVICES": excluded})
    assert (len(devices), notes) == (3, ())
    assert [d.uuid for d in devices if not d.fault] == [f"GPU-{uuid}" for uuid in left.split()]


@pytest.mark.case("a20")
def test_numbers_of_excluded_devices_count_the_machines_whatever_the_mask() -> None:
    devices, _ = usable_devices(ALIKE, {"RLMESH_EXCLUDE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "2,1"})
    assert [(d.uuid, bool(d.fault)) for d in devices] == [("GPU-cd33", True), ("GPU-ab22", False)]
    slices, _ = usable_devices(MIG, {"RLMESH_EXCLUDE_DEVICES": "0"})
    assert [(d.uuid, bool(d.fault)) for d in slices] == [("MIG-x1", True), ("MIG-x2", True), ("GPU-cd33", False)]
    one, _ = usable_devices(MIG, {"RLMESH_EXCLUDE_DEVICES": "MIG-x2"})
    assert [d.uuid for d in one if d.fault] == ["MIG-x2"]


@pytest.mark.case("a20")
@pytest.mark.parametrize("wrong", ["all", "GPU", "0-2", "cuda:0", "-1", "0x1", "GPU-ab11;GPU-cd33", "\u0661"])
def test_a_list_of_excluded_devices_that_is_not_understood_uses_none(wrong: str) -> None:
    devices, (note,) = usable_devices(ALIKE, {"RLMESH_EXCLUDE_DEVICES": f"GPU-ab11,{wrong}"})
    assert devices == () and repr(wrong.lower()) in note and "until that is put right" in note


@pytest.mark.parametrize(("mask", "count"), [("GPU-", 0), ("GPU-a", 1), ("GPU-b", 0)])
def test_a_uuids_beginning_has_a_digit_also_where_there_is_one_gpu(mask: str, count: int) -> None:
    assert len(shown(mask, ALIKE[:1])) == count


@pytest.mark.parametrize(
    ("mask", "expected"),
    [("all", "ab11 ab22 cd33"), ("none", ""), ("void", "ab11 ab22 cd33"), ("", "ab11 ab22 cd33"),
     ("7", "ab11 ab22 cd33"),
     ("GPU-cd33", "cd33"), ("GPU-cd33,GPU-ab11", "ab11 cd33"), ("GPU-ff", ""),
     ("/var/run/nvidia-container-devices", "ab11 ab22 cd33")],
)  # fmt: skip
def test_the_containers_mask_shows_the_devices_that_it_names(mask: str, expected: str) -> None:
    assert shown(None, NVIDIA_VISIBLE_DEVICES=mask) == [f"GPU-{uuid}" for uuid in expected.split()]


def test_both_masks_hold() -> None:
    assert shown("GPU-ab11,GPU-cd33", NVIDIA_VISIBLE_DEVICES="GPU-cd33,GPU-ab22") == ["GPU-cd33"]


MIG = [
    replace(ALIKE[0], mig=True, slices=(SliceFacts("MIG-x1", GIB, 1), SliceFacts("MIG-x2", GIB, 2))),
    replace(ALIKE[1], mig=True),
    ALIKE[2],
]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [(None, "MIG-x1 MIG-x2 GPU-cd33"), ("MIG-x2", "MIG-x2"), ("MIG-x", ""), ("MIG-GPU-ab11/2/0", "MIG-x2"),
     ("MIG-GPU-ab11/7/0", ""), ("0", "MIG-x1"), ("1,2", ""), ("GPU-cd33,MIG-x1", "GPU-cd33 MIG-x1"), ("2", "GPU-cd33")],
)  # fmt: skip
def test_a_mask_shows_the_slices_of_divided_gpus(mask: str | None, expected: str) -> None:
    """Of a divided GPU only slices can be used, and a number means its first one."""
    assert shown(mask, MIG) == expected.split()


def test_numbers_that_count_in_an_unknown_order_show_nothing() -> None:
    gpus = [replace(ALIKE[0], model="A100"), *ALIKE[1:]]
    devices, notes = usable_devices(gpus, {"CUDA_VISIBLE_DEVICES": "1"})
    assert devices == ()
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in notes[0]
    assert shown("1", gpus, CUDA_DEVICE_ORDER="PCI_BUS_ID") == ["GPU-ab22"]
    assert shown("2,1,0", gpus) == ["GPU-ab11", "GPU-ab22", "GPU-cd33"]


ITEMS = st.sampled_from(["0", "1", "2", "3", "-1", "x", "GPU-ab11", "GPU-ab", "GPU-cd", "MIG-x1", ""])


@given(st.lists(ITEMS, max_size=5), st.booleans())
def test_a_mask_never_widens(items: list[str], divided: bool) -> None:
    gpus = MIG if divided else ALIKE
    everything = set(shown(None, gpus))
    found = shown(",".join(items), gpus)
    assert set(found) <= everything
    assert len(found) == len(set(found))
    # A longer mask either shows all that the shorter one shows, or nothing.
    longer, _ = cuda_visible(",".join([*items, "2"]), gpus, by_bus=True)
    shorter, _ = cuda_visible(",".join(items), gpus, by_bus=True)
    if items:
        assert not longer or set(shorter) <= set(longer)


def test_nvml_orders_are_turned_into_that_of_the_bus() -> None:
    facts = Nvml(four_gpus.gpus).read()
    devices, _ = usable_devices(facts, {})
    assert [d.uuid for d in devices] == [SLOW, *SLICES, FAST, OTHER]
    assert [d.index for d in devices] == [0, 1, 2, 3, 4]
    assert [d.memory_bytes // GIB for d in devices] == [40, 20, 40, 192, 80]
    assert [d.kind for d in devices] == ["gpu", "mig", "mig", "gpu", "gpu"]
    assert {d.parent for d in devices} == {"", DIVIDED}
    assert four_gpus.gpus.opened == 0


def test_gpus_that_another_can_read() -> None:
    pair = [FakeGpu("GPU-a", "1", links=(("GPU-b", 2),)), FakeGpu("GPU-b", "2", links=(("GPU-a", 2),))]
    fake = FakeNvml([*pair, FakeGpu("GPU-c", "3")])
    assert [Nvml(fake).reached_by(f"GPU-{c}") for c in "abcx"] == [("GPU-b",), ("GPU-a",), (), ()]
    with pytest.raises(NvmlFailed, match="NVML"):
        Nvml(FakeNvml([], broken=9)).reached_by("GPU-a")


def test_nvlinks_between_gpus_are_read() -> None:
    pair = [
        FakeGpu("GPU-a", "1", links=(("GPU-b", 4),)),
        FakeGpu("GPU-b", "2", links=(("GPU-a", 4),)),
        FakeGpu("GPU-c", "3"),
    ]
    found = {gpu.uuid: gpu.links for gpu in Nvml(FakeNvml(pair)).read()}
    assert found == {"GPU-a": (("GPU-b", 4),), "GPU-b": (("GPU-a", 4),), "GPU-c": ()}
    on_switch = Nvml(FakeNvml([FakeGpu("GPU-a", "1", switch=True), FakeGpu("GPU-b", "2", switch=True)])).read()
    assert on_switch[0].links == (("GPU-b", 18),)


def test_broken_gpus_are_known_and_not_used(tmp_path: Any) -> None:
    events = tmp_path / "events"
    fake = FakeNvml([FakeGpu(f"GPU-{c}", c) for c in "abc"] + [FakeGpu("GPU-d", "d", prohibited=True)], events)
    fake.happen("GPU-a", "lost")
    fake.happen("GPU-b", "remap")
    faults = {gpu.uuid: gpu.fault for gpu in Nvml(fake).read()}
    assert faults["GPU-a"] == "NVML: GPU is lost"
    assert "remapped" in faults["GPU-b"]
    assert faults["GPU-c"] == ""
    assert "PROHIBITED" in faults["GPU-d"]


def test_nvml_that_does_not_work_says_why() -> None:
    with pytest.raises(NvmlFailed, match="Driver Not Loaded"):
        Nvml(FakeNvml([], broken=9)).read()
    with pytest.raises(NvmlFailed, match="no_such_library"):
        library("no_such_library:x")
    assert library("tests.placement.four_gpus:gpus") is four_gpus.gpus


def test_the_real_library_has_every_name_that_is_used() -> None:
    """The fake stands for pynvml: what it has, pynvml must have too."""
    pynvml = pytest.importorskip("pynvml")
    names = [name for name in dir(FakeNvml) if name.startswith(("nvml", "NVML"))]
    assert len(names) > 30
    assert [name for name in names if not hasattr(pynvml, name)] == []
    for name in ("NVML_ERROR_TIMEOUT", "NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_RESET_REQUIRED", "NVML_VOLATILE_ECC",
                 "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", "NVML_P2P_CAPS_INDEX_NVLINK", "NVML_P2P_STATUS_OK",
                 "NVML_COMPUTEMODE_PROHIBITED", "nvmlEventTypeXidCriticalError", "nvmlEventTypeDoubleBitEccError",
                 "NVML_DEVICE_MIG_ENABLE", "NVML_FEATURE_ENABLED"):  # fmt: skip
        assert getattr(pynvml, name) == getattr(FakeNvml, name), name
