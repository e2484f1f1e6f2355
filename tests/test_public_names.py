"""The public names of ``rlmesh``, and what it costs to import them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rlmesh
import rlmesh.envs
import rlmesh.rl
from rlmesh import (
    BaseWorkload,
    DLConfig,
    JobHandle,
    JobStatus,
    Mesh,
    RoleGroup,
    WeightSync,
    WorkerContext,
    current_worker,
)

ROOT = Path(__file__).resolve().parent.parent

PUBLIC = [
    "Alarm",
    "ArraySink",
    "ArraySource",
    "BaseRLTrainer",
    "BaseRLWorkload",
    "BaseTrainer",
    "BaseWorkload",
    "CallOptions",
    "CustomWorkloadDesc",
    "DLConfig",
    "DLJob",
    "DLJobBuilder",
    "DeviceLease",
    "ElasticWorkloadDesc",
    "ExitInfo",
    "FailureInfo",
    "Future",
    "FutureSequence",
    "GroupOutcomes",
    "JobHandle",
    "JobInfo",
    "JobResult",
    "JobStatus",
    "Manifest",
    "MemberHandle",
    "MemberStatus",
    "Mesh",
    "MetricRecord",
    "ModuleSink",
    "ModuleSource",
    "NetworkOptions",
    "Plan",
    "PrimeMaster",
    "PushReport",
    "RLJobBuilder",
    "RLRoleType",
    "ReceivesWeights",
    "ResourceDesc",
    "ResourcePoolManager",
    "RestartEvent",
    "RestartPolicy",
    "RestartRecord",
    "Resume",
    "RoleGroup",
    "Runtime",
    "SendsWeights",
    "SimpleWorkloadDesc",
    "StopRequest",
    "Stream",
    "Subgraph",
    "Subgraphs",
    "TensorSpec",
    "Trackers",
    "VersionGate",
    "VersionSpans",
    "WeightPlan",
    "WeightSink",
    "WeightSource",
    "WeightSync",
    "WorkerContext",
    "ZeroSource",
    "__version__",
    "acting_as",
    "current_worker",
    "errors",
    "rpc",
    "shared",
]
"""A name that leaves this list breaks somebody's program; one that joins it is a promise."""

RL = [
    "Abstain",
    "ActorSettings",
    "AsyncVllmEngine",
    "BehaviourCloning",
    "Correction",
    "CriticSettings",
    "DDPEngine",
    "DPO",
    "DeepSpeedEngine",
    "EpisodeSettings",
    "FSDP2Engine",
    "GRPO",
    "LoraOptions",
    "LoraSettings",
    "OnPolicyDistillation",
    "PPO",
    "ReferenceSettings",
    "ReinforcePlusPlus",
    "Reward",
    "RewardModel",
    "RewardModelling",
    "RolloutEngine",
    "RolloutSettings",
    "Run",
    "RunResult",
    "SFT",
    "Sample",
    "SamplingParams",
    "Saving",
    "Score",
    "StepReport",
    "TrainingEngine",
    "TrainingOptions",
    "TransformersEngine",
    "ValidationSettings",
    "VllmEngine",
]
"""The names of ``rlmesh.rl``, whose modules are imported on first use."""

ENVS = [
    "A2C",
    "A2CConfig",
    "APPO",
    "APPOConfig",
    "ActorCriticModule",
    "Algorithm",
    "AlgorithmConfig",
    "BC",
    "BCConfig",
    "DQN",
    "DQNConfig",
    "EnvContext",
    "EnvRunner",
    "EnvRunnerGroup",
    "EpisodeLost",
    "ExternalEnv",
    "ExternalEnvClient",
    "IMPALA",
    "IMPALAConfig",
    "Learner",
    "LearnerGroup",
    "MARWIL",
    "MARWILConfig",
    "ModulePolicy",
    "MultiAgentBatch",
    "MultiAgentEnv",
    "MultiAgentEnvRunner",
    "MultiAgentRLModule",
    "PG",
    "PGConfig",
    "PPO",
    "PPOConfig",
    "ParallelPettingZooEnv",
    "PettingZooEnv",
    "Policy",
    "PolicyClient",
    "PolicySpec",
    "RLModule",
    "ResultDict",
    "RolloutWorker",
    "SAC",
    "SACConfig",
    "SampleBatch",
    "TD3",
    "TD3Config",
    "VPG",
    "VPGConfig",
    "WorkerSet",
    "get_algorithm_class",
    "make_multi_agent",
    "multi_gpu_train_one_step",
    "register_env",
    "synchronous_parallel_sample",
    "train_one_step",
]
"""The names of ``rlmesh.envs``, whose modules are imported on first use."""

