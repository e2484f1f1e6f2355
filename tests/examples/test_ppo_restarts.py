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
from tests.examples.ppo_runs import SMALL, Curve, curve_of, ends_of, left_behind, sets
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


def run_and_kill(tmp_path: Path, kills: list[tuple[int, str]], *options: str) -> tuple[Curve, list[str]]:
    """Run the job and kill members once a step has been reported; its curve, and whose process changed in all."""
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
    assert left_behind(str(tmp_path)) == []
    return curve_of(run_dir), sorted(name for name in first if first[name] != last.get(name))


@pytest.mark.slow
def test_a_small_job_survives_each_kind_of_death(tiny: Path, tmp_path: Path) -> None:
    kills = [
        (1, "ROLLOUT:1"), (2, "REWARD:0"), (3, "ACTOR:1"), (5, "CRITIC:0"), (6, "REFERENCE:0"), (7, "TRAINER:0"),
    ]  # fmt: skip
    options = ["--pretrain", str(tiny), "--steps", "10", *SMALL, *sets("save_every=2")]
    curve, changed = run_and_kill(tmp_path, kills, *options)
    assert len(curve) == 11
    assert changed == ["ACTOR:0", "ACTOR:1", "CRITIC:0", "REFERENCE:0", "REWARD:0", "ROLLOUT:1", "TRAINER:0"]
    # The actor, the critic, and perhaps the trainer, which may die while a step is under way.
    # A death right after a step that is saved may come before its checkpoint is complete.
    assert 0 <= curve[-1]["steps_lost"] <= 8, "each loses at most the steps since a complete checkpoint"


def trained_by(run_dir: Path) -> tuple[dict[str, Any], Curve]:
    """The weights that a run ended with, and the last that it reported of each of its steps."""
    return Qwen2ForCausalLM.from_pretrained(run_dir / "model").state_dict(), curve_of(run_dir)


@pytest.mark.slow
@pytest.mark.case("n02")
@pytest.mark.timeout(600)
def test_a_killed_actor_costs_the_steps_since_the_last_checkpoint_and_nothing_else(tiny: Path, tmp_path: Path) -> None:
    """It ends with the weights that it has without a kill, and says how many steps were made twice."""
    plain, killed = tmp_path / "plain", tmp_path / "killed"
    for folder, kills in ((plain, []), (killed, [(2, "ACTOR:0"), (6, "ACTOR:1")])):
        folder.mkdir()
        options = ["--pretrain", str(tiny), "--steps", "8", *SMALL, *sets("save_every=4")]
        lost = run_and_kill(folder, kills, *options)[0][-1]["steps_lost"]
        assert lost == 0 if not kills else 2 <= lost <= 6, lost
    weights, curve = trained_by(plain / "run")
    again, repeated = trained_by(killed / "run")
    for name, tensor in weights.items():
        torch.testing.assert_close(again[name], tensor, atol=1e-4, rtol=1e-3)
    assert len(curve) == len(repeated) == 9
    for step, (once, twice) in enumerate(zip(curve[1:], repeated[1:], strict=True), 1):
        assert twice["reward_mean"] == pytest.approx(once["reward_mean"], abs=1e-6), step
        assert twice["policy_loss"] == pytest.approx(once["policy_loss"], abs=1e-3), step
        assert once["steps_lost"] == 0
    counts = [metrics["steps_lost"] for metrics in repeated[1:]]
    assert counts == sorted(counts) and counts[-1] == lost, counts


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(600)
def test_ppo_learns_as_much_although_members_are_killed(tiny: Path, tmp_path: Path) -> None:
    kills = [(5, "ROLLOUT:0"), (10, "REWARD:0"), (15, "ACTOR:1")]
    curve, changed = run_and_kill(tmp_path, kills, "--pretrain", str(tiny))
    assert changed == ["ACTOR:0", "ACTOR:1", "REWARD:0", "ROLLOUT:0"], "all others are the processes that they were"
    assert len(curve) == 151
    ends = ends_of(curve)
    assert ends["reward_first"] <= 0.6 and ends["heldout_first"] <= 0.6, ends
    assert ends["reward_last"] >= 0.94 and ends["heldout_last"] >= 0.94, ends
