"""How a driver starts a node, and what it learns when that does not work."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rlmesh.agent.node_start import GuardianProcess, decode_config, encode_config, read_exit_report
from rlmesh.agent.processes import ownership
from rlmesh.agent.protocol import AgentConfig
from rlmesh.errors import LaunchError
from tests.own_time import HANG_S


@pytest.fixture
def config(tmp_path: Path) -> AgentConfig:
    sockets = tmp_path / "s"
    sockets.mkdir(mode=0o700)
    return AgentConfig(
        job_id="test-start", job_name="test", key_hex="00" * 32, node_rank=3, node_name="n3", nnodes=4,
        socket_dir=str(sockets), run_dir=str(tmp_path / "run"), master_endpoint=f"ipc://{sockets}/master",
        start_master=False, preload=("torch",), import_roots=("/a",), env={"A": "b"},
    )  # fmt: skip


def test_a_configuration_survives_the_pipe(config: AgentConfig) -> None:
    line = encode_config(config)
    assert line.count(b"\n") == 1
    assert decode_config(line) == config
    with pytest.raises(LaunchError, match="same version of rlmesh"):
        decode_config(b'{"surprise": 1}\n')
    with pytest.raises(LaunchError, match="shorten 'env'"):
        encode_config(replace(config, env={"A": "x" * (1 << 20)}))


def test_a_run_directory_that_cannot_be_made(config: AgentConfig, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with GuardianProcess(replace(config, run_dir=str(tmp_path / "file" / "run"))) as guardian:
        report = guardian.wait(HANG_S)
    assert report.why.startswith("the agent could not be started: NotADirectoryError")
    assert (report.agent_code, report.processes_started, report.clean) == (None, -1, True)
    assert not Path(config.socket_dir).exists()


def test_an_agent_without_a_master_ends_with_its_guardian(config: AgentConfig) -> None:
    with GuardianProcess(config) as guardian:
        assert guardian.running()
        with pytest.raises(TimeoutError, match=r"node 3 \(guardian pid"):
            guardian.wait(0.01)
        guardian.let_go()
        report = guardian.wait(HANG_S)
    assert report.node_rank == 3
    assert (report.why, report.clean) == ("the driver is gone", True)
    assert json.loads((Path(config.run_dir) / "exit-node3.json").read_text())["why"] == report.why


def test_no_report_proves_nothing() -> None:
    report = read_exit_report(b"", 1)
    assert (report.clean, report.why, report.node_rank) == (False, "the guardian died", 1)


@pytest.mark.parametrize("after_s", [0.0, 0.3])
def test_a_guardian_killed_while_its_agent_starts_leaves_nothing(config: AgentConfig, after_s: float) -> None:
    mark = f"{config.job_id}/{config.node_rank}"
    with GuardianProcess(config) as guardian:
        deadline = time.monotonic() + HANG_S
        while not ownership.marked(mark) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(after_s)  # before and after the agent has imported what it needs
        os.kill(guardian.pid, signal.SIGKILL)
        report = guardian.wait(HANG_S)
        assert ownership.marked(mark) == []
        assert not Path(config.socket_dir).exists()
    assert (report.guarded, report.why) == (False, "the guardian died")
