"""The public names of ``rlmesh``, and what it costs to import them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import rlmesh

ROOT = Path(__file__).resolve().parent.parent

PUBLIC = [
    "ArraySink",
    "ArraySource",
    "BaseRLTrainer",
    "BaseRLWorkload",
    "BaseTrainer",
    "BaseWorkload",
    "CustomWorkloadDesc",
    "DLConfig",
    "DLJob",
    "DLJobBuilder",
    "ElasticWorkloadDesc",
    "Future",
    "FutureSequence",
    "Manifest",
    "MemberHandle",
    "Mesh",
    "ModuleSink",
    "ModuleSource",
    "PrimeMaster",
    "RLJobBuilder",
    "RLRoleType",
    "ReceivesWeights",
    "ResourceDesc",
    "RestartEvent",
    "RestartPolicy",
    "RoleGroup",
    "Runtime",
    "SendsWeights",
    "SimpleWorkloadDesc",
    "Stream",
    "Subgraph",
    "TensorSpec",
    "VersionGate",
    "VersionSpans",
    "WeightSink",
    "WeightSource",
    "WeightSync",
    "ZeroSource",
    "__version__",
    "current_worker",
    "errors",
    "rpc",
    "shared",
]
"""A name that leaves this list breaks somebody's program; one that joins it is a promise."""

HEAVY = ["torch", "numpy", "pydantic", "zmq", "uvloop", "msgpack", "xxhash", "rich", "asyncio"]


def test_public_names_are_pinned() -> None:
    assert sorted(rlmesh.__all__) == sorted(PUBLIC)
    assert sorted(dir(rlmesh)) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_each_name_is_there(name: str) -> None:
    assert getattr(rlmesh, name) is not None


def test_a_wrong_name_is_answered_with_the_right_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'RoleGrup'.*RoleGroup"):
        rlmesh.RoleGrup  # noqa: B018


def fresh_interpreter(program: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return result.stdout


def test_the_import_is_free() -> None:
    program = (
        "import sys, time; start = time.perf_counter(); import rlmesh; end = time.perf_counter();"
        f"print(sorted(set(sys.modules) & set({HEAVY!r}))); print(f'import rlmesh: {{1000 * (end - start):.1f}} ms')"
    )
    loaded, duration = fresh_interpreter(program).splitlines()
    print(duration)
    assert loaded == "[]"


def test_what_a_worker_imports_needs_no_torch() -> None:
    names = "RoleGroup, Runtime, rpc, current_worker, Future, FutureSequence, shared"
    program = f"import sys; from rlmesh import {names}; print(sorted(set(sys.modules) & {{'torch', 'numpy'}}))"
    assert fresh_interpreter(program).strip() == "[]"


def test_a_job_can_be_described_without_torch() -> None:
    names = "DLJobBuilder, RLJobBuilder, DLConfig, ResourceDesc, SimpleWorkloadDesc, ElasticWorkloadDesc"
    program = f"import sys; from rlmesh import {names}; print(sorted(set(sys.modules) & {{'torch', 'numpy'}}))"
    assert fresh_interpreter(program).strip() == "[]"