HEAVY = ["torch", "numpy", "pydantic", "zmq", "uvloop", "msgpack", "xxhash", "rich", "asyncio"]


def test_public_names_are_pinned() -> None:
    assert sorted(rlmesh.__all__) == sorted(PUBLIC)
    assert sorted(dir(rlmesh)) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_each_name_is_there(name: str) -> None:
    assert getattr(rlmesh, name) is not None


def test_what_users_receive_can_be_annotated() -> None:
    """What `start`, `submit`, `current_worker`, `push` and their like give, down to the fields of a status."""
    given: list[Any] = [
        DLConfig.start, JobHandle.result, vars(JobHandle)["status"].fget, DLConfig.plan, BaseWorkload.on_stop,
        current_worker, vars(WorkerContext)["resume"].fget, WorkerContext.step_boundary, WorkerContext.device_lease,
        WeightSync.push, WeightSync.plan, RoleGroup.options, Mesh.subgraphs, WorkerContext, JobStatus,
    ]  # fmt: skip
    named = {word for thing in given for text in annotations_of(thing) for word in re.findall(r"[A-Z]\w+", text)}
    builtin = {"Any", "Callable", "Enum", "Literal", "Mapping", "None", "Path", "Sequence", "Stage", "View", "A"}
    internal = {"ControlLink", "LeaseLink", "SharedLease", "Hook", "ClusterLike"}
    assert named - builtin - internal - set(PUBLIC) == set()


def annotations_of(thing: Any) -> list[str]:
    return [value for value in vars(thing).get("__annotations__", thing.__annotations__).values() if value]


def test_the_names_of_the_rl_layer_are_pinned_and_load_no_torch() -> None:
    program = (
        "import sys, rlmesh.rl; from rlmesh.rl import RolloutEngine, Sample, SamplingParams, TrainingEngine, "
        "TrainingOptions; print(sorted(set(sys.modules) & {'torch', 'numpy', 'transformers', 'vllm'}))"
    )
    assert fresh_interpreter(program).strip() == "[]"
    assert rlmesh.rl.__all__ == RL
    assert set(RL) < set(dir(rlmesh.rl))


@pytest.mark.parametrize("name", RL)
def test_each_name_of_the_rl_layer_is_there(name: str) -> None:
    pytest.importorskip("torch")
    assert getattr(rlmesh.rl, name) is not None


def test_the_names_of_environments_are_pinned_and_load_no_torch() -> None:
    light = "SampleBatch, MultiAgentBatch, Policy, EnvRunner, EnvRunnerGroup, PPOConfig, PGConfig, register_env"
    program = f"import sys; from rlmesh.envs import {light}; print(sorted(set(sys.modules) & {{'torch'}}))"
    assert fresh_interpreter(program).strip() == "[]"
    assert rlmesh.envs.__all__ == ENVS
    assert set(ENVS) < set(dir(rlmesh.envs))


@pytest.mark.parametrize("name", ENVS)
def test_each_name_of_environments_is_there(name: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("gymnasium")
    assert getattr(rlmesh.envs, name) is not None


def test_a_wrong_name_of_the_rl_layer_is_answered_with_the_right_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'FSDPEngine'.*FSDP2Engine"):
        rlmesh.rl.FSDPEngine  # noqa: B018


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
