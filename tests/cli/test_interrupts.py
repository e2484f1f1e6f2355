"""Ctrl-C and SIGTERM: what was started has ended, and the exit code is 128 and the number of the signal."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlmesh.cli.job_choice import as_command
from rlmesh.driver.outcome import job_interrupted
from rlmesh.errors import JobFailed, RLMeshError
from tests.own_time import HANG_S


def stopped(reason: str) -> KeyboardInterrupt:
    return job_interrupted("toy", reason, "")


def failed(stop_signal: int) -> JobFailed:
    error = JobFailed("job toy was stopped", [RLMeshError("job toy was stopped")])
    error.stop_signal = stop_signal
    return error


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (KeyboardInterrupt(), 130, ""), (stopped("Ctrl-C"), 130, "job toy was stopped: Ctrl-C"),
        (stopped("SIGTERM"), 143, "job toy was stopped: SIGTERM"), (stopped("rlmesh stop"), 130, "rlmesh stop"),
        (failed(int(signal.SIGTERM)), 143, "job toy was stopped"), (failed(int(signal.SIGINT)), 130, "job toy was"),
        (failed(0), 1, "job toy was stopped"), (RLMeshError("broken"), 1, "broken"),
    ],
)  # fmt: skip
def test_the_code_of_an_interrupt(
    error: BaseException, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(options: argparse.Namespace) -> int:
        raise error

    assert as_command("train", work)(argparse.Namespace(), []) == code
    told = capsys.readouterr().err
    assert text in told and bool(told) == bool(text)


SCRIPT = """
import os, signal, sys, threading
from rlmesh import DLJobBuilder
from tests.job import serving

if __name__ == "__main__":
    job = DLJobBuilder().role("TRAINER").run(serving.Endless).total(1).restart("never").build()
    handle = job.submit("waits", blocking=False)
    while handle.status.stage != "running":
        threading.Event().wait(0.02)
    threading.Timer(0.2, os.kill, (os.getpid(), getattr(signal, sys.argv[1]))).start()
    handle.result()
"""


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), pytest.param("SIGTERM", 143, marks=pytest.mark.slow)])
def test_a_script_that_waits_for_a_started_job(name: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    process = started(["launch", "job.py", name], tmp_path)
    output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == code, output


def started(words: list[str], folder: Path) -> subprocess.Popen[str]:
    """A command in a process group of its own, whose terminal's Ctrl-C would reach all of it."""
    return subprocess.Popen(
        [sys.executable, "-m", "rlmesh.cli.main", *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip


def ended_by(number: int, process: subprocess.Popen[str], line: str) -> tuple[int, str]:
    """The exit code and the output of a command whose group gets a signal after a line that begins like this."""
    assert process.stdout is not None
    seen = ""
    while not seen.startswith(line):
        seen = process.stdout.readline()
        assert seen, "the command ended before"
    os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=HANG_S)
    return process.returncode, output


@pytest.mark.slow
def test_an_agent_in_training_and_in_evaluation(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    small = '{"train_batch_size": 64, "minibatch_size": 32}'
    words = ["train", "--run", "PPO", "--env", "CartPole-v1", "--config", small, "--run-dir", "agent"]
    code, output = ended_by(signal.SIGINT, started([*words, "--checkpoint-at-end"], tmp_path), "PPO 2:")
    assert code == 130 and "Traceback" not in output, output
    assert list((tmp_path / "agent" / "checkpoints").iterdir())


def loud(context: Any) -> Any:
    """CartPole, whose program says when it is made."""
    import gymnasium as gym

    print("made", flush=True)
    return gym.make("CartPole-v1")


@pytest.mark.slow
def test_an_agent_that_plays(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    from rlmesh.envs import PGConfig

    with PGConfig().environment(loud).build() as algorithm:
        algorithm.save(tmp_path / "agent")
    code, output = ended_by(signal.SIGINT, started(["evaluate", "agent", "--episodes", "1000000"], tmp_path), "made")
    assert code == 130 and "Traceback" not in output, output


def test_a_command_that_follows_a_job(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("".join(line for line in SCRIPT.splitlines(True) if "Timer" not in line))
    log = tmp_path / "run" / "logs" / "TRAINER-0.log"
    with started(["launch", "--run-dir", "run", "job.py"], tmp_path) as job:
        while not log.is_file():
            time.sleep(0.02)
        with log.open("a") as file:
            file.write("a line\n")
        code, output = ended_by(signal.SIGINT, started(["logs", "-f", "--job", "run"], tmp_path), "TRAINER:0 | a line")
        assert code == 130 and "Traceback" not in output, output
        job.send_signal(signal.SIGINT)
        output, _ = job.communicate(timeout=HANG_S)
        assert job.returncode == 130, output
