"""How a driver starts a node, and what it learns when that does not work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlmesh.agent import node_start
from rlmesh.agent.node_start import GuardianProcess, decode_config, encode_config, read_exit_report
from rlmesh.agent.processes import ownership
from rlmesh.agent.protocol import AgentConfig
from rlmesh.errors import LaunchError
from rlmesh.rendezvous.client import NodeOptions, _NodeClient
from rlmesh.rendezvous.state import Start
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


SLOW_EXEC = """
import os, runpy, sys, time
folder = os.path.dirname({path!r})
sys.path[:0] = [folder, os.path.dirname(os.path.dirname(folder))]
real = os.execvpe
def execvpe(*given):
    time.sleep(0.3)
    real(*given)
os.execvpe = execvpe
sys.argv = [{path!r}]
runpy.run_path({path!r}, run_name="__main__")
"""


def test_a_guardian_killed_between_fork_and_exec_of_its_agent_leaves_nothing(
    config: AgentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    *python, path = node_start.guardian_command()
    monkeypatch.setattr(node_start, "guardian_command", lambda: [*python, "-c", SLOW_EXEC.format(path=path)])
    mark = f"{config.job_id}/{config.node_rank}"
    with GuardianProcess(config) as guardian:
        children = Path(f"/proc/{guardian.pid}/task/{guardian.pid}/children")
        deadline = time.monotonic() + HANG_S
        while not (forked := children.read_text().split()) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert ownership.marked(mark) == [], "it is before its exec"
        os.kill(guardian.pid, signal.SIGKILL)
        assert not guardian.wait(HANG_S).guarded
        agent = ownership.read_process(int(forked[0]))
        assert agent is None or not agent.running
        assert not Path(config.socket_dir).exists()


def begins_by(monkeypatch: pytest.MonkeyPatch, command: str, *, ends: bool) -> None:
    """A guardian does this first; ``ends``: nothing is written to it before it has ended."""
    monkeypatch.setattr(node_start, "guardian_command", lambda: ["sh", "-c", command])
    if ends:
        real = subprocess.Popen

        def popen(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
            process: subprocess.Popen[bytes] = real(*args, **kwargs)
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            return process

        monkeypatch.setattr(subprocess, "Popen", popen)


@pytest.mark.parametrize(("command", "how"), [("kill -9 $$", "was killed by SIGKILL"), ("exit 3", "ended with code 3")])
def test_a_guardian_that_ends_before_it_reads_leaves_nothing(
    config: AgentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, how: str
) -> None:
    """The launch of another node reports it, and takes the folder of its sockets along."""
    begins_by(monkeypatch, command, ends=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    told: list[str] = []
    runtime: Any = None
    client = _NodeClient(NodeOptions("127.0.0.1", 1, b"", "1"), runtime)
    client.rank = 1
    monkeypatch.setattr(client, "_report", lambda report: told.append(report.why))
    client._take(Start(config.job_id, config))
    assert told[0].startswith("the guardian of node 3 (pid ")
    assert told[0].endswith(f"{how} before it had read its configuration")
    assert list(tmp_path.glob("rlm-*")) == []
    with pytest.raises(ChildProcessError):
        os.waitpid(int(told[0].partition("(pid ")[2].partition(")")[0]), os.WNOHANG)
    for fd in (client._wake_read, client._wake_write):
        os.close(fd)


def test_a_guardian_that_is_stopped_before_it_reads_blocks_nobody(
    config: AgentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long its configuration is: who waits for the job's start finds it stopped, and kills it."""
    begins_by(monkeypatch, "kill -STOP $$", ends=False)
    guardian = GuardianProcess(replace(config, env={"A": "x" * 500_000}))
    guardian.kill()
    assert not guardian.wait(HANG_S).guarded
