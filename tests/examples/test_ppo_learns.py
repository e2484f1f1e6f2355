"""The PPO example as a user runs it: real processes, and it learns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.examples.conftest import EXAMPLES

MEMBERS = ["ACTOR-0", "ACTOR-1", "CRITIC-0", "REFERENCE-0", "REWARD-0", "ROLLOUT-0", "ROLLOUT-1", "TRAINER-0"]


def processes_that_mention(text: str) -> list[str]:
    """Command lines and working directories of other processes."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            folder = os.readlink(entry / "cwd")
        except OSError:
            continue
        if text in line or text in folder:
            found.append(f"{entry.name}: {line} (in {folder})")
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1])
def test_reward_and_heldout_accuracy_rise(seed: int, tmp_path: Path) -> None:
    root = EXAMPLES.parent
    run_dir = tmp_path / "run"
    launch = [sys.executable, "-m", "rlmesh.cli.main", "launch", "--view", "plain", "--run-dir", str(run_dir)]
    done = subprocess.run(
        [*launch, str(EXAMPLES / "ppo" / "main.py"), "--", "--job_name", "learns", "--seed", str(seed)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (root, root / "launcher")))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stdout
    assert processes_that_mention(str(tmp_path)) == []
    print(done.stdout)  # shown when what follows fails

    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["seed"] == seed
    assert summary["reward_first"] <= 0.6 and summary["heldout_first"] <= 0.6, summary
    assert summary["reward_last"] >= 0.9 and summary["heldout_last"] >= 0.9, summary
    assert json.dumps(summary) in done.stdout

    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in steps if line["role"] == "TRAINER"]
    assert [line["step"] for line in trained] == list(range(1, summary["steps"] + 1))
    assert all(line["metrics"]["log_prob_gap"] < 1e-3 for line in trained)

    assert (run_dir / "report.png").read_bytes().startswith(b"\x89PNG")
    assert list((run_dir / "tensorboard").glob("**/events.out.tfevents.*"))
    assert sorted(path.stem for path in (run_dir / "logs").glob("*.log") if path.stem in MEMBERS) == MEMBERS
    last = run_dir / "checkpoints" / f"step-{summary['steps']:06d}"
    for name in ("actor.pt", "critic.pt"):
        assert torch.load(last / name, weights_only=True)["step"] == summary["steps"]
