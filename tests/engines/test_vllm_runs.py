"""Asynchronous trainings with vLLM: responses go on across pushes, and an engine that loses its process comes back."""

from __future__ import annotations

import json
import os
import secrets
import signal
import threading
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from rlmesh.rl.algorithms import GRPO
from rlmesh.rl.rewards import Reward, Score
from rlmesh.rl.rollout.ledger import LEDGER, faults_of, read_rows
from rlmesh.rl.samples.files import read_file, sample_files
from rlmesh.rl.trainers.progress import Progress
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import ActorSettings, RolloutSettings
from tests.engines.test_rollout_engines import with_vllm
from tests.rl.conftest import make_tiny
from tests.rl.rollout.kills import MARK, members

STEPS, BATCH = 12, 4
LIMIT_S = 500.0
ROWS = [{"prompt": "abcd"[place % 4] * (1 + place // 4) + ">"} for place in range(16)]
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4, "max_position_embeddings": 512}


def letters(response: str) -> Score:
    return Score(response.count("a") / 160)


def kill_process_of_vllm(run_dir: Path, mark: str, killed: list[int]) -> None:
    """Kill the process of an engine once the run has made two steps."""
    until = time.monotonic() + LIMIT_S
    while Progress.read(run_dir).step < 2 if run_dir.exists() else True:
        if time.monotonic() > until:
            return
        time.sleep(0.05)
    parents = {pid for pid, _ in members(mark, ("ROLLOUT",))}
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) in parents and pid not in parents:
                found.append((int(fields[21]), pid))
    if found:  # the largest child of the member is vLLM's process
        killed.append(max(found)[1])
        os.kill(killed[0], signal.SIGKILL)


@with_vllm
@pytest.mark.timeout(600)
def test_an_asynchronous_run_with_an_engine_that_loses_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mark = secrets.token_hex(8)
    monkeypatch.setenv(MARK, mark)
    (tmp_path / "model").mkdir()
    make_tiny(tmp_path / "model", **SIZES)
    for name in ("config.json", "generation_config.json"):  # without an end token, responses have all their tokens
        path = tmp_path / "model" / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": None}))
    options = {"max_num_seqs": 64, "kv_cache_memory_bytes": 64 << 20}
    run = Run(
        model=str(tmp_path / "model"), data=ROWS, rewards=[Reward(letters, inline=True)], steps=STEPS, save_every=50,
        algorithm=GRPO(samples=2, correction="token"), batch_size=BATCH, pipeline="async(staleness=2)",
        max_prompt_tokens=16, actor=ActorSettings(lr=1e-3),
        rollout=RolloutSettings("vllm-async", max_tokens=160, in_flight=6, options=options),
    )  # fmt: skip
    killed: list[int] = []
    killer = threading.Thread(target=kill_process_of_vllm, args=(tmp_path / "run", mark, killed))
    killer.start()
    try:
        run.submit("vllm", view="plain", run_dir=tmp_path / "run")
    finally:
        killer.join()
    assert killed, "no process was found to kill"
    assert faults_of(tmp_path / "run" / LEDGER) == []
    rows = list(read_rows(tmp_path / "run" / LEDGER))
    assert [row.state for row in rows if row.state not in ("trained", "drawn", "sampling", "sampled")] == []
    assert any(row.deaths for row in rows), "groups were sampled again"
    lines = [json.loads(line)["metrics"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "buffer/asked_again" in line]
    assert len(steps) == STEPS and sum(step["buffer/asked_again"] for step in steps) > 0
    assert all(step["buffer/staleness_max"] <= 2 and step["drift_alarm"] == 0 for step in steps)
    assert any(step["buffer/mixed_versions"] for step in steps), "no response went on across a push"
    spans = [json.loads(one["versions"]) for file in sample_files(tmp_path / "run") for one in read_file(file)]
    mixed = [one for one in spans if len(one) > 1]
    pairs = [pair for one in mixed for pair in pairwise(one)]
    assert pairs and all(before[0] < after[0] and before[2] == after[1] for before, after in pairs)
