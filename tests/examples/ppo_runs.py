"""The PPO example as a user runs it, in processes of its own, and what it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from transformers import Qwen2ForCausalLM

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


def launch(tmp_path: Path, *options: str, timeout: float) -> tuple[str, Path, dict[str, float]]:
    """Run the job to its end; what it prints, its run directory and its summary."""
    root, run_dir = EXAMPLES.parent, tmp_path / "run"
    command = [sys.executable, "-m", "rlmesh.cli.main", "launch", "--view", "plain", "--run-dir", str(run_dir)]
    done = subprocess.run(
        [*command, str(EXAMPLES / "ppo" / "main.py"), "--", *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (root, root / "launcher")))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    print(done.stdout)  # shown when a test fails
    assert done.returncode == 0
    assert processes_that_mention(str(tmp_path)) == []
    return done.stdout, run_dir, json.loads((run_dir / "summary.json").read_text())


def check_run_directory(run_dir: Path, summary: dict[str, float]) -> None:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["role"] == "TRAINER"]
    assert [line["step"] for line in trained] == list(range(int(summary["steps"]) + 1))
    assert all(line["metrics"]["log_prob_gap"] < 1e-3 for line in trained[1:])
    assert (run_dir / "report.png").read_bytes().startswith(b"\x89PNG")
    assert list((run_dir / "tensorboard").glob("**/events.out.tfevents.*"))
    assert sorted(path.stem for path in (run_dir / "logs").glob("*.log") if path.stem in MEMBERS) == MEMBERS
    last = run_dir / "checkpoints" / f"step-{int(summary['steps']):06d}"
    for name in ("actor", "critic"):
        assert json.loads((last / name / "current.json").read_text())["steps"] == 2 * summary["steps"]
    model = Qwen2ForCausalLM.from_pretrained(run_dir / "trained")
    assert model.config.vocab_size == 46
