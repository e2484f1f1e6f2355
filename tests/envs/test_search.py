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
from types import SimpleNamespace
from typing import Any

import pytest

from rlmesh import tune
from rlmesh.cli.main import main
from rlmesh.envs import PG, Algorithm, PGConfig, ResultDict
from rlmesh.errors import UsageError
from rlmesh.tune import loop, running
from rlmesh.tune import space as spaces
from rlmesh.tune.trial import TrialFiles, read_results

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


def test_a_resumed_search_goes_on_to_a_later_end(tmp_path: Path) -> None:
    config = PGConfig.from_dict(SMALL).training(gamma=tune.grid_search([0.9, 0.5]))
    settings: dict[str, Any] = {
        "config": config, "max_concurrent_trials": 1, "storage_path": tmp_path, "checkpoint_at_end": True, "verbose": 0,
    }  # fmt: skip
    tune.run("PG", **settings, stop=TWO)
    same = tune.run("PG", **settings, stop=TWO, resume=True)
    assert [trial.iteration for trial in same.trials] == [2, 2]
    later = tune.run("PG", **settings, stop={"training_iteration": 3}, resume=True)
    assert [(trial.status, trial.iteration) for trial in later.trials] == [("TERMINATED", 3)] * 2
    rows = (tmp_path / "trials" / "00001" / "results.jsonl").read_text().splitlines()
    assert [json.loads(row)["training_iteration"] for row in rows] == [1, 2, 3]
    with pytest.raises(UsageError, match="no metric 'training_iterations'"):
        tune.run("PG", **settings, stop={"training_iterations": 3}, resume=True)


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


class Pressing(PG):
    """Fails once in its fourth iteration, and presses Ctrl-C in the first one after that."""

    def training_step(self) -> Any:
        failed, pressed = (Path(os.environ["PRESSING"]) / name for name in ("failed", "pressed"))
        if self.iteration == 3 and not failed.exists():
            failed.touch()
            raise OSError("a disk was away")
        if failed.exists() and not pressed.exists():
            pressed.touch()
            os.kill(os.getpid(), signal.SIGINT)
        return super().training_step()


def iterations_in(folder: Path) -> list[int]:
    lines = (folder / "results.jsonl").read_text().splitlines()
    return [json.loads(line)["training_iteration"] for line in lines]


def test_a_trial_that_is_stopped_right_after_it_began_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRESSING", str(tmp_path))
    settings: dict[str, Any] = {
        "config": PGConfig(Pressing).update_from_dict(SMALL).training(lr=tune.choice([1e-3])), "verbose": 0,
        "stop": {"training_iteration": 4}, "storage_path": tmp_path / "runs", "checkpoint_freq": 2, "max_failures": 1,
        "checkpoint_at_end": True,
    }  # fmt: skip
    (trial,) = tune.run(Pressing, **settings).trials
    folder = tmp_path / "runs" / "trials" / "00000"
    assert (trial.status, trial.iteration, Path(trial.checkpoint or "").name) == ("STOPPED", 2, "000002")
    assert iterations_in(folder) == [1, 2]
    (trial,) = tune.run(Pressing, **settings, resume=True).trials
    assert (trial.status, iterations_in(folder)) == ("TERMINATED", [1, 2, 3, 4])


def test_a_trial_that_was_at_its_end_does_not_train_again(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "config": {**SMALL, "lr": tune.choice([1e-3])}, "storage_path": tmp_path, "verbose": 0, "stop": TWO,
        "checkpoint_at_end": True, "num_samples": 2,
    }  # fmt: skip
    tune.run("PG", **settings, max_concurrent_trials=1)
    path = tmp_path / "experiment.json"
    path.write_text(path.read_text().replace("TERMINATED", "RUNNING"))  # as if it was killed before the end was written
    found = tune.run("PG", **settings, max_concurrent_trials=1, resume=True)
    assert [trial.status for trial in found.trials] == ["TERMINATED"] * 2
    assert iterations_in(tmp_path / "trials" / "00000") == [1, 2]
    with pytest.raises(UsageError, match="the search has 2 trials, and these are 1 only"):
        tune.run("PG", **{**settings, "num_samples": 1}, resume=True)


def test_what_is_over_time_is_kept_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time ends in the second iteration: its result counts, and the checkpoint is that of its number."""
    now = [0.0]

    class Late(PG):
        def training_step(self) -> Any:
            now[0] += 1
            return super().training_step()

    monkeypatch.setattr(loop, "clock", SimpleNamespace(now=lambda: now[0]))
    monkeypatch.setattr(running, "clock", SimpleNamespace(now=lambda: now[0]))
    config = PGConfig(Late).update_from_dict(SMALL).training(lr=tune.choice([1e-3]))
    found = tune.run(
        Late, config=config, max_concurrent_trials=1, storage_path=tmp_path, checkpoint_at_end=True, time_budget_s=1.5,
        verbose=0,
    )  # fmt: skip
    (trial,) = found.trials
    assert (trial.status, trial.iteration, Path(trial.checkpoint or "").name) == ("STOPPED", 2, "000002")
    assert iterations_in(tmp_path / "trials" / "00000") == [1, 2]
    with Algorithm.from_checkpoint(trial.checkpoint or "") as algorithm:
        assert algorithm.iteration == 2


def test_results_behind_a_line_that_was_cut_off_are_read(tmp_path: Path) -> None:
    def result(iteration: int) -> ResultDict:
        return ResultDict(training_iteration=iteration, timesteps_total=iteration * 10)

    files = TrialFiles(tmp_path)
    files.add(result(1))
    path = tmp_path / "results.jsonl"
    path.write_text(path.read_text() + '{"training_iter')
    again = TrialFiles(tmp_path)
    again.add(result(2))
    assert [row["training_iteration"] for row in read_results(tmp_path)] == [1, 2]
    assert again.begin(2)["timesteps_total"] == 20
    assert iterations_in(tmp_path) == [1, 2]  # the broken line is gone
    files.close()
    again.close()


def test_a_metric_of_evaluations_may_be_missing_between_them() -> None:
    config = PGConfig.from_dict({**SMALL, "lr": tune.choice([1e-3])})
    config.evaluation(evaluation_interval=2, evaluation_duration=1)
    metric = "evaluation/env_runners/episode_return_mean"
    settings: dict[str, Any] = {"max_concurrent_trials": 1, "verbose": 0}
    found = tune.run("PG", config=config, metric=metric, stop={**TWO, metric: 1e9}, **settings)
    assert [iteration for iteration, _ in found.trials[0].history] == [2]
    with pytest.raises(UsageError, match="no metric 'evaluation/env_runners/return'"):
        tune.run("PG", config=config, metric="evaluation/env_runners/return", stop=TWO, **settings)
    config.evaluation(evaluation_interval=None)
    with pytest.raises(UsageError, match="no metric 'evaluation/env"):
        tune.run("PG", config=config, metric=metric, stop=TWO, **settings)


def test_a_space_is_described_without_addresses() -> None:
    space: Any = {("gamma",): tune.sample_from(lambda spec: 0.9), ("env",): tune.choice([iterations_in, object()])}
    texts = running.described(space)
    assert "0x" not in str(texts)
    assert "iterations_in" in texts["env"]
