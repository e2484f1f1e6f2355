"""What the processes of a job import before they serve: five of them do so at each start, and on few cores in turns."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlmesh.agent import guardian, start

CALLS = {
    "cloudpickle", "difflib", "rlmesh.runtime.group_retry", "rlmesh.runtime.lane", "rlmesh.runtime.outflow",
    "rlmesh.runtime.passing", "rlmesh.runtime.streams", "rlmesh.runtime.subgraphs", "rlmesh.wire.seal",
}  # fmt: skip
"""What only some calls need."""
FAULTS = {
    "rlmesh.agent.guardian", "rlmesh.master.circles", "rlmesh.master.member_stacks", "rlmesh.observe.timeline",
    "rlmesh.placement.shortage", "rlmesh.runtime.blocked",
}  # fmt: skip
"""What only a job in trouble needs, or who looks at it."""
MACHINES = {"rlmesh.placement.masks", "rlmesh.placement.nvml", "rlmesh.runtime.inet", "rlmesh.runtime.plain_transport"}
"""What only a node with GPUs, or a job of several nodes, needs."""
SUBMITTING = {"pydantic", "rlmesh.job.builder", "rlmesh.job.config", "rlmesh.job.resolving", "rlmesh.job.source"}
RL = {"rlmesh.rl", "rlmesh.weights", "rlmesh.testing", "torch", "numpy"}
VIEWS = {"rich", "rlmesh.cli", "rlmesh.observe.exposition", "rlmesh.observe.report", "rlmesh.observe.scrape"}

BASE = "from rlmesh.agent import zygote; assert zygote.import_all(zygote.BASE) == {}"
STARTS = {
    "the agent, until it has started the others": (
        "import rlmesh.agent.__main__",
        CALLS | FAULTS | MACHINES | SUBMITTING | RL | VIEWS | {"asyncio", "uvloop", "rlmesh.runtime.runtime"},
    ),
    "the agent": ("import rlmesh.agent.life", CALLS | FAULTS | MACHINES | SUBMITTING | RL | VIEWS | {"sqlite3"}),
    "the master": ("import rlmesh.master.prime_master", CALLS | FAULTS | MACHINES | SUBMITTING | RL | VIEWS),
    "the zygote": (BASE, (FAULTS - {"rlmesh.runtime.blocked"}) | RL | VIEWS | {"sqlite3", "rlmesh.observe.metrics"}),
    "the driver": (
        "from rlmesh import DLJobBuilder, RoleGroup, current_worker, rpc; import rlmesh.master.driver",
        FAULTS | MACHINES | RL | VIEWS | {"rlmesh.master.head", "rlmesh.runtime.streams", "rlmesh.runtime.lane"},
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
    wanted = f"from rlmesh import {names}; import rlmesh.runtime.unix_transport, cloudpickle"
    assert sorted(loaded_by(f"{BASE}; {wanted}") - loaded_by(BASE)) == []


def test_the_guardian_reads_what_starts_it_may_send() -> None:
    """It runs without the library, and has a limit of its own."""
    assert start.CONFIG_LIMIT_BYTES == guardian.CONFIG_LIMIT_BYTES
