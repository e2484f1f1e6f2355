"""The PPO example as a user runs it, in processes of its own, and what it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from transformers import AutoTokenizer, Qwen2ForCausalLM

from rlmesh.observe.files.metric_files import read_records
from tests.examples.conftest import EXAMPLES

MEMBERS = ["ACTOR-0", "ACTOR-1", "CRITIC-0", "REFERENCE-0", "REWARD-0", "ROLLOUT-0", "ROLLOUT-1", "TRAINER-0"]
Curve = list[dict[str, float]]


def left_behind(text: str, wait_s: float = 10.0) -> list[str]:
    """What is left of a job after some seconds, by a text in command lines or working directories.

    The resource tracker of ``multiprocessing`` ends by itself, once the driver that started it has ended.
    """
    deadline = time.monotonic() + wait_s
    while (left := processes_that_mention(text)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


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
        if line and (text in line or text in folder):  # a process that is about to end has no command line
            found.append(f"{entry.name}: {line} (in {folder})")
    return found


def sets(*settings: str) -> list[str]:
    """Options that change settings of the run."""
    return [word for setting in settings for word in ("--set", setting)]


def launch(tmp_path: Path, *options: str, timeout: float) -> tuple[str, Path, Curve]:
    """Run the job to its end; what it prints, its run directory and what it reported of each step."""
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
    assert left_behind(str(tmp_path)) == []
    return done.stdout, run_dir, curve_of(run_dir)


def curve_of(run_dir: Path) -> Curve:
    """The metrics of each step, from step 0 (before training) on. A validation in the background reports later."""
    of_step: dict[int, dict[str, float]] = {}
    for record in read_records(run_dir / "metrics.jsonl"):
        if record.role == "TRAINER":
            of_step.setdefault(record.step, {}).update(record.metrics)
    assert sorted(of_step) == list(range(len(of_step)))
    return [of_step[step] for step in sorted(of_step)]


def ends_of(curve: Curve) -> dict[str, float]:
    """Both ends of the sampled reward (means of five steps) and of the accuracy on held-out prompts."""
    rewards = [metrics["reward_mean"] for metrics in curve[1:]]
    heldout = [metrics["val/reward_mean"] for metrics in curve if "val/reward_mean" in metrics]
    return {
        "reward_first": mean(rewards[:5]),
        "reward_last": mean(rewards[-5:]),
        "heldout_first": heldout[0],
        "heldout_last": heldout[-1],
    }


def check_run_directory(run_dir: Path, curve: Curve, steps: int) -> None:
    assert len(curve) == steps + 1
    assert all(metrics["log_prob_gap"] < 1e-3 and metrics["drift_alarm"] == 0 for metrics in curve[1:])
    assert (run_dir / "report.png").read_bytes().startswith(b"\x89PNG")
    assert list((run_dir / "tensorboard").glob("**/events.out.tfevents.*"))
    assert sorted(path.stem for path in (run_dir / "logs").glob("*.log") if path.stem in MEMBERS) == MEMBERS
    last = run_dir / "checkpoints" / f"step-{steps:06d}"
    for name in ("actor", "critic"):
        assert json.loads((last / name / "current.json").read_text())["steps"] == 2 * steps
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == steps
    model = Qwen2ForCausalLM.from_pretrained(run_dir / "model")
    assert model.config.vocab_size == 46
    assert AutoTokenizer.from_pretrained(run_dir / "model")("a>")["input_ids"] == [2, 38]


SMALL: Sequence[str] = sets("batch_size=33", "actor.token_budget=60", "critic.token_budget=100")
"""A batch that both ranks divide unevenly, in several packs."""
