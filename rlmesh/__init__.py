"""Multi-role reinforcement learning without Ray.

Public names are imported on first use, so that ``import rlmesh`` loads neither torch nor other packages that a login
node may lack.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlmesh import errors as errors
    from rlmesh.builders.config import DLConfig as DLConfig
    from rlmesh.builders.config import DLJob as DLJob
    from rlmesh.builders.job_builder import DLJobBuilder as DLJobBuilder
    from rlmesh.builders.rl_builder import RLJobBuilder as RLJobBuilder
    from rlmesh.driver.handle import JobHandle as JobHandle
    from rlmesh.driver.outcome import JobResult as JobResult
    from rlmesh.job.context import JobInfo as JobInfo
    from rlmesh.job.context import Resume as Resume
    from rlmesh.job.context import StopRequest as StopRequest
    from rlmesh.job.context import WorkerContext as WorkerContext
    from rlmesh.job.context import acting_as as acting_as
    from rlmesh.job.description.descriptors import CustomWorkloadDesc as CustomWorkloadDesc
    from rlmesh.job.description.descriptors import ElasticWorkloadDesc as ElasticWorkloadDesc
    from rlmesh.job.description.descriptors import ResourceDesc as ResourceDesc
    from rlmesh.job.description.descriptors import SimpleWorkloadDesc as SimpleWorkloadDesc
    from rlmesh.job.description.placement_rules import ResourcePoolManager as ResourcePoolManager
    from rlmesh.job.description.restart_policy import RestartPolicy as RestartPolicy
    from rlmesh.job.description.roles import RLRoleType as RLRoleType
    from rlmesh.job.device_lease import DeviceLease as DeviceLease
    from rlmesh.job.restarts import RestartEvent as RestartEvent
    from rlmesh.job.status import Alarm as Alarm
    from rlmesh.job.status import ExitInfo as ExitInfo
    from rlmesh.job.status import FailureInfo as FailureInfo
    from rlmesh.job.status import JobStatus as JobStatus
    from rlmesh.job.status import MemberStatus as MemberStatus
    from rlmesh.job.status import MetricRecord as MetricRecord
    from rlmesh.job.status import RestartRecord as RestartRecord
    from rlmesh.job.workload import BaseRLTrainer as BaseRLTrainer
    from rlmesh.job.workload import BaseRLWorkload as BaseRLWorkload
    from rlmesh.job.workload import BaseTrainer as BaseTrainer
    from rlmesh.job.workload import BaseWorkload as BaseWorkload
    from rlmesh.job.workload import current_worker as current_worker
    from rlmesh.master.prime_master import PrimeMaster as PrimeMaster
    from rlmesh.observe.trackers.trackers import Trackers as Trackers
    from rlmesh.placement.plan import Plan as Plan
    from rlmesh.runtime.batch_split import shared as shared
    from rlmesh.runtime.calling.gathering import GroupOutcomes as GroupOutcomes
    from rlmesh.runtime.connections.network import NetworkOptions as NetworkOptions
    from rlmesh.runtime.future import Future as Future
    from rlmesh.runtime.group import RoleGroup as RoleGroup
    from rlmesh.runtime.handle import CallOptions as CallOptions
    from rlmesh.runtime.handle import MemberHandle as MemberHandle
    from rlmesh.runtime.rpc import rpc as rpc
    from rlmesh.runtime.runtime import Runtime as Runtime
    from rlmesh.runtime.sequence import FutureSequence as FutureSequence
    from rlmesh.runtime.streams import Stream as Stream
    from rlmesh.runtime.subgraphs import Mesh as Mesh
    from rlmesh.runtime.subgraphs import Subgraph as Subgraph
    from rlmesh.runtime.subgraphs import Subgraphs as Subgraphs
    from rlmesh.weights.arrays import ArraySink as ArraySink
    from rlmesh.weights.arrays import ArraySource as ArraySource
    from rlmesh.weights.manifest import Manifest as Manifest
    from rlmesh.weights.manifest import TensorSpec as TensorSpec
    from rlmesh.weights.members import ReceivesWeights as ReceivesWeights
    from rlmesh.weights.members import SendsWeights as SendsWeights
    from rlmesh.weights.module_sink import ModuleSink as ModuleSink
    from rlmesh.weights.module_source import ModuleSource as ModuleSource
    from rlmesh.weights.planning.plan import WeightPlan as WeightPlan
    from rlmesh.weights.protocols import WeightSink as WeightSink
    from rlmesh.weights.protocols import WeightSource as WeightSource
    from rlmesh.weights.sink_state import VersionGate as VersionGate
    from rlmesh.weights.sync import PushReport as PushReport
    from rlmesh.weights.sync import WeightSync as WeightSync
    from rlmesh.weights.version_spans import VersionSpans as VersionSpans
    from rlmesh.weights.zero_source import ZeroSource as ZeroSource

__version__ = "0.1.0"

_WHERE = {
    "Alarm": "rlmesh.job.status",
    "ArraySink": "rlmesh.weights.arrays",
    "ArraySource": "rlmesh.weights.arrays",
    "BaseRLTrainer": "rlmesh.job.workload",
    "BaseRLWorkload": "rlmesh.job.workload",
    "BaseTrainer": "rlmesh.job.workload",
    "BaseWorkload": "rlmesh.job.workload",
    "CallOptions": "rlmesh.runtime.handle",
    "CustomWorkloadDesc": "rlmesh.job.description.descriptors",
    "DLConfig": "rlmesh.builders.config",
    "DLJob": "rlmesh.builders.config",
    "DLJobBuilder": "rlmesh.builders.job_builder",
    "DeviceLease": "rlmesh.job.device_lease",
    "ElasticWorkloadDesc": "rlmesh.job.description.descriptors",
    "ExitInfo": "rlmesh.job.status",
    "FailureInfo": "rlmesh.job.status",
    "Future": "rlmesh.runtime.future",
    "FutureSequence": "rlmesh.runtime.sequence",
    "GroupOutcomes": "rlmesh.runtime.calling.gathering",
    "JobHandle": "rlmesh.driver.handle",
    "JobInfo": "rlmesh.job.context",
    "JobResult": "rlmesh.driver.outcome",
    "JobStatus": "rlmesh.job.status",
    "Manifest": "rlmesh.weights.manifest",
    "MemberHandle": "rlmesh.runtime.handle",
    "MemberStatus": "rlmesh.job.status",
    "Mesh": "rlmesh.runtime.subgraphs",
    "MetricRecord": "rlmesh.job.status",
    "ModuleSink": "rlmesh.weights.module_sink",
    "ModuleSource": "rlmesh.weights.module_source",
    "NetworkOptions": "rlmesh.runtime.connections.network",
    "Plan": "rlmesh.placement.plan",
    "PrimeMaster": "rlmesh.master.prime_master",
    "PushReport": "rlmesh.weights.sync",
    "RLJobBuilder": "rlmesh.builders.rl_builder",
    "RLRoleType": "rlmesh.job.description.roles",
    "ReceivesWeights": "rlmesh.weights.members",
    "ResourceDesc": "rlmesh.job.description.descriptors",
    "ResourcePoolManager": "rlmesh.job.description.placement_rules",
    "RestartEvent": "rlmesh.job.restarts",
    "RestartPolicy": "rlmesh.job.description.restart_policy",
    "RestartRecord": "rlmesh.job.status",
    "Resume": "rlmesh.job.context",
    "RoleGroup": "rlmesh.runtime.group",
    "Runtime": "rlmesh.runtime.runtime",
    "SendsWeights": "rlmesh.weights.members",
    "SimpleWorkloadDesc": "rlmesh.job.description.descriptors",
    "StopRequest": "rlmesh.job.context",
    "Stream": "rlmesh.runtime.streams",
    "Subgraph": "rlmesh.runtime.subgraphs",
    "Subgraphs": "rlmesh.runtime.subgraphs",
    "TensorSpec": "rlmesh.weights.manifest",
    "Trackers": "rlmesh.observe.trackers.trackers",
    "VersionGate": "rlmesh.weights.sink_state",
    "VersionSpans": "rlmesh.weights.version_spans",
    "WeightPlan": "rlmesh.weights.planning.plan",
    "WeightSink": "rlmesh.weights.protocols",
    "WeightSource": "rlmesh.weights.protocols",
    "WeightSync": "rlmesh.weights.sync",
    "WorkerContext": "rlmesh.job.context",
    "ZeroSource": "rlmesh.weights.zero_source",
    "acting_as": "rlmesh.job.context",
    "current_worker": "rlmesh.job.workload",
    "rpc": "rlmesh.runtime.rpc",
    "shared": "rlmesh.runtime.batch_split",
}

__all__ = ["__version__", "errors", *sorted(_WHERE)]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("rlmesh.errors")
    where = _WHERE.get(name)
    if where is None:
        raise AttributeError(f"module 'rlmesh' has no attribute {name!r}; its names are {', '.join(__all__)}")
    value = getattr(import_module(where), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
