"""Processes of a job import only what they need before they serve. A start has five of them, which share few cores."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlmesh.agent import node_start
from rlmesh.agent.processes import guardian

CALLS = {
    "cloudpickle", "difflib", "rlmesh.runtime.calling.retry", "rlmesh.runtime.connections.bulk_channel",
    "rlmesh.runtime.serving.stream_server", "rlmesh.runtime.calling.future_arguments", "rlmesh.runtime.streams",
    "rlmesh.runtime.subgraphs",
}  # fmt: skip
"""Modules that only some calls need."""
FAULTS = {
    "rlmesh.agent.processes.guardian", "rlmesh.master.monitoring.wait_circles",
    "rlmesh.master.monitoring.member_stacks", "rlmesh.observe.timeline", "rlmesh.placement.infeasible",
    "rlmesh.runtime.serving.wait_report",
}  # fmt: skip
"""Modules that only a job in trouble needs, or a command that inspects it."""
MACHINES = {
    "rlmesh.placement.machine.masks",
    "rlmesh.placement.machine.nvml",
    "rlmesh.runtime.transport.inet",
    "rlmesh.runtime.transport.plain_transport",
}
"""Modules that only a node with GPUs, or a job of several nodes, needs."""
SUBMITTING = {
    "pydantic",
    "rlmesh.builders.config",
    "rlmesh.builders.job_builder",
    "rlmesh.builders.rl_builder",
    "rlmesh.job.description.config",
    "rlmesh.job.entry_points.preload",
    "rlmesh.job.entry_points.resolving",
    "rlmesh.job.entry_points.source_scan",
}
RL = {"rlmesh.rl", "rlmesh.weights", "rlmesh.testing", "torch", "numpy"}
VIEWS = {
    "prometheus_client",
    "rich",
    "rlmesh.cli",
    "rlmesh.master.monitoring.metrics_page",
    "rlmesh.observe.run_report",
    "rlmesh.observe.prometheus",
}

BASE = "from rlmesh.agent.processes import zygote; assert zygote.import_all(zygote.BASE) == {}"
STARTS = {
    "the agent, until it has started the others": (
        "import rlmesh.agent.__main__",
        CALLS | FAULTS | MACHINES | SUBMITTING | RL | VIEWS | {"asyncio", "uvloop", "rlmesh.runtime.runtime"},
    ),
    "the agent": ("import rlmesh.agent.lifecycle", CALLS | FAULTS | MACHINES | SUBMITTING | RL | VIEWS | {"sqlite3"}),
    "the master": ("import rlmesh.master.prime_master", CALLS | FAULTS | MACHINES | SUBMITTING | RL | VIEWS),
    "the zygote": (
        BASE,
        (FAULTS - {"rlmesh.runtime.serving.wait_report"})
        | RL
        | VIEWS
        | {"sqlite3", "rlmesh.observe.files.metric_files"},
    ),
    "the driver": (
        "from rlmesh import DLJobBuilder, RoleGroup, current_worker, rpc; import rlmesh.driver.driver",
        FAULTS
        | MACHINES
        | RL
        | VIEWS
        | {"rlmesh.rendezvous.server", "rlmesh.runtime.streams", "rlmesh.runtime.connections.bulk_channel"},
    ),
    "a program that calls": ("from rlmesh import RoleGroup, Runtime, rpc", CALLS | FAULTS | MACHINES | RL | VIEWS),
}


def loaded_by(program: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\nimport sys; print(*sys.modules)"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return set(done.stdout.split())


@pytest.mark.parametrize("process", STARTS)
def test_a_start_imports_only_what_it_needs(process: str) -> None:
    program, not_needed = STARTS[process]
    assert sorted(loaded_by(program) & not_needed) == []


def test_a_worker_has_what_it_needs_from_the_zygote() -> None:
    names = "RoleGroup, BaseWorkload, current_worker, rpc"
    wanted = f"from rlmesh import {names}; import rlmesh.runtime.transport.unix_transport, cloudpickle"
    assert sorted(loaded_by(f"{BASE}; {wanted}") - loaded_by(BASE)) == []


def test_the_guardian_reads_what_starts_it_may_send() -> None:
    """The guardian runs without the library and so has its own constant for the limit."""
    assert node_start.CONFIG_LIMIT_BYTES == guardian.CONFIG_LIMIT_BYTES
