"""Names of DLRover's unified API that programs use beside the documents' examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlmesh import DLJobBuilder, current_worker, rpc
from rlmesh.errors import CallError, RoleNotFound, UsageError
from rlmesh.job.context import JobInfo, WorkerContext, set_current_worker
from rlmesh.runtime.group import RoleGroup
from rlmesh.runtime.rpc import exported_functions
from tests.runtime.conftest import Mesh
from tests.runtime.conftest import mesh as mesh

PACKAGE = "tests.seeds.openrlhf.ppo"

pytestmark = pytest.mark.case("s09")


class Squares:
    @rpc
    def square(self, items: list[int]) -> list[int]:
        if 13 in items:
            raise ValueError("unlucky")
        return [item**2 for item in items]


def test_a_worker_has_actor_info() -> None:
    link: Any = None
    set_current_worker(WorkerContext(JobInfo("j", "j1"), "ACTOR", 1, 4, link, run_dir=Path("r")))
    try:
        info = current_worker().actor_info
        assert (info.name, info.role, info.rank, info.world_size, info.local_rank) == ("ACTOR:1", "ACTOR", 1, 4, 0)
    finally:
        set_current_worker(None)


def test_a_built_job_has_its_descriptions() -> None:
    builder = DLJobBuilder().node_num(3).config({"lr": 0.1}).global_env({"A": "b"})
    builder.role("TRAINER").run(f"{PACKAGE}.ppo_trainer.PPOTrainerActor")
    job = builder.role("ACTOR").train(f"{PACKAGE}.ppo_actor.PolicyModelActor").nnodes(1).nproc_per_node(1).build()
    assert (job.node_num, job.config, job.env) == (3, {"lr": 0.1}, {"A": "b"})
    assert job.get_workload("ACTOR") is job.workloads["ACTOR"]
    with pytest.raises(UsageError, match=r"no role 'ACTR'\. Did you mean 'ACTOR'"):
        job.get_workload("ACTR")


def test_an_optional_role_may_be_absent(mesh: Mesh) -> None:
    mesh.serve("W", Squares(), Squares())
    runtime = mesh.caller
    found: RoleGroup[Any] = RoleGroup("W", optional=True, runtime=runtime)
    assert len(found) == 2 and found.call("square", [3]).result() == [[9], [9]]
    absent: RoleGroup[Any] = RoleGroup("REFERENCE", optional=True, runtime=runtime)
    assert not absent and len(absent) == 0 and list(absent) == [] and absent.ranks == ()
    assert not absent.options(timeout_s=1.0)
    for call in (
        lambda: absent.call("square", [3]),
        lambda: absent.call_batch("square", 1, [3]),
        lambda: absent.call_any("square", [3]),
        lambda: absent.call_rank0("square", [3]),
        lambda: absent.stream("square", [3]),
        lambda: absent.notify("square", [3]),
        lambda: absent[0],
    ):
        with pytest.raises(RoleNotFound, match="REFERENCE"):
            call()
    with pytest.raises(RoleNotFound):
        len(RoleGroup("REFERENCE", runtime=runtime))


def test_a_sequence_is_waited_for(mesh: Mesh) -> None:
    group = mesh.serve("W", Squares(), Squares())
    futures = group.call_batch("square", 4, [1, 2, 3, 4])
    futures.wait()
    assert futures.done() and list(futures) == [1, 4, 9, 16]
    with pytest.raises((ValueError, CallError), match="unlucky"):
        group.call_batch("square", 2, [1, 13]).wait(30)


def test_a_function_is_exported_under_a_name() -> None:
    def reload_all() -> str:
        return "done"

    rpc("reload_everything", export=True)(reload_all)
    assert exported_functions()["reload_everything"] is reload_all
