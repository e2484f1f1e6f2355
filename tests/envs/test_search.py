"""Searches: spaces, several trials at once, studies of Optuna, failures, and going on."""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlmesh import tune
from rlmesh.cli.main import main
from rlmesh.envs import PG, Algorithm, PGConfig, PPOConfig, ResultDict
from rlmesh.errors import UsageError
from rlmesh.tune import space as spaces

from ..own_time import HANG_S

SMALL: dict[str, Any] = {"env": "CartPole-v1", "train_batch_size": 100, "seed": 0}
TWO = {"training_iteration": 2}


def draws(domain: Any, number: int = 2000) -> list[Any]:
    rng = random.Random(0)
    return [domain.sample(rng) for _ in range(number)]


def test_domains_have_the_bounds_of_ray() -> None:
    assert set(draws(tune.randint(-2, 3))) == {-2, -1, 0, 1, 2}
    assert set(draws(tune.qrandint(-4, 4, 2))) == {-4, -2, 0, 2, 4}
    assert set(draws(tune.lograndint(1, 5))) == {1, 2, 3, 4}
    assert set(draws(tune.qlograndint(2, 8, 2))) == {2, 4, 6, 8}
    assert set(draws(tune.choice(["a", "b"]))) == {"a", "b"}
    assert set(draws(tune.quniform(0.2, 0.8, 0.2))) == {0.2, 0.4, 0.6, 0.8}
    assert all(0.5 <= value <= 2 for value in draws(tune.uniform(0.5, 2)))
    logs = [math.log10(value) for value in draws(tune.loguniform(1e-4, 1e-2))]
    assert -4 <= min(logs) <= max(logs) <= -2
    assert abs(sum(logs) / len(logs) + 3) < 0.05
    steps = [value / 5e-3 for value in draws(tune.qloguniform(5e-3, 1e-1, 5e-3))]
    assert all(abs(step - round(step)) < 1e-6 for step in steps)
    assert (round(min(steps)), round(max(steps))) == (1, 20)
    normal = draws(tune.randn(10, 2))
    assert abs(sum(normal) / len(normal) - 10) < 0.2
    assert all(value % 3 == 0 for value in draws(tune.qrandn(0, 10, 3)))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: tune.uniform(2, 1), "must be below"),
        (lambda: tune.loguniform(0, 1), "bounds above 0"),
        (lambda: tune.quniform(0.1, 1, 0.3), "0.1 is no multiple of 0.3"),
        (lambda: tune.randint(0.5, 3), "whole numbers"),  # type: ignore[arg-type]
        (lambda: tune.choice([]), "at least one value"),
        (lambda: tune.grid_search("abc"), "at least one value"),
        (lambda: tune.qrandint(1, 3, 5), "no multiple of 5"),
        (lambda: tune.sample_from(3), "a function"),  # type: ignore[arg-type]
    ],
)
def test_wrong_domains_are_refused(make: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make()


def test_grids_are_combined_and_filled_into_nested_settings() -> None:
    settings = {"lr": tune.grid_search([1, 2]), "model": {"widths": (tune.choice([8, 16]), 4)}, "gamma": 0.9}
    settings["both"] = tune.sample_from(lambda spec: spec.config.lr * 10)
    space = spaces.find(settings)
    assert [spaces.named(path) for path in space] == ["lr", "model/widths/0", "both"]
    found = [spaces.fill(settings, chosen) for chosen in spaces.variants(space, 2, seed=1)]
    assert [each["lr"] for each in found] == [1, 2, 1, 2]
    assert [each["both"] for each in found] == [10, 20, 10, 20]
    assert all(each["model"]["widths"][0] in (8, 16) and each["model"]["widths"][1] == 4 for each in found)
    assert found == [spaces.fill(settings, chosen) for chosen in spaces.variants(space, 2, seed=1)]
    longer = list(spaces.variants(space, 3, seed=1))
    assert longer[:4] == list(spaces.variants(space, 2, seed=1))


def test_a_search_in_this_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = PGConfig.from_dict(SMALL).training(lr=tune.grid_search([1e-3, 1e-2]))
    found = tune.run(
        "PG", config=config, stop=TWO, max_concurrent_trials=1, storage_path=tmp_path / "runs", checkpoint_at_end=True
    )
    assert [trial.config for trial in found.trials] == [{"lr": 1e-3}, {"lr": 1e-2}]
    assert [trial.status for trial in found.trials] == ["TERMINATED", "TERMINATED"]
    assert found.best_config in ({"lr": 1e-3}, {"lr": 1e-2})
    scores = [row[found.metric] for row in found.rows()]
    assert found.best_result["env_runners"]["episode_return_mean"] == max(scores)
    assert found.best_checkpoint is not None
    with Algorithm.from_checkpoint(found.best_checkpoint) as algorithm:
        assert algorithm.config["lr"] == found.best_config["lr"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("00000 (lr=0.001)  PG 1: 104 steps")
    assert "\x1b" not in "".join(lines)
    assert lines[-3].split()[:3] == ["trial", "status", "lr"]
    for name in ("00000", "00001"):
        folder = tmp_path / "runs" / "trials" / name
        assert len((folder / "results.jsonl").read_text().splitlines()) == 2
        assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"
        assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    assert (tmp_path / "runs" / "curves.png").exists()
    with pytest.raises(UsageError, match="has a search: go on with it by resume=True"):
        tune.run("PG", config=config, stop=TWO, storage_path=tmp_path / "runs")
    assert main(["evaluate", str(tmp_path / "runs"), "--episodes", "2"]) == 0
    assert "num_episodes = 2" in capsys.readouterr().out


def test_the_events_are_those_of_the_results(tmp_path: Path) -> None:
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    tune.run("PG", config=SMALL, stop=TWO, storage_path=tmp_path, verbose=0)
    (file,) = (tmp_path / "tensorboard").iterdir()
    events = [event for event in loading.EventFileLoader(str(file)).Load() if event.HasField("summary")]
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [event.step for event in events] == [row["timesteps_total"] for row in rows]
    tags = {value.tag for value in events[-1].summary.value}
    assert "env_runners/episode_return_mean" in tags
    assert tags == {name for name, value in rows[-1].items() if value is not None and not name.startswith("info/")}
    assert (tmp_path / "curves.png").exists()


class Fragile(PG):
    """Fails in its second iteration if gamma is 0.5."""

    def training_step(self) -> Any:
        if self.iteration == 1 and self.config["gamma"] == 0.5:
            raise ZeroDivisionError("gamma is broken")
        return super().training_step()


def test_failed_trials_are_reported_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    config = PGConfig(Fragile).update_from_dict(SMALL).training(gamma=tune.grid_search([0.9, 0.5]))
    found = tune.run(Fragile, config=config, stop=TWO, max_concurrent_trials=1)
    assert [trial.status for trial in found.trials] == ["TERMINATED", "ERROR"]
    assert "ZeroDivisionError: gamma is broken" in found.errors["00001"]
    assert "00001 (gamma=0.5)  failed: ZeroDivisionError: gamma is broken" in capsys.readouterr().out
    with pytest.raises(tune.TrialsFailed, match="1 of 2 trials failed") as caught:
        tune.run(Fragile, config=config, stop=TWO, max_concurrent_trials=1, raise_on_failed_trial=True, verbose=0)
    assert len(caught.value.analysis.trials) == 2
    config.training(gamma=tune.choice([0.5]))
    with pytest.raises(tune.TrialsFailed, match="1 of 1 trials failed"):
        tune.run(Fragile, config=config, stop=TWO, verbose=0)


class Recovering(PG):
    """Fails once in its third iteration."""

    def training_step(self) -> Any:
        mark = Path(os.environ["RECOVERING"])
        if self.iteration == 2 and not mark.exists():
            mark.touch()
            raise OSError("a disk was away")
        return super().training_step()


def test_a_failed_trial_begins_again_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECOVERING", str(tmp_path / "mark"))
    config = PGConfig(Recovering).update_from_dict(SMALL).training(lr=tune.choice([1e-3]))
    found = tune.run(
        Recovering, config=config, stop={"training_iteration": 4}, storage_path=tmp_path / "runs", checkpoint_freq=1,
        max_failures=1, verbose=0,
    )  # fmt: skip
    (trial,) = found.trials
    assert (trial.status, trial.failures, trial.iteration) == ("TERMINATED", 1, 4)
    rows = (tmp_path / "runs" / "trials" / "00000" / "results.jsonl").read_text().splitlines()
    assert [json.loads(row)["training_iteration"] for row in rows] == [1, 2, 3, 4]


def pid_of(trial: tune.Trial) -> int:
    return int(trial.last_result["learners"]["pid"])


class Telling(PG):
    """Tells its process, and stops it abruptly if gamma is 0.5."""

    def training_step(self) -> Any:
        if self.iteration == 1 and self.config["gamma"] == 0.5:
            os.kill(os.getpid(), signal.SIGKILL)
        return ResultDict({**super().training_step(), "pid": os.getpid()})


@pytest.mark.slow
def test_several_trials_at_once_and_one_whose_process_dies(tmp_path: Path) -> None:
    config = PGConfig(Telling).update_from_dict(SMALL).training(gamma=tune.grid_search([0.9, 0.5, 0.8, 0.7]))
    found = tune.run(
        Telling, config=config, stop={"training_iteration": 3}, max_concurrent_trials=2, verbose=0,
        storage_path=tmp_path / "runs", checkpoint_at_end=True,
    )  # fmt: skip
    assert [trial.status for trial in found.trials] == ["TERMINATED", "ERROR", "TERMINATED", "TERMINATED"]
    assert "PeerLost" in found.errors["00001"]
    pids = {pid_of(trial) for trial in found.trials if trial.status == "TERMINATED"}
    assert os.getpid() not in pids
    assert all(Path(trial.checkpoint or "").is_dir() for trial in found.trials if trial.status == "TERMINATED")
    alone = tune.run(
        "PG", config={**SMALL, "gamma": 0.9}, stop={"training_iteration": 3}, verbose=0
    )  # the numbers are those of a training in this process
    mine, theirs = (each["env_runners"] for each in (alone.last_result, found.trials[0].last_result))
    assert mine == theirs


class Interrupting(PG):
    """Presses Ctrl-C in its third iteration if gamma is 0.5."""

    def training_step(self) -> Any:
        if self.iteration == 2 and self.config["gamma"] == 0.5 and "RLMESH_GOES_ON" not in os.environ:
            os.kill(os.getpid(), signal.SIGINT)
        return super().training_step()


def test_a_search_goes_on_after_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = PGConfig(Interrupting).update_from_dict(SMALL).training(gamma=tune.grid_search([0.9, 0.5, 0.8]))
    settings: dict[str, Any] = {
        "config": config, "stop": {"training_iteration": 3}, "max_concurrent_trials": 1, "storage_path": tmp_path,
        "checkpoint_at_end": True, "verbose": 0,
    }  # fmt: skip
    found = tune.run(Interrupting, **settings)
    assert found.interrupted
    assert [trial.status for trial in found.trials] == ["TERMINATED", "STOPPED", "PENDING"]
    assert found.trials[1].checkpoint is not None
    monkeypatch.setenv("RLMESH_GOES_ON", "1")
    with pytest.raises(UsageError, match="metric was"):
        tune.run(Interrupting, **settings, resume=True, metric="time_total_s")
    first = found.trials[0].last_result["time_total_s"]
    again = tune.run(Interrupting, **settings, resume=True)
    assert not again.interrupted
    assert [trial.status for trial in again.trials] == ["TERMINATED"] * 3
    assert again.trials[0].last_result["time_total_s"] == first  # it was not trained again
    rows = (tmp_path / "trials" / "00001" / "results.jsonl").read_text().splitlines()
    assert [json.loads(row)["training_iteration"] for row in rows] == [1, 2, 3]


def test_the_time_budget_ends_a_search() -> None:
    config = PGConfig.from_dict(SMALL).training(lr=tune.grid_search([1e-3, 1e-2]))
    found = tune.run("PG", config=config, max_concurrent_trials=1, time_budget_s=0.5, verbose=0)
    assert found.interrupted
    assert found.trials[0].status == "STOPPED"


def test_wrong_searches_are_refused_before_anything_runs(tmp_path: Path) -> None:
    searched = PGConfig.from_dict(SMALL).training(gamma=tune.grid_search([0.9, 2.0]))
    for arguments, says in (
        ({"config": searched}, "gamma: a number between 0 and 1, not 2.0"),
        ({"config": SMALL, "resume": True}, "so does resume"),
        ({"config": SMALL, "num_samples": 0}, "num_samples=0"),
        ({"config": SMALL, "mode": "most"}, "'max' or 'min'"),
        ({"config": SMALL, "search_alg": tune.OptunaSearch()}, "no setting is a search space"),
        ({"config": searched, "restore": tmp_path}, "is for one trial"),
        (
            {"config": {**SMALL, "num_env_runners": 1}, "num_samples": 2, "max_concurrent_trials": 2},
            "num_env_runners=1 each trial starts a job",
        ),
        ({"config": {**SMALL, "lr": {"grid_search": [1e-3]}}, "resume": True, "storage_path": tmp_path}, "no search"),
    ):
        with pytest.raises(UsageError, match=says):
            tune.run("PG", stop=TWO, verbose=0, **arguments)
    with pytest.raises(UsageError, match="no metric 'return'"):
        tune.run("PG", config=SMALL, stop=TWO, metric="return", verbose=0)
    several = tune.run(
        "PG", config=SMALL, num_samples=2, stop={"training_iteration": 1}, max_concurrent_trials=1, verbose=0
    )
    with pytest.raises(UsageError, match="several trials"):
        several.last_result  # noqa: B018


def test_a_search_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = json.dumps({**SMALL, "lr": {"grid_search": [1e-3, 1e-2]}})
    command = ["train", "--run", "PG", "--config", settings, "--run-dir", str(tmp_path), "--stop", json.dumps(TWO)]
    assert main([*command, "--max-concurrent-trials", "1", "--checkpoint-freq", "1"]) == 0
    assert "00001 (lr=0.01)  PG 2: 208 steps" in capsys.readouterr().out
    assert main(command) == 2
    assert "go on with it by resume=True" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0
    assert main(["train", "config.yaml", "--num-samples", "2"]) == 2
    assert "--num-samples: for agents" in capsys.readouterr().err


def test_lines_are_coloured_on_a_terminal_only() -> None:
    program = "from rlmesh.tune.progress import say; say('PPO 1: 64 steps'); say('failed', style='red')"
    outer, inner = os.openpty()
    environment = {**{k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "CI")}, "TERM": "xterm-256color"}
    subprocess.run([sys.executable, "-c", program], stdout=inner, check=True, timeout=HANG_S, env=environment)
    os.close(inner)
    printed = os.read(outer, 4096).decode()
    os.close(outer)
    assert re.sub(r"\x1b\[[0-9;]*m", "", printed).split() == ["PPO", "1:", "64", "steps", "failed"]
    assert "\x1b[31m" in printed
    plain = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=HANG_S, env=environment
    )
    assert plain.stdout == "PPO 1: 64 steps\nfailed\n"


