"""Virtual nodes: seeds' jobs for several nodes and devices run on one machine, and nothing of them stays."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from rlmesh import DLJobBuilder, current_worker
from rlmesh.driver.handle import JobHandle
from rlmesh.errors import JobFailed, UsageError
from rlmesh.testing import LocalCluster
from tests.own_time import HANG_S


class Idle:
    """Serves nothing and waits for the end."""


class Waiter:
    """Runs until it is told to stop."""

    def run(self) -> None:
        while current_worker().step_boundary() is None:
            time.sleep(0.02)


def start(cluster_job: str) -> JobHandle:
    job = DLJobBuilder().role("IDLE").run(Idle).total(2).per_node(1).resource(accelerator=1)
    handle = job.role("TRAINER").run(Waiter).build().submit(cluster_job, blocking=False)
    deadline = time.monotonic() + HANG_S
    while handle.status.stage == "starting" and not handle.done() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert handle.status.stage == "running", handle.status
    return handle


@pytest.mark.slow
def test_leaving_the_cluster_stops_its_jobs(tmp_path: Path) -> None:
    with LocalCluster(nodes=2, devices_per_node=1, run_root=tmp_path):
        handle = start("left")
        assert [m.node_rank for m in handle.status.members if m.role == "IDLE"] == [0, 1]
    with pytest.raises(JobFailed, match="job left was stopped: the LocalCluster was closed"):
        handle.result(0.5)
    assert handle.status.stage == "stopped"
    assert handle.status.failures == ()


def test_lost_node_is_named(tmp_path: Path) -> None:
    with LocalCluster(nodes=2, devices_per_node=1, run_root=tmp_path):
        handle = start("lost")
        agents = [int(pid) for pid in handle.status.extra["agent_pids"].split(",")]
        os.kill(agents[1], signal.SIGKILL)
        # Told by the master or by the driver, whoever sees it first.
        named = rf"the agent of node node-1 (\(pid {agents[1]} on .*\) died|was killed by SIGKILL)"
        with pytest.raises(JobFailed, match=named):
            handle.result(HANG_S)


@pytest.mark.parametrize("sizes", [{"nodes": 0}, {"devices_per_node": -1}])
def test_impossible_sizes_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="a whole number from"):
        LocalCluster(**sizes)  # type: ignore[arg-type]


class Once:
    def run(self) -> None: ...


@pytest.mark.case("s08")
@pytest.mark.slow
def test_a_view_that_submit_names_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with LocalCluster(run_root=tmp_path):
        job = DLJobBuilder().role("TRAINER").run(Once).build()
        job.submit("unseen")
        assert capfd.readouterr() == ("", "")
        job.submit("seen", view="plain")
    assert "seen succeeded after" in capfd.readouterr().err
