"""Axes of a role: from the builder to the address book that its callers see."""

from __future__ import annotations

from typing import Any

import pytest

from rlmesh import DLJobBuilder, SimpleWorkloadDesc
from rlmesh.errors import JobSpecError
from rlmesh.job.description.descriptors import ElasticWorkloadDesc
from rlmesh.master.context import JobContext
from rlmesh.master.jobspec import JobSpec, RoleSpec
from rlmesh.placement.demand import JobDemand
from tests.job import roles

ENTRY = f"{roles.__name__}.Actor"


def builder() -> DLJobBuilder:
    return DLJobBuilder().config({}).device_type("CPU")


def test_axes_say_how_many_members_there_are() -> None:
    job = builder().role("A").run(roles.Actor).mesh(dp=2, tp=4).role("B").train(roles.Actor).mesh(dp=3).build()
    assert job.workloads["A"].mesh == {"dp": 2, "tp": 4} and job.workloads["A"].total == 8
    assert job.workloads["B"].total == 3
    assert SimpleWorkloadDesc.model_validate_json(job.workloads["A"].model_dump_json()) == job.workloads["A"]
    given = ElasticWorkloadDesc(entry_point=ENTRY, nnodes=2, nproc_per_node=2, mesh={"tp": 4})  # type: ignore[call-arg]
    assert given.total == 4


def test_axes_that_do_not_fit_are_named() -> None:
    with pytest.raises(JobSpecError, match=r"role A: mesh: dp=2 x tp=4 is 8 members, but the role has 4"):
        builder().role("A").run(roles.Actor).total(4).mesh(dp=2, tp=4).build()
    wrong: Any = {"d p": 2}
    with pytest.raises(JobSpecError, match=r"'d p' is not a name of an axis"):
        builder().role("A").run(roles.Actor).mesh(**wrong).build()
    with pytest.raises(JobSpecError, match=r"dp=0: the size of an axis is a whole number above 0"):
        builder().role("A").run(roles.Actor).mesh(dp=0).build()


def test_axes_reach_the_address_book() -> None:
    job = builder().role("A").run(roles.Actor).mesh(dp=2, tp=4).build()
    role = RoleSpec("A", job.workloads["A"].entry, "simple", 8, mesh=dict(job.workloads["A"].mesh))
    demand = JobDemand(roles=(), collocations=(), device_type="CPU", max_nodes=None, max_devices_per_node=None)
    context = JobContext(JobSpec("id", "name", "", (role,), demand), 0.0)
    assert context.new_book().meshes[0][1].along(("dp",), {}) == (0, 4)
