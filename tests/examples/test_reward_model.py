"""The example that trains a reward model: it learns, on one rank as on two, and the role scores with its result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rlmesh.rl.data.files import read_rows
from rlmesh.rl.rewards import RewardModel, Score
from rlmesh.rl.rewards.model import Conversation
from tests.examples.conftest import EXAMPLES

pytest.importorskip("transformers")

FOLDER = EXAMPLES / "reward_model"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from reward_model import pairs

    folder = tmp_path_factory.mktemp("example") / "tiny"
    pairs.main(folder)
    return folder


def test_batches_are_split_without_loss() -> None:
    from reward_model.main import Pairs

    whole = Pairs([[i] for i in range(7)], [[-i] for i in range(7)])
    parts = whole.split(3)
    assert [row for part in parts for row in part.chosen] == whole.chosen
    assert [row for part in parts for row in part.rejected] == whole.rejected
    assert [len(part) for part in parts] == [2, 2, 3] and len(whole.split(9)) == 9


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--steps", "0"], "steps: must be > 0"), (["--lr", "-1"], "lr: must be > 0"), ([], "has no config.json")],
)
def test_wrong_settings_are_told(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from reward_model.main import settings_of

    with pytest.raises(SystemExit):
        settings_of([str(tmp_path), *words])
    assert said in capsys.readouterr().err


def trained(tiny: Path, folder: Path, *words: str) -> dict[int, dict[str, float]]:
    """The reports of a training, by step."""
    folder.mkdir()
    command = [sys.executable, "-m", "rlmesh.cli.main", "launch", "--view", "plain", "--run-dir", "run"]
    done = subprocess.run(
        [*command, str(FOLDER / "main.py"), "--", str(tiny), "--lr", "2e-3", *words], cwd=folder, capture_output=True,
        text=True, timeout=200, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line.get("metrics", line) for line in lines}


@pytest.mark.slow
def test_it_learns_and_its_result_is_a_reward_model(tiny: Path, tmp_path: Path) -> None:
    from rlmesh.rl.roles.reward import ModelScorer

    alone = trained(tiny, tmp_path / "alone", "--steps", "3")
    steps = trained(tiny, tmp_path / "two", "--steps", "60", "--ranks", "2")
    assert steps[1]["accuracy"] < 0.75 and steps[1]["loss"] > 0.6
    assert steps[60]["held_out_accuracy"] >= 0.95
    # The loss does not depend on the number of ranks.
    assert [steps[i]["loss"] for i in (1, 2, 3)] == pytest.approx([alone[i]["loss"] for i in (1, 2, 3)], abs=1e-4)

    scorer = ModelScorer(RewardModel(str(tiny / "reward")))
    rows = read_rows(tiny / "validation.jsonl")
    chosen, rejected = (
        scorer.score([Conversation(np.zeros(0, np.int32), row["prompt"], row[side], True, 1) for row in rows])
        for side in ("chosen", "rejected")
    )
    right = [
        better.value > worse.value
        for better, worse in zip(chosen, rejected, strict=True)
        if isinstance(better, Score) and isinstance(worse, Score)
    ]
    assert len(right) == len(rows) and np.mean(right) == pytest.approx(steps[60]["held_out_accuracy"], abs=1e-9)
