"""Studies of Optuna: values, pruning, and going on after interruptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlmesh import tune
from rlmesh.envs import PGConfig, PPOConfig
from rlmesh.errors import UsageError
from rlmesh.tune import space as spaces
from rlmesh.tune.analysis import storable

from .test_search import SMALL, TWO, Interrupting, iterations_in


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
    with pytest.raises(UsageError, match="search was 'OptunaSearch' and is 'BasicSearch' now"):
        tune.run(Interrupting, **settings, resume=True)
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


@pytest.mark.slow
def test_values_stay_with_their_trials_after_several_interruptions(optuna: Any, tmp_path: Path) -> None:
    space = spaces.find({"lr": tune.loguniform(1e-4, 1e-1), "widths": tune.choice(["auto", (4,), (8,), iterations_in])})

    def begun(*, resume: bool = True) -> tune.OptunaSearch:
        search = tune.OptunaSearch()
        search.begin(space, 4, 0, "max", tmp_path, resume=resume)
        for number, chosen in values.items():
            search.again(number, {spaces.named(path): storable(value) for path, value in chosen.items()})
        return search

    values: dict[int, Any] = {}
    first = begun(resume=False)
    found = {number: first.ask(number) for number in range(4)}
    first.end()
    values = found
    second = begun()
    assert second.ask(0) == values[0]  # it is killed before it asks for the others
    second.end()
    third = begun()
    third.study.enqueue_trial({"lr": 1e-2, "widths": 1}, user_attrs={"rlmesh_trial": 2})  # of an older version
    third.study.enqueue_trial({"lr": 3e-2, "widths": 0})  # the user's own
    assert {number: third.ask(number) for number in (1, 0, 2, 3)} == values
    assert third.ask(4) == {("lr",): 3e-2, ("widths",): "auto"}
    new = third.ask(5)
    assert new not in values.values()
    assert not third.study.get_trials(states=(optuna.trial.TrialState.WAITING,))
    third.end()
    alike = tune.OptunaSearch()
    alike.begin(spaces.find({"f": tune.choice([lambda: 1, lambda: 2])}), 1, 0, "max", None, resume=False)
    with pytest.raises(UsageError, match="several of them look alike"):
        alike.again(0, {"f": storable(lambda: 1)})


def test_a_trial_that_begins_again_reports_its_values_again(optuna: Any) -> None:
    search = tune.OptunaSearch()
    search.begin(spaces.find({"lr": tune.uniform(0, 1)}), 1, 0, "max", None, resume=False)
    values = search.ask(0)
    search.go_on(0, [])
    for iteration, value in enumerate((1.0, 50.0, 60.0), 1):
        search.report(0, iteration, value)
    search.go_on(0, [(1, 1.0)])  # from the checkpoint of the first iteration
    search.report(0, 2, 2.0)
    search.tell(0, 2.0, pruned=False, failed=False)
    failed, trial = search.study.trials
    assert (failed.state, trial.state) == (optuna.trial.TrialState.FAIL, optuna.trial.TrialState.COMPLETE)
    assert trial.intermediate_values == {1: 1.0, 2: 2.0}
    assert {("lr",): trial.params["lr"]} == values


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
