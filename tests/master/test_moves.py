"""A bad device: its members are restarted elsewhere, the others stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlmesh import DLJobBuilder, RoleGroup, current_worker, rpc
from rlmesh.master import events as ev
from rlmesh.master.jobspec import JobSpec, RestartRule
from rlmesh.placement.demand import JobDemand, RoleDemand
from rlmesh.placement.machine.inventory import Device
from rlmesh.testing import LocalCluster
from tests.master.bench import Bench, job, node, role
from tests.own_time import HANG_S
from tests.placement import four_gpus

ROOT = str(Path(__file__).parents[2])


def with_gpus(spec: JobSpec, members: int, *, elastic: bool) -> JobSpec:
    demands = (RoleDemand("TRAINER"), RoleDemand("A", members, members if elastic else None, elastic, 1000))
    return replace(spec, demand=JobDemand(demands, device_type="CPU"))


class Nodes(Bench):
    """Nodes whose devices have names of their own, as real ones do."""

    def register(self) -> None:
        for rank in range(self.manager.context.spec.nnodes):
            devices = tuple(Device(i, f"GPU-{rank}-{i}", "gpu") for i in range(2))
            self.send(ev.AgentRegistered(replace(node(rank), devices=devices)))
        self.reserve()

    def places(self) -> dict[str, list[str]]:
        members = self.manager.context.members.values()
        return {m.name: [s.device.uuid for s in m.placement.devices] for m in members if m.placement.devices}


def test_a_member_is_moved_off_a_bad_device() -> None:
    spec = job(role("TRAINER"), role("A", 2, restart=RestartRule("member")), nnodes=2)
    bench = Nodes(with_gpus(spec, 2, elastic=False))
    bench.running()
    assert bench.places() == {"A:0": ["GPU-0-0"], "A:1": ["GPU-0-1"]}
    bench.send(ev.DeviceFailed(0, "GPU-0-1", "Xid 79"))
    assert bench.took(ev.EndProcesses)[-1].node_rank == 0
    assert bench.places() == {"A:0": ["GPU-0-0"], "A:1": ["GPU-1-0"]}
    bench.exit("A:1", signal=9, incarnation=0)
    bench.tick(10.0)
    assert bench.took(ev.Spawn)[-1] == ev.Spawn(1, (("A", 1),))
    assert bench.manager.context.plan is not None
    assert [p.node_rank for p in bench.manager.context.plan.of("A")] == [0, 1]


def test_a_group_moves_as_one() -> None:
    spec = job(role("TRAINER"), role("A", 2, "elastic", restart=RestartRule("role")), nnodes=2)
    bench = Nodes(with_gpus(spec, 2, elastic=True))
    bench.running()
    bench.send(ev.DeviceFailed(0, "GPU-0-1", "Xid 48"))
    assert bench.places() == {"A:0": ["GPU-1-0"], "A:1": ["GPU-1-1"]}
    assert bench.took(ev.ReservePort)[-1].node_rank == 1


def test_without_room_the_job_ends_and_says_what_is_short() -> None:
    bench = Nodes(with_gpus(job(role("TRAINER"), role("A", 2, restart=RestartRule("member"))), 2, elastic=False))
    bench.running()
    bench.send(ev.DeviceFailed(0, "GPU-0-1", "Xid 79"))
    bench.tick(1.0)
    (cause, *_) = bench.manager.context.failures
    assert "A:1 cannot be moved to other devices" in cause.message
    assert "slot 1 wanted, 0 there" in cause.message


class Worker:
    @rpc
    def where(self) -> tuple[str, int]:
        return current_worker().devices[0], current_worker().incarnation


class Watcher:
    """Lets a GPU fall off the bus, and waits until its member is back elsewhere."""

    def run(self) -> None:
        group = RoleGroup[Worker]("WORKER")
        before = group.call(Worker.where).result(HANG_S)
        four_gpus.healthy.happen(before[1][0], "xid", 79)
        device, incarnation = before[1]
        while incarnation == 0:
            device, incarnation = group[1].options(idempotent=True).call(Worker.where).result(HANG_S)
        assert (device != before[1][0], incarnation) == (True, 1), device
        assert group[0].call(Worker.where).result(HANG_S) == before[0]


@pytest.mark.slow
def test_a_gpu_that_falls_off_the_bus_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ROOT)
    monkeypatch.setenv("FAKE_GPU_EVENTS", str(tmp_path / "events"))
    builder = DLJobBuilder()
    builder.role("WATCHER").run(Watcher)
    builder.role("WORKER").run(Worker).total(2).resource(accelerator=1)
    with LocalCluster(nvml="tests.placement.four_gpus:healthy", run_root=tmp_path / "runs"):
        result = builder.build().submit("bad-device")
    assert result.status.stage == "succeeded"