@pytest.fixture
def optuna() -> Any:
    return pytest.importorskip("optuna", reason="optuna is not installed: pip install 'rlmesh[optuna]'")


def test_a_study_chooses_values_and_prunes(optuna: Any, tmp_path: Path) -> None:
    config = PGConfig.from_dict(SMALL).training(
        lr=tune.loguniform(1e-4, 1e-1),
        gamma=tune.choice([0.9, 0.99]),
        model={"fcnet_hiddens": tune.choice([(4,), (8,)])},
    )
    pruner = optuna.pruners.ThresholdPruner(upper=10.0, n_warmup_steps=1)  # returns are higher after a few episodes
    search = tune.OptunaSearch(pruner=pruner, seed=1)
    found = tune.run(
        "PG", config=config, stop={"training_iteration": 3}, num_samples=3, search_alg=search, storage_path=tmp_path,
        max_concurrent_trials=1, verbose=0,
    )  # fmt: skip
    assert [trial.status for trial in found.trials] == ["PRUNED"] * 3
    assert {trial.iteration for trial in found.trials} <= {1, 2}
    assert len({trial.config["lr"] for trial in found.trials}) == 3
    assert {trial.config["model/fcnet_hiddens"] for trial in found.trials} <= {(4,), (8,)}
    states = [trial.state for trial in search.study.trials]
    assert states == [optuna.trial.TrialState.PRUNED] * 3
    assert search.study.trials[0].params["lr"] == found.trials[0].config["lr"]
    search.end()


