"""Members get exactly the devices that the plan names, and find out if they don't."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlmesh import DLJobBuilder
from rlmesh.errors import JobFailed, JobSpecError, PlacementError
from rlmesh.placement.binding import Binding
from rlmesh.placement.machine.device_check import check_devices, check_torch_devices
from rlmesh.placement.machine.environment import device_environment, mask_disagrees
from rlmesh.placement.machine.gpus import usable_devices
from rlmesh.placement.machine.inventory import Device, NodeInfo
from rlmesh.placement.machine.nvml import Nvml
from rlmesh.placement.machine.system import Machine
from rlmesh.testing import LocalCluster
from tests.placement import four_gpus
from tests.placement.device_roles import Collector, Meddler, Seer
from tests.placement.four_gpus import GIB, SLICES, SLOW

ROOT = str(Path(__file__).parents[2])


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents find the fake library wherever the tests are started."""
    monkeypatch.setenv("PYTHONPATH", ROOT)


def look_at(job: DLJobBuilder, tmp_path: Path, nvml: str) -> dict[str, Any]:
    with LocalCluster(nvml=f"tests.placement.four_gpus:{nvml}", run_root=tmp_path):
        result = job.build().submit("identity")
    found: dict[str, Any] = json.loads((Path(result.run_dir) / "seen.json").read_text())
    return found


def two_on_the_first_and_one_on_a_slice() -> DLJobBuilder:
    builder = DLJobBuilder().config({"roles": ["A", "B"]})
    builder.role("TRAINER").run(Collector)
    builder.role("A").run(Seer).total(2).resource(accelerator=0.5)
    builder.role("B").run(Seer).resource(accelerator=1).on_devices(SLICES[1])
    return builder


def node_of(library: Any) -> NodeInfo:
    devices, _ = usable_devices(Nvml(library).read(), {})
    return NodeInfo(0, "gpu", "gpu", "", 1, 64, 512 * GIB, devices)


@pytest.mark.case("O14")
def test_a_plan_names_uuids_in_the_order_of_the_bus() -> None:
    plan = two_on_the_first_and_one_on_a_slice().build().plan([node_of(four_gpus.gpus)])
    assert [plan.of("A")[i].devices[0].device.uuid for i in (0, 1)] == [SLOW, SLOW]
    (share,) = plan.of("B")[0].devices
    assert (share.device.uuid, share.device.kind, share.device.memory_bytes) == (SLICES[1], "mig", 40 * GIB)


@pytest.mark.case("O14")
@pytest.mark.usefixtures("importable")
def test_members_see_what_the_plan_gave_them(tmp_path: Path) -> None:
    found = look_at(two_on_the_first_and_one_on_a_slice(), tmp_path, "gpus")
    masks = {name: seen["mask"] for name, seen in found.items()}
    assert masks == {"TRAINER:0": "", "A:0": SLOW, "A:1": SLOW, "B:0": SLICES[1]}
    assert {found[name]["order"] for name in ("A:0", "A:1", "B:0")} == {"PCI_BUS_ID"}
    (run,) = tmp_path.iterdir()
    assert f"B:0: sees {SLICES[1]} (00000000:86:00.0, 40 GiB)" in (run / "logs" / "B-0.log").read_text()


@pytest.mark.case("O14")
@pytest.mark.usefixtures("importable")
def test_a_member_that_sees_another_gpu_ends_the_job(tmp_path: Path) -> None:
    builder = DLJobBuilder().config({"roles": ["A"]})
    builder.role("TRAINER").run(Collector)
    builder.role("A").run(Seer).resource(accelerator=1)
    with pytest.raises(JobFailed) as caught:
        look_at(builder, tmp_path, "swapped")
    text = str(caught.value.exceptions[0])
    assert "the plan gave it GPU-0 at 00000000:00:00.0" in text, text
    assert "it sees GPU-0 at 00000000:01:00.0" in text, text


