"""Trials, by Python and on the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlmesh import tune
from rlmesh.cli.main import main
from rlmesh.cli.trained.agents import checkpoint_in
from rlmesh.envs import PG, PPO, Algorithm, DQNConfig, PGConfig, PPOConfig, ResultDict
from rlmesh.errors import UsageError

SMALL: dict[str, Any] = {"env": "CartPole-v1", "train_batch_size": 64, "minibatch_size": 64, "num_epochs": 1, "seed": 0}


def test_a_trial_ends_at_its_criterion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = PPOConfig.from_dict(SMALL)
    trial = tune.run("PPO", config=config, stop={"training_iteration": 3}, storage_path=tmp_path, checkpoint_freq=2)
    assert trial.last_result["training_iteration"] == 3
    assert not trial.interrupted
    assert [line.partition(",")[0] for line in capsys.readouterr().out.splitlines()] == [
        "PPO 1: 64 steps", "PPO 2: 128 steps", "PPO 3: 192 steps",
    ]  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["timesteps_total"] for row in rows] == [64, 128, 192]
    assert "learners/default_policy/learner_stats/policy_loss" in rows[0]
    assert trial.checkpoint == str(tmp_path / "checkpoints" / "000002")
    again = tune.run(
        PPO, config=SMALL, stop=lambda result: result["timesteps_total"] >= 256, restore=trial.checkpoint, verbose=0
    )
    assert again.last_result["training_iteration"] == 4
    assert capsys.readouterr().out == ""


def test_a_nested_metric_ends_a_trial() -> None:
    trial = tune.run("PG", config={"env": "CartPole-v1"}, stop={"env_runners/episode_return_mean": 30}, verbose=0)
    assert trial.last_result["env_runners"]["episode_return_mean"] >= 30


def test_metrics_may_be_numbers_of_numpy_or_torch(tmp_path: Path) -> None:
    class Measures(PG):
        def training_step(self) -> ResultDict:
            super().training_step()
            count = self.iteration + 1
            return ResultDict(one=np.float32(count / 2), two=np.int64(count), three=torch.tensor(3.0))

    config = {"env": "CartPole-v1", "train_batch_size": 20}
    stop = {"learners/one": 1}
    trial = tune.run(Measures, config=config, stop=stop, metric="learners/two", storage_path=tmp_path, verbose=0)
    assert trial.last_result["training_iteration"] == 2
    row = json.loads((tmp_path / "results.jsonl").read_text().splitlines()[-1])
    assert [row[f"learners/{name}"] for name in ("one", "two", "three")] == [1.0, 2, 3.0]
    assert trial.best_trial.history == [(1, 1), (2, 2)]


def test_wrong_trials_are_refused() -> None:
    with pytest.raises(UsageError, match=r"no metric 'training_iterations'. Did you mean 'training_iteration'"):
        tune.run("PPO", config=SMALL, stop={"training_iterations": 1}, verbose=0)
    with pytest.raises(UsageError, match=r"'training_iteration' has a number, not '3'"):
        tune.run("PPO", config=SMALL, stop={"training_iteration": "3"})  # type: ignore[dict-item]
    with pytest.raises(UsageError, match="checkpoints need a storage_path"):
        tune.run("PPO", config=SMALL, checkpoint_freq=1)
    with pytest.raises(UsageError, match="DQNConfig is for DQN, not PPO"):
        tune.run("PPO", config=DQNConfig().environment("CartPole-v1"))
    with pytest.raises(UsageError, match=r"no algorithm 'PPPO'. Did you mean 'PPO'"):
        tune.run("PPPO", config=SMALL)


class Interrupting(Algorithm):
    """Presses Ctrl-C in its third step."""

    @classmethod
    def get_default_config(cls) -> Any:
        return PGConfig(cls)

    def training_step(self) -> Any:
        if self.iteration == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return super().training_step()


def test_a_trial_without_a_criterion_runs_until_it_is_interrupted(tmp_path: Path) -> None:
    assert threading.current_thread() is threading.main_thread()
    config = PGConfig(Interrupting).environment("CartPole-v1").training(train_batch_size=32)
    trial = tune.run(Interrupting, config=config, storage_path=tmp_path, checkpoint_at_end=True, verbose=0)
    assert trial.interrupted
    assert trial.last_result["training_iteration"] == 2
    assert trial.checkpoint is not None
    with Algorithm.from_checkpoint(trial.checkpoint) as algorithm:
        assert algorithm.iteration == 2


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = json.dumps({name: value for name, value in SMALL.items() if name != "env"})
    command = ["train", "--run", "PPO", "--env", "CartPole-v1", "--config", settings, "--run-dir", str(tmp_path)]
    assert main([*command, "--stop", '{"training_iteration": 2}']) == 0
    assert capsys.readouterr().out.startswith("PPO 1: 64 steps")
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 2
    for wrong, says in (
        (["--run", "PPPO"], "Did you mean 'PPO'"),
        (["--run", "PPO"], "environment(…): name an environment"),
        (["--run", "PPO", "--env", "CartPole-v1", "--config", "{"], "--config {: not JSON"),
        (["--run", "PPO", "--env", "CartPole-v1", "--config", "[1]"], "a JSON object"),
        (["--run", "PPO", "--env", "CartPole-v1", "--config", '{"gama": 1}'], "Did you mean 'gamma'"),
        (["--run", "PPO", "--env", "CartPole-v1", "--name", "x"], "--name: for language models"),
        (["--run", "PPO", "--env", "CartPole-v1", "--set", "gama=1"], "Did you mean 'gamma'"),
        (["--run", "PPO", "--env", "CartPole-v1", "--set", "lr"], "--set lr: no setting; write --set KEY=VALUE"),
        (
            ["--run", "PPO", "--env", "CartPole-v1", "--set", "lr=1", "--set", "lr.x=1"],
            "lr is 1, which has no settings",
        ),
        (
            ["--run", "PPO", "--env", "CartPole-v1", "--set", "model.fcnet_hiddens=64 64"],
            "such as [64, 64], not '64 64'",
        ),
        (["--env", "CartPole-v1"], "name an algorithm by --run"),
    ):
        assert main(["train", *wrong]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize("widths", ["8,4", "(8, 4)", "[8, 4]", "[8,4,]", " 8 , 4 "])
def test_single_settings_on_the_command_line(widths: str, tmp_path: Path) -> None:
    settings = json.dumps({**SMALL, "model": {"fcnet_activation": "relu"}})
    command = ["train", "--run", "PPO", "--config", settings, "--run-dir", str(tmp_path), "--checkpoint-at-end"]
    command += ["--set", f"model.fcnet_hiddens={widths}", "--set", "grad_clip=None", "--set", "train_batch_size=1_00"]
    assert main([*command, "--stop", '{"training_iteration": 1}']) == 0
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    with Algorithm.from_checkpoint(checkpoint) as algorithm:
        assert algorithm.config["model"] == {"fcnet_activation": "relu", "fcnet_hiddens": [8, 4]}
        assert (algorithm.config["grad_clip"], algorithm.config["train_batch_size"]) == (None, 100)


@pytest.mark.slow
def test_the_command_runs_until_it_is_interrupted() -> None:
    command = [sys.executable, "-m", "rlmesh.cli.main", "train", "--run=PPO", "--env=CartPole-v1", "--config={}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("PPO 1: 4000 steps")
        process.send_signal(signal.SIGINT)
        assert process.wait(100) == 130


def test_trainings_do_not_mix_in_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The results and checkpoints of an earlier training pass for those of the later one."""
    given: dict[str, Any] = {"config": SMALL, "storage_path": tmp_path, "checkpoint_freq": 1, "verbose": 0}
    tune.run("PPO", stop={"training_iteration": 4}, **given)
    with pytest.raises(UsageError, match="has a training: go on with it by restore=CHECKPOINT"):
        tune.run("PPO", stop={"training_iteration": 2}, **given)
    checkpoint = tmp_path / "checkpoints" / "000001"
    with pytest.raises(UsageError, match="has a training"):
        tune.run("PPO", restore=tmp_path / "elsewhere", **given)
    tune.run("PPO", stop={"training_iteration": 2}, restore=checkpoint, **given)
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["training_iteration"] for row in rows] == [1, 2]
    assert checkpoint_in(tmp_path) == tmp_path / "checkpoints" / "000002"
