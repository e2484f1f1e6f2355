"""The PPO example while its members are killed: it ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2ForCausalLM

from tests.examples.conftest import EXAMPLES
from tests.examples.ppo_runs import processes_that_mention
from tests.master.launched import descendants

LIMIT_S = 540.0


def members(root: int) -> dict[str, int]:
    """Process numbers by member name."""
    found = {}
    for pid in descendants(root):
        try:
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if name.partition(":")[2].isdigit() and state != "Z":
            found[name] = pid
    return found


def last_step(run_dir: Path) -> int:
    try:
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        steps = [record["step"] for record in map(json.loads, lines) if record["role"] == "TRAINER"]
    except (OSError, ValueError):
        return -1
    return int(steps[-1]) if steps else -1


def run_and_kill(tmp_path: Path, kills: list[tuple[int, str]], *options: str) -> tuple[dict[str, float], list[str]]:
    """Run the job and kill members once a step has been reported; the summary, and whose process changed in all."""
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "rlmesh.cli.main", "launch", "--view", "plain", "--run-dir", str(run_dir)]
    root = EXAMPLES.parent
    log = tmp_path / "output"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, str(EXAMPLES / "ppo" / "main.py"), "--", "--job_name", "restarts", *options],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": f"{root}:{root / 'launcher'}"},
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + LIMIT_S
        pending = list(kills)
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        while process.poll() is None and time.monotonic() < deadline:
            step = last_step(run_dir)
            seen = members(process.pid)
            if step >= 0 and not first:
                first = seen
            if len(seen) == len(first):
                last = seen
            if pending and step >= pending[0][0]:
                os.kill(seen[pending.pop(0)[1]], signal.SIGKILL)
            time.sleep(0.05)
        code = process.wait(max(1.0, deadline - time.monotonic()))
    finally:
        process.kill()
        process.wait()
    print(log.read_text())  # shown when a test fails
    assert code == 0 and not pending
    assert processes_that_mention(str(tmp_path)) == []
    summary = json.loads((run_dir / "summary.json").read_text())
    return summary, sorted(name for name in first if first[name] != last.get(name))


SMALL = ["--steps", "8", "--batch_size", "33", "--warmup_accuracy", "0", "--micro_batch_size", "10"]


def test_a_small_job_survives_each_kind_of_death(tmp_path: Path) -> None:
    kills = [(1, "ROLLOUT:1"), (2, "REWARD:0"), (3, "ACTOR:1"), (5, "CRITIC:0"), (6, "REFERENCE:0")]
    summary, changed = run_and_kill(tmp_path, kills, *SMALL, "--save_every", "2")
    assert summary["steps"] == 8
    assert changed == ["ACTOR:0", "ACTOR:1", "CRITIC:0", "REFERENCE:0", "REWARD:0", "ROLLOUT:1"]
    assert 0 <= summary["steps_lost"] <= 2, "the actor and the critic lost at most one step each"


def trained_by(run_dir: Path) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """The weights that a run ended with, and the last that it reported of each of its steps."""
    model = Qwen2ForCausalLM.from_pretrained(run_dir / "trained")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    of_step = {line["step"]: line["metrics"] for line in lines if line["role"] == "TRAINER"}
    return model.state_dict(), [of_step[step] for step in sorted(of_step)]


@pytest.mark.slow
@pytest.mark.case("n02")
@pytest.mark.timeout(600)
def test_a_killed_actor_costs_the_steps_since_the_last_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    """It ends with the weights that it has without a kill, and says how many steps were made twice."""
    plain, killed = tmp_path / "plain", tmp_path / "killed"
    for folder, kills in ((plain, []), (killed, [(2, "ACTOR:0"), (6, "ACTOR:1")])):
        folder.mkdir()
        summary, _ = run_and_kill(folder, kills, *SMALL, "--save_every", "4")
        assert summary["steps"] == 8
        assert summary["steps_lost"] == 0 if not kills else 2 <= summary["steps_lost"] <= 6, summary
    weights, curve = trained_by(plain / "run")
    again, repeated = trained_by(killed / "run")
    for name, tensor in weights.items():
        torch.testing.assert_close(again[name], tensor, atol=1e-4, rtol=1e-3)
    assert len(curve) == len(repeated) == 9
    for step, (once, twice) in enumerate(zip(curve[1:], repeated[1:], strict=True), 1):
        assert twice["reward_mean"] == pytest.approx(once["reward_mean"], abs=1e-6), step
        assert twice["policy_loss"] == pytest.approx(once["policy_loss"], abs=1e-3), step
        assert once["steps_lost"] == 0
    lost = [metrics["steps_lost"] for metrics in repeated[1:]]
    assert lost == sorted(lost) and lost[-1] == summary["steps_lost"], lost


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(600)
def test_ppo_learns_as_much_although_members_are_killed(tmp_path: Path) -> None:
    summary, changed = run_and_kill(tmp_path, [(5, "ROLLOUT:0"), (10, "REWARD:0"), (15, "ACTOR:1")])
    assert changed == ["ACTOR:0", "ACTOR:1", "REWARD:0", "ROLLOUT:0"], "all others are the processes that they were"
    assert summary["steps"] == 150
    assert summary["reward_first"] <= 0.6 and summary["heldout_first"] <= 0.6, summary
    assert summary["reward_last"] >= 0.94 and summary["heldout_last"] >= 0.94, summary