@pytest.mark.usefixtures("importable")
def test_code_that_sets_the_mask_is_told_and_overruled(tmp_path: Path) -> None:
    builder = DLJobBuilder().config({"roles": ["M"]})
    builder.role("TRAINER").run(Collector)
    builder.role("M").run(Meddler).total(2).resource(accelerator=1)
    found = look_at(builder, tmp_path, "healthy")
    assert {found["M:0"]["mask"], found["M:1"]["mask"]} == {"GPU-0", "GPU-1"}
    (run,) = tmp_path.iterdir()
    log = (run / "logs" / "M-1.log").read_text()
    assert "the plan set CUDA_VISIBLE_DEVICES=GPU-1, and it is '0'; it is set back" in log


@pytest.mark.usefixtures("importable")
def test_an_inherited_mask_is_not_widened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-2,GPU-3")
    builder = DLJobBuilder().config({"roles": ["A"]})
    builder.role("TRAINER").run(Collector)
    builder.role("A").run(Seer).total(2).resource(accelerator=1)
    found = look_at(builder, tmp_path, "healthy")
    assert {found["A:0"]["mask"], found["A:1"]["mask"]} == {"GPU-2", "GPU-3"}
    assert found["TRAINER:0"]["mask"] == ""
    builder = DLJobBuilder()
    builder.role("A").run(Collector).total(3).resource(accelerator=1)
    with (
        LocalCluster(nvml="tests.placement.four_gpus:healthy", run_root=tmp_path / "more"),
        pytest.raises(PlacementError, match="GPU 3 wanted, 2 there"),
    ):
        builder.build().submit("more")
    assert not (tmp_path / "more").exists()


def test_the_mask_has_one_owner() -> None:
    builder = DLJobBuilder().global_env({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})
    builder.role("A").run(Collector).resource(accelerator=1).env({"CUDA_VISIBLE_DEVICES": "3"})
    with pytest.raises(JobSpecError) as caught:
        builder.build()
    assert "role A: envs: CUDA_VISIBLE_DEVICES=3: rlmesh sets it" in str(caught.value)
    assert "global_env: CUDA_DEVICE_ORDER=FASTEST_FIRST: rlmesh sets it" in str(caught.value)


GPUS = (Device(0, "GPU-0", "gpu"), Device(1, "GPU-1", "gpu"))
SLOTS = (Device(0, "virtual-0"),)


@pytest.mark.parametrize(
    ("devices", "of_node", "kind", "own", "mask"),
    [
        (GPUS, GPUS, "GPU", {}, "GPU-0,GPU-1"), ((), GPUS, "GPU", {}, ""), ((), (), "GPU", {}, None),
        (SLOTS, SLOTS, "CPU", {}, ""), (SLOTS, SLOTS, "GPU", {}, None),
        ((), GPUS, "GPU", {"CUDA_VISIBLE_DEVICES": "0"}, None),
    ],
)  # fmt: skip
def test_each_member_sees_the_devices_that_it_got(
    devices: Any, of_node: Any, kind: Any, own: dict[str, str], mask: str | None
) -> None:
    assert device_environment(devices, of_node, kind, own).get("CUDA_VISIBLE_DEVICES") == mask


def test_disagreement_shows_both() -> None:
    assert mask_disagrees(GPUS, {"CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1"}) == ""
    assert "GPU-0,GPU-1, and it is None" in mask_disagrees(GPUS, {})
    assert mask_disagrees(SLOTS, {}) == ""


def test_a_binding_is_proven_by_the_kernels_own_files(tmp_path: Path) -> None:
    folder = tmp_path / "sys/devices/system/node"
    for number, cpus in ((0, "0"), (1, "1-64")):
        (folder / f"node{number}").mkdir(parents=True)
        (folder / f"node{number}" / "cpulist").write_text(cpus)
    machine = Machine(sys=tmp_path / "sys")
    seen = {node.number for node in machine.numa() if node.cpus}
    visible = check_devices("A:0", (), Binding((0, 1), tuple(sorted(seen))), machine, {})
    assert visible is not None
    assert set(visible.numa) == seen
    with pytest.raises(PlacementError, match=r"A:0: the plan gave it NUMA 7 .* are of NUMA"):
        check_devices("A:0", (), Binding((0,), (7,)), machine, {})
    assert check_devices("A:0", SLOTS, None, machine, {}) is None


def test_torch_is_asked_only_if_it_has_initialised_cuda() -> None:
    assert check_torch_devices("A:0", GPUS) == ()
