"""A run with a reward model: its scores are the model's, also when a member of the role dies."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlmesh.errors import UsageError
from rlmesh.rl.algorithms import GRPO
from rlmesh.rl.rewards import Reward, RewardModel, Score
from rlmesh.rl.rewards.model import Conversation
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import RolloutSettings
from tests.rl import reward_model_job
from tests.rl.run_job import ROWS, is_a
from tests.rl.tiny import make_config, make_reward_model, make_tokenizer

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("policy")
    make_tokenizer(folder)
    torch.manual_seed(0)
    Qwen2ForCausalLM(make_config()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("scorer"), seed=3)


def run_of(policy: Path, *rewards: RewardModel) -> Run:
    return Run(
        model=str(policy), data=ROWS, rewards=[*rewards, is_a], algorithm=GRPO(samples=4), batch_size=8, steps=2,
        rollout=RolloutSettings(max_tokens=4),
    )  # fmt: skip


def test_each_model_is_a_role(policy: Path, scorer: Path) -> None:
    run = run_of(policy, RewardModel(str(scorer), members=2), RewardModel(str(scorer), name="safe"))
    run.check()
    totals = {name: getattr(one, "total", None) for name, one in run.job().workloads.items()}
    assert totals == {"TRAINER": 1, "ACTOR": 1, "ROLLOUT": 1, "REWARD": 2, "REWARD_SAFE": 1}


def test_a_model_that_is_none_is_refused_before_the_start(policy: Path, scorer: Path) -> None:
    with pytest.raises(
        UsageError, match=r"the run cannot start:\n  reward model 'reward_model': .* has no trained head"
    ):
        run_of(policy, RewardModel(str(policy))).submit()
    with pytest.raises(UsageError, match="are named 'reward_model'"):
        run_of(policy, RewardModel(str(scorer)), RewardModel(str(scorer))).check()


def test_a_configuration_names_reward_models_and_mixtures(policy: Path, scorer: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    config = {
        "model": str(policy), "data": {str(tmp_path / "a.jsonl"): 1, str(tmp_path / "b.jsonl"): 3}, "batch_size": 8,
        "rewards": [{"model": str(scorer), "weight": 0.5, "members": 2}, "code"],
        "algorithm": {"name": "grpo", "samples": 4},
    }  # fmt: skip
    run = Run.from_config(config)
    assert run.rewards[0] == RewardModel(str(scorer), weight=0.5, members=2)
    assert [one.name for one in run.scored] == ["reward_model", "code"]
    assert len(run.dataset(run.tokenizer())) == round(len(ROWS) / 3) + len(ROWS)
    # A validation takes all prompts of all files, as `rlmesh evaluate` does: weights are for training.
    held_out = run.dataset(run.tokenizer(), run.data)
    assert len(held_out) == 2 * len(ROWS) == len({held_out[place].index for place in range(len(held_out))})
    with pytest.raises(UsageError, match=r"rewards\[0\]\.wieght.*did you mean rewards\[0\]\.weight"):
        Run.from_config(config | {"rewards": [{"model": str(scorer), "wieght": 1}]})


def test_rows_that_no_reward_is_for_are_told_before_the_start(policy: Path) -> None:
    one_name: Any = "mine"
    run = Run(
        model=str(policy), data=[{**row, "data_source": "other"} for row in ROWS],
        rewards=[Reward(is_a, sources=one_name)], algorithm=GRPO(samples=4), batch_size=8,
    )  # fmt: skip
    with pytest.raises(UsageError, match="no reward is for data_source other; the rewards are for mine"):
        run.check()


@pytest.mark.parametrize("placement", ["separate", "shared"])
def test_the_role_is_part_of_the_placement(policy: Path, scorer: Path, placement: Any) -> None:
    run = replace(run_of(policy, RewardModel(str(scorer))), placement=placement)
    assert "REWARD" in run.job().workloads
    assert replace(run, placement="auto", devices_per_node=2).placed == "shared"
    assert replace(run, placement="auto", devices_per_node=3).placed == "separate"


def test_a_reward_model_scores_in_a_run_in_one_process(policy: Path, scorer: Path, tmp_path: Path) -> None:
    run = replace(run_of(policy, RewardModel(str(scorer))), rollout=RolloutSettings(max_tokens=4))
    result = run.here(run_dir=tmp_path / "here")
    assert result.metrics["reward/reward_model/failed"] == 0
    assert math.isfinite(result.metrics["reward/reward_model"])


def launched(
    folder: Path, policy: Path, scorer: Path, *options: str, placement: str = "separate"
) -> dict[int, dict[str, float]]:
    folder.mkdir()
    command = [sys.executable, "-m", "rlmesh.cli.main", "launch", "--view", "plain", "--run-dir", "run", *options]
    done = subprocess.run(
        [*command, reward_model_job.__file__, str(policy), str(scorer), placement], cwd=folder, capture_output=True,
        text=True, timeout=220, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line.get("metrics", line) for line in lines}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_rewards_of_a_run_are_the_models(policy: Path, scorer: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rlmesh.rl.roles.reward import ModelScorer

    calm = launched(tmp_path / "calm", policy, scorer)
    shared = launched(tmp_path / "shared", policy, scorer, placement="shared")
    assert {step: shared[step]["reward_mean"] for step in range(1, 6)} == pytest.approx(
        {step: calm[step]["reward_mean"] for step in range(1, 6)}, abs=1e-6
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "calm" / "run" / "model")
    tokenizer = AutoTokenizer.from_pretrained(policy)
    greedy = []
    for row in ROWS[:6]:
        ids = tokenizer(row["prompt"], return_tensors="pt").input_ids
        made = model.generate(ids, max_new_tokens=4, do_sample=False)[0]
        text = tokenizer.decode(made[ids.shape[1] :], skip_special_tokens=True)
        assert isinstance(text, str)
        greedy.append(Conversation(made.numpy(), row["prompt"], text, bool(made[-1] == 1), 1))
    outcomes = ModelScorer(RewardModel(str(scorer))).score(greedy)
    values = [outcome.value for outcome in outcomes if isinstance(outcome, Score)]
    assert len(values) == 6
    assert calm[5]["val/reward/reward_model"] == pytest.approx(sum(values) / 6, abs=1e-4)
    assert all(calm[step]["reward/reward_model/failed"] == 0 for step in range(1, 6))
    # A member that dies while the run goes on costs no sample and changes no number.
    killed = launched(tmp_path / "killed", policy, scorer, "--chaos", "REWARD:0@step=2")
    assert {step: killed[step]["reward_mean"] for step in range(1, 6)} == pytest.approx(
        {step: calm[step]["reward_mean"] for step in range(1, 6)}, abs=1e-6
    )
