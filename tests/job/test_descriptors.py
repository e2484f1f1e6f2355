"""Descriptors: exact shares, the forms that they accept, and what they say about wrong ones."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh import CustomWorkloadDesc, ElasticWorkloadDesc, ResourceDesc, SimpleWorkloadDesc
from rlmesh.errors import JobSpecError
from rlmesh.job.entry_points.entry import EntryPoint
from tests.job import roles

HERE = "tests.job.roles"
Resource: Any = ResourceDesc
Elastic: Any = ElasticWorkloadDesc
Custom: Any = CustomWorkloadDesc
"""The descriptors without their types, for keys that type checkers would reject."""


def fails(make: Any, *expected: str) -> None:
    """``make()`` raises one JobSpecError whose problems match, one for one."""
    with pytest.raises(JobSpecError) as caught:
        make()
    problems = caught.value.problems
    assert len(problems) == len(expected), problems
    for part in expected:
        assert any(part in problem for problem in problems), (part, problems)


@pytest.mark.parametrize(("share", "milli"), [(0, 0), (0.4, 400), (0.1, 100), (1 / 3, 333), (1, 1000), (8, 8000)])
def test_shares_are_whole_thousandths(share: float, milli: int) -> None:
    assert ResourceDesc(accelerator=share).accelerator_milli == milli


@given(st.integers(min_value=1, max_value=1000))
def test_n_shares_of_one_nth_never_exceed_a_device_by_rounding_of_sums(n: int) -> None:
    """Sums of integers are exact: what ten shares of 0.1 give does not depend on the order of adding."""
    milli = ResourceDesc(accelerator=n / 1000).accelerator_milli
    assert milli == n


def test_ten_tenths_are_one_device() -> None:
    assert sum(ResourceDesc(accelerator=0.1).accelerator_milli for _ in range(10)) == 1000


def test_memory_is_given_in_mib() -> None:
    assert ResourceDesc(memory=3).memory_bytes == 3 * 1024**2


def test_short_spellings_of_resources_are_accepted() -> None:
    assert ResourceDesc.model_validate({"mem": 5, "gpu": 0.5, "cpu": 2}) == ResourceDesc(
        cpu=2, memory=5, accelerator=0.5
    )


def test_all_faults_of_a_resource_are_reported_at_once() -> None:
    fails(
        lambda: Resource(cpu=-1, memry=2, accelerator=1.5),
        "cpu: input should be greater than or equal to 0 (got -1)",
        "memry: there is no such key. Did you mean 'memory'?",
        "accelerator: 1.5 is neither a share of one accelerator (at most 1) nor a whole number of them",
    )


def test_a_share_below_a_thousandth_is_an_error() -> None:
    fails(lambda: ResourceDesc(accelerator=0.0001), "0.0001 is less than the smallest share, 0.001")


def test_each_description_names_its_backend() -> None:
    assert SimpleWorkloadDesc(entry_point="a.B").backend == "simple"
    assert ElasticWorkloadDesc(entry_point="a.B").backend == "elastic"
    assert CustomWorkloadDesc(entry_point="a.B").backend == "custom"


@pytest.mark.parametrize(
    ("given", "total", "per_node"),
    [
        ({"nnodes": 2, "nproc_per_node": 4}, 8, 4),
        ({"nnodes": 2}, 2, 1),
        ({"nproc_per_node": 4}, 4, 4),
        ({"nnodes": 2, "per_node": 3}, 6, 3),
        ({"nnodes": 2, "total": 8}, 8, 4),
        ({"nproc_per_node": 4, "total": 8}, 8, 4),
        ({"total": 8, "per_node": 2}, 8, 2),
        ({"total": 8}, 8, None),
    ],
)
def test_nodes_and_processes_follow_from_each_other(given: dict[str, int], total: int, per_node: int | None) -> None:
    described = ElasticWorkloadDesc.model_validate({"entry_point": "a.B", **given})
    assert (described.total, described.per_node) == (total, per_node)
    assert described.nproc_per_node == per_node
    assert described.nnodes == (None if per_node is None else total // per_node)


def test_contradictions_between_nodes_and_total_are_refused() -> None:
    fails(
        lambda: Elastic(entry_point="a.B", nnodes=2, nproc_per_node=2, total=5),
        "total=5 contradicts nnodes=2 and nproc_per_node=2",
    )
    fails(lambda: Elastic(entry_point="a.B", nnodes=0), "nnodes must be a whole number")


def test_assignments_are_checked() -> None:
    described = ElasticWorkloadDesc(entry_point=f"{HERE}.Plain")
    described.comm_pre_check = False
    described.total = 4
    fails(lambda: setattr(described, "comm_pre_chek", True), "Did you mean 'comm_pre_check'?")
    fails(lambda: setattr(described, "total", 0), "total: input should be greater than or equal to 1 (got 0)")
    assert described.total == 4


def test_environment_values_must_be_text_and_numbers_become_text() -> None:
    assert SimpleWorkloadDesc(entry_point="a.B", envs={"N": 1, "X": 0.5, "S": "s"}).envs == {  # type: ignore[dict-item]
        "N": "1",
        "X": "0.5",
        "S": "s",
    }
    fails(
        lambda: SimpleWorkloadDesc(entry_point="a.B", envs={"FLAG": True}),  # type: ignore[dict-item]
        "envs: FLAG=True (bool) must be text, such as 'True'",
    )
    fails(lambda: SimpleWorkloadDesc(entry_point="a.B", envs={"A=B": "x"}), "'A=B' is not a name")


def test_variables_of_torch_distributed_are_rlmesh_s_own() -> None:
    described = ElasticWorkloadDesc(entry_point=f"{HERE}.Plain", envs={"MASTER_PORT": "1", "A": "1"})
    assert described.problems() == [
        "envs: MASTER_PORT is set by rlmesh for each member of an elastic role: leave it out"
    ]
    assert SimpleWorkloadDesc(entry_point=f"{HERE}.Plain", envs={"MASTER_PORT": "1"}).problems() == []


def test_an_elastic_group_fills_its_nodes() -> None:
    described = ElasticWorkloadDesc(entry_point=f"{HERE}.Plain", total=3, per_node=2)
    assert described.problems() == [
        "per_node: 3 members cannot be split into nodes of 2: total must be a multiple of per_node"
    ]


def test_entry_points_in_other_forms_become_text() -> None:
    for form in (roles.Plain, (HERE, "Plain"), f"{HERE}:Plain", f"{HERE}::Plain"):
        described = SimpleWorkloadDesc.model_validate({"entry_point": form})
        assert described.entry_point == f"{HERE}.Plain"
        assert described.entry == EntryPoint("class", HERE, "Plain")


def test_a_custom_role_is_named_by_module_and_class() -> None:
    described = Custom(module_name=HERE, class_name="Runner")
    assert described.entry == EntryPoint("class", HERE, "Runner")
    assert (described.module_name, described.class_name) == (HERE, "Runner")


def test_json_and_pickle_round_trips() -> None:
    described = ElasticWorkloadDesc(entry_point=f"{HERE}.Plain", total=2, envs={"A": "1"})
    assert described.entry.name == "Plain"
    assert ElasticWorkloadDesc.model_validate_json(described.model_dump_json()) == described
    again = pickle.loads(pickle.dumps(described))
    assert again == described
    assert again.entry == described.entry


def test_an_entry_point_is_looked_up_again_after_a_change() -> None:
    described = SimpleWorkloadDesc(entry_point=f"{HERE}.Plain")
    assert described.entry.name == "Plain"
    described.entry_point = f"{HERE}.main"
    assert described.entry == EntryPoint("function", HERE, "main")
