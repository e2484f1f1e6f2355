"""Tools for testing jobs and what is built on the runtime: a cluster of virtual nodes on one machine, a cluster within
one process, a network without sockets, faults, and a loop in virtual time."""

from __future__ import annotations

from rlmesh.testing.clock import NothingLeft as NothingLeft
from rlmesh.testing.clock import VirtualLoop as VirtualLoop
from rlmesh.testing.fake_nvml import FakeGpu as FakeGpu
from rlmesh.testing.fake_nvml import FakeNvml as FakeNvml
from rlmesh.testing.fake_nvml import FakeSlice as FakeSlice
from rlmesh.testing.faults import FaultPlan as FaultPlan
from rlmesh.testing.faults import faulty as faulty
from rlmesh.testing.in_process import InProcessCluster as InProcessCluster
from rlmesh.testing.local_cluster import LocalCluster as LocalCluster
from rlmesh.testing.loopback import LoopbackNetwork as LoopbackNetwork