def test_a_study_goes_on_from_its_storage(optuna: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = PGConfig(Interrupting).update_from_dict(SMALL)
    config.training(
        gamma=tune.choice([0.5]), lr=tune.loguniform(1e-4, 1e-2), model={"fcnet_hiddens": tune.choice([(4,)])}
    )
    settings: dict[str, Any] = {
        "config": config, "stop": {"training_iteration": 3}, "max_concurrent_trials": 1, "storage_path": tmp_path,
        "checkpoint_freq": 1, "verbose": 0, "num_samples": 2,
    }  # fmt: skip
    found = tune.run(Interrupting, search_alg=tune.OptunaSearch(), **settings)
    assert [trial.status for trial in found.trials] == ["STOPPED", "PENDING"]
    monkeypatch.setenv("RLMESH_GOES_ON", "1")
    search = tune.OptunaSearch()
    again = tune.run(Interrupting, search_alg=search, **{**settings, "num_samples": 3}, resume=True)
    assert [trial.status for trial in again.trials] == ["TERMINATED"] * 3
    assert again.trials[0].config == found.trials[0].config
    rows = (tmp_path / "trials" / "00000" / "results.jsonl").read_text().splitlines()
    assert [json.loads(row)["training_iteration"] for row in rows] == [1, 2, 3]
    done = [trial for trial in search.study.trials if trial.state == optuna.trial.TrialState.COMPLETE]
    assert [trial.user_attrs["rlmesh_trial"] for trial in done] == [0, 1, 2]
    assert [trial.value for trial in done] == [trial.history[-1][1] for trial in again.trials]
    search.end()


def test_spaces_that_optuna_has_not_are_refused(optuna: Any) -> None:
    for domain in (tune.grid_search([1e-3]), tune.randn(), tune.qloguniform(0.1, 1.0, 0.1)):
        config = {**SMALL, "lr": domain}
        with pytest.raises(UsageError, match="leave search_alg out"):
            tune.run("PG", config=config, stop=TWO, search_alg=tune.OptunaSearch())


def test_optuna_finds_the_best_learning_rate(optuna: Any) -> None:
    """The study hears of the results: it samples where the metric is good."""
    config = PPOConfig.from_dict({**SMALL, "minibatch_size": 100, "num_epochs": 1})
    config.training(vf_loss_coeff=tune.uniform(0.0, 1.0))
    search = tune.OptunaSearch(seed=0)
    found = tune.run(
        "PPO", config=config, stop={"training_iteration": 1}, num_samples=14, search_alg=search, verbose=0,
        metric="learners/default_policy/learner_stats/total_loss", mode="min", max_concurrent_trials=1,
    )  # fmt: skip
    late = [trial.config["vf_loss_coeff"] for trial in found.trials[10:]]
    assert max(late) < 0.5  # the loss grows with the coefficient
    assert found.best_config["vf_loss_coeff"] < 0.2
