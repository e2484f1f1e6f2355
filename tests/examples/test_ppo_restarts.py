"""The PPO example while its members are killed: it ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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


def test_a_small_job_survives_each_kind_of_death(tmp_path: Path) -> None:
    kills = [(1, "ROLLOUT:1"), (2, "REWARD:0"), (3, "ACTOR:1"), (5, "CRITIC:0"), (6, "REFERENCE:0")]
    small = ["--steps", "8", "--batch_size", "33", "--warmup_accuracy", "0", "--micro_batch_size", "10"]
    summary, changed = run_and_kill(tmp_path, kills, *small, "--save_every", "2")
    assert summary["steps"] == 8
    assert changed == ["ACTOR:0", "ACTOR:1", "CRITIC:0", "REFERENCE:0", "REWARD:0", "ROLLOUT:1"]


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(600)
def test_it_learns_as_much_although_members_are_killed(tmp_path: Path) -> None:
    summary, changed = run_and_kill(tmp_path, [(5, "ROLLOUT:0"), (10, "REWARD:0"), (15, "ACTOR:1")])
    assert changed == ["ACTOR:0", "ACTOR:1", "REWARD:0", "ROLLOUT:0"], "all others are the processes that they were"
    assert summary["steps"] == 150
    assert summary["reward_first"] <= 0.6 and summary["heldout_first"] <= 0.6, summary
    assert summary["reward_last"] >= 0.94 and summary["heldout_last"] >= 0.94, summary
