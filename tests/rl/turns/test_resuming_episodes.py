"""Runs with games and agents that go on from a checkpoint: no sample is lost, and none is trained twice."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlmesh.rl.checkpoints.store import saved_step
from rlmesh.rl.rollout.episodes import EpisodeSettings, TurnResult
from rlmesh.rl.rollout.episodes.deadlines import hanging_calls
from rlmesh.rl.rollout.ledger import LEDGER, faults_of, read_rows
from rlmesh.rl.samples.files import read_file, sample_files
from rlmesh.rl.trainers.settings import RolloutSettings
from tests.own_time import HANG_S
from tests.rl.turns.episode_runs import ROWS, Echo, asks, complete, faults, make, reported

ROOT = Path(__file__).resolve().parents[3]
EDGES = ((4,), (3,), (8,), (2, 5))
"""Steps after which the run stops and goes on; step 4 is the end of the first epoch, step 8 that of the run."""


def resumed(model: Path, run_dir: Path, kind: str, stops: tuple[int, ...], **changes: Any) -> str:
    for stop in stops:
        make(model, kind, **{**changes, "steps": stop, "data": make(model, kind, **changes).data}).here(run_dir=run_dir)
        assert saved_step(run_dir) == stop
    make(model, kind, **changes).here(run_dir=run_dir)
    return run_dir.name


@pytest.mark.case("O20")
@pytest.mark.parametrize("stops", [EDGES[3], *(pytest.param(one, marks=pytest.mark.slow) for one in EDGES[:3])])
def test_a_game_goes_on_at_any_edge(
    tiny: Path, tmp_path: Path, stops: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(tiny, "environment", batch_size=4)
    resumed(tiny, tmp_path / "run", "environment", stops, batch_size=4)
    assert faults(tmp_path / "run", run) == [] and sorted(reported(tmp_path / "run")) == list(range(1, 9))
    assert ("already complete: 8 steps are done" in capsys.readouterr().out) == (stops == (8,))
    assert all(report["episodes/turns"] == 2 for report in reported(tmp_path / "run").values())


@pytest.mark.slow
@pytest.mark.case("O20")
@pytest.mark.parametrize(("pipeline", "stops"), [("sync", EDGES[0]), ("one-step-off", EDGES[3])])
def test_an_agent_goes_on_at_any_edge(tiny: Path, tmp_path: Path, pipeline: str, stops: tuple[int, ...]) -> None:
    pytest.importorskip("uvicorn")
    resumed(tiny, tmp_path / "run", "agent", stops, pipeline=pipeline)
    assert faults(tmp_path / "run", make(tiny, "agent", pipeline=pipeline)) == []
    assert sorted(reported(tmp_path / "run")) == list(range(1, 9))


@pytest.mark.slow
@pytest.mark.case("O21")
@pytest.mark.timeout(300)
def test_games_and_agents_that_are_killed_while_they_save_go_on(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    words = [str(tmp_path), "--seed", "5", "--tries", "3", "--episodes"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.rl.checkpoints.kills", *words], cwd=ROOT, capture_output=True, text=True,
        timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines() if re.match("{", line)]
    assert done.returncode == 0 and lines[-1] == {"tries": 3, "differing": 0}, done.stdout + done.stderr


GOES_ON = threading.Event()


@pytest.fixture
def hanging() -> Iterator[None]:
    """Calls hang up to the end of the test."""
    GOES_ON.clear()
    yield
    GOES_ON.set()
    until = time.monotonic() + HANG_S
    while hanging_calls() and time.monotonic() < until:
        time.sleep(0.01)


class Sleeps(Echo):
    """Never answers the second turn of prompts that begin with c."""

    def reset(self, row: Mapping[str, Any]) -> None:
        super().reset(row)
        self.row = row

    def step(self, action: str) -> TurnResult:
        found = super().step(action)
        if self.turns == 2 and self.row["prompt"] == "c>":
            GOES_ON.wait(HANG_S)
        return found


def idles(base_url: str, api_key: str, row: Mapping[str, Any]) -> float:
    """Asks once, and then for nothing, with prompts that begin with c."""
    if row["prompt"] == "c>":
        complete(base_url, api_key, row["prompt"])
        GOES_ON.wait(HANG_S)
    return asks(base_url, api_key, row)


@pytest.mark.parametrize(
    ("kind", "given", "place"),
    [
        ("environment", {"environment": Sleeps}, r"turn 2 environment Sleeps: no answer in 0\.5 s"),
        ("agent", {"agent": idles}, r"turn 2 agent idles: no request in 0\.5 s"),
    ],
)
def test_a_partner_that_hangs_is_named_with_its_place(
    tiny: Path, tmp_path: Path, hanging: None, kind: str, given: dict[str, Any], place: str
) -> None:
    """The group without a reward is replaced, and its place is in the ledger."""
    if kind == "agent":
        pytest.importorskip("uvicorn")
    run = make(
        tiny, kind, **given, batch_size=4, steps=2, data=ROWS[:12],
        episode=EpisodeSettings(max_tokens=20, turn_timeout_s=0.5),
    )  # fmt: skip
    run.here(run_dir=tmp_path / "run")
    assert faults_of(tmp_path / "run" / LEDGER) == []
    (failed,) = [row for row in read_rows(tmp_path / "run" / LEDGER) if row.state == "failed"]
    assert run.data[failed.prompt]["prompt"] == "c>" and re.search(rf"episode \d+ {place}", failed.reason)
    assert len(reported(tmp_path / "run")) == 2


@pytest.mark.parametrize("kind", ["environment", "agent"])
@pytest.mark.parametrize("reason", ["length", "time"])
def test_the_limit_of_a_turn_is_in_the_sample(tiny: Path, tmp_path: Path, kind: str, reason: str) -> None:
    if kind == "agent":
        pytest.importorskip("uvicorn")
    limits = RolloutSettings(max_tokens=1) if reason == "length" else RolloutSettings(max_tokens=9, time_limit_s=1e-6)
    run = make(tiny, kind, batch_size=4, steps=1, data=[{"prompt": f"{one}>"} for one in "abcd"], rollout=limits)
    run.here(run_dir=tmp_path / "run")
    (file,) = sample_files(tmp_path / "run")
    samples = read_file(file)
    assert {one["finish_reason"] for one in samples} <= {reason, "stop"}
    assert sum(one["finish_reason"] == reason for one in samples) >= len(samples) // 2
    assert reported(tmp_path / "run")[1]["cut_off_share"] >= 0.5
