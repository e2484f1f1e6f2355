"""Whole jobs that end at any moment, by SIGKILL or by Slurm, go on and end with the same bits."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from rlmesh.rl.checkpoints.store import saved_step
from tests.own_time import HANG_S
from tests.rl.checkpoints import kills, run_script
from tests.rl.checkpoints.runs import content, make, make_model, metrics_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]

ROOT = Path(__file__).resolve().parents[3]
MARK = "RLMESH_TEST_KILLED"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of an undisturbed run, in one process: a job gives the same bits."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    make(model, "ppo").here(run_dir=run_dir)
    return run_dir


def start(model: Path, folder: Path, *options: str, mark: str = "") -> subprocess.Popen[bytes]:
    """A job in a process group of its own; its output goes to the file ``out``."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "rlmesh.cli.main", "launch", "--view", "plain", "--run-dir", "run"]
    with (folder / "out").open("ab") as out:
        return subprocess.Popen(
            [*command, run_script.__file__, str(model), "ppo", *options], cwd=folder, stdout=out, stderr=out,
            start_new_session=True,
            env={**os.environ, MARK: mark, "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def kill_all(mark: str) -> int:
    """Kill all processes of a job at once; returns their number. They are stopped first, so that none sees another
    one's end."""
    found: list[int] = []
    while new := [pid for pid in marked(mark) if pid not in found]:
        for pid in new:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        found += new
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(found)


def marked(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and f"{MARK}={mark}\0".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def await_step(run_dir: Path, step: int) -> None:
    until = time.monotonic() + HANG_S * 2
    while not (run_dir / "metrics.jsonl").exists() or max(metrics_of(run_dir), default=-1) < step:
        assert time.monotonic() < until, (run_dir.parent / "out").read_text()
        time.sleep(0.01)


@pytest.mark.timeout(400)
def test_a_job_whose_processes_are_all_killed_goes_on(model: Path, whole: Path, tmp_path: Path) -> None:
    mark = secrets.token_hex(8)
    process = start(model, tmp_path, mark=mark)
    await_step(tmp_path / "run", 5)
    assert kill_all(mark) >= 5
    assert process.wait(HANG_S) == -signal.SIGKILL
    assert saved_step(tmp_path / "run") in (2, 4, 6)
    process = start(model, tmp_path)
    assert process.wait(HANG_S * 4) == 0, (tmp_path / "out").read_text()
    assert content(tmp_path / "run") == content(whole)
    assert metrics_of(tmp_path / "run") == metrics_of(whole)
    assert metrics_of(tmp_path / "run").keys() == {*range(9)}


@pytest.mark.timeout(300)
def test_a_complete_job_says_so_and_goes_on_with_other_ranks(model: Path, whole: Path, tmp_path: Path) -> None:
    """With other numbers of ranks, engines and devices, another training engine and another placement."""
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    assert start(model, tmp_path).wait(HANG_S * 2) == 0
    assert "already complete: 8 steps are done" in (tmp_path / "out").read_text()
    sets = ("steps=10", "actor.ranks=2", "critic.ranks=2", "rollout.engines=2", "train=fsdp2", "placement=shared")
    process = start(model, tmp_path, *(word for one in sets for word in ("--set", one)))
    code, text = process.wait(HANG_S * 4), (tmp_path / "out").read_text()
    assert code == 0, text
    assert text.count("the same training up to rounding") == 5, text
    steps = metrics_of(run_dir)
    assert {*range(11)} == steps.keys() and steps[10]["batches"] == 10
    alone = tmp_path / "alone"
    shutil.copytree(whole, alone)
    make(model, "ppo", steps=10).here(run_dir=alone)
    for step in (9, 10):  # other ranks round otherwise
        for name, distance in (("reward_mean", 0.06), ("kl", 0.05), ("critic/value_mean", 0.05), ("lr", 0)):
            assert steps[step][name] == pytest.approx(metrics_of(alone)[step][name], abs=distance), name
        assert steps[step]["drift_alarm"] == 0
    assert json.loads((run_dir / "checkpoints/step-000010/actor/current.json").read_text())["ranks"] == 2


@pytest.mark.case("O21")
@pytest.mark.timeout(300)
def test_runs_that_are_killed_at_random_moments_end_with_the_same_bits(tmp_path: Path) -> None:
    random_moments(tmp_path, seed=3, tries=3)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_fifty_random_moments(tmp_path: Path) -> None:
    random_moments(tmp_path, seed=0, tries=50)


def random_moments(folder: Path, seed: int, tries: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", kills.__name__, str(folder), "--seed", str(seed), "--tries", str(tries)], cwd=ROOT,
        capture_output=True, text=True, timeout=60 + 60 * tries, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines() if re.match("{", line)]
    assert done.returncode == 0 and lines[-1] == {"tries": tries, "differing": 0}, done.stdout + done.stderr
