"""`ExperimentAnalysis`: the trials of a call of `run`, and the file from which a search goes on."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlmesh.envs import ResultDict
from rlmesh.errors import UsageError
from rlmesh.tune import trial as trials
from rlmesh.tune.curves import draw_curves
from rlmesh.tune.trial import Trial

__all__ = ["EXPERIMENT", "ExperimentAnalysis"]

EXPERIMENT = "experiment.json"
FORMAT = 1
DEFAULT_METRIC = "env_runners/episode_return_mean"


class ExperimentAnalysis:
    """The outcome of `run`: the trials, the best one, and a table. Its text is the table. After a run without a search,
    `last_result`, `checkpoint` and `interrupted` are those of its only trial.

    Attributes:
        trials: in the order of their numbers.
        metric, mode: the best trial has the largest (``"max"``) or smallest (``"min"``) value of this metric.
        interrupted: True if Ctrl-C, or the time budget, ended the search.
        experiment_path: the ``storage_path``; None if nothing was written.
    """

    def __init__(
        self, found: list[Trial], metric: str, mode: str, experiment_path: Path | None = None, *, single: bool = False
    ) -> None:
        self.trials, self.metric, self.mode = found, metric, mode
        self.experiment_path = experiment_path
        self.interrupted = False
        self.single = single

    def get_best_trial(self, metric: str | None = None, mode: str | None = None, scope: str = "last") -> Trial | None:
        """The trial with the best value of the metric; None if no trial has one. Failed trials take part too.

        Args:
            metric: name of the metric; None: the one that `run` was given. Any other is read from the last results.
            mode: ``"max"`` or ``"min"``.
            scope: ``"last"`` compares the last values, ``"all"`` the best ones.
        """
        mode = mode or self.mode
        if mode not in ("max", "min") or scope not in ("last", "all"):
            raise UsageError(f"get_best_trial(mode={mode!r}, scope={scope!r}): 'max' or 'min'; 'last' or 'all'")
        if metric is None or metric == self.metric:
            scores = [(each.score(scope, mode), each) for each in self.trials]
        elif scope == "all":
            raise UsageError(f"get_best_trial(scope='all') is for the metric of the search, {self.metric!r}")
        else:
            scores = [(trials.metric_of(t.last_result, metric, "metric"), t) for t in self._with(metric)]
        known = [(score, each) for score, each in scores if not math.isnan(score)]
        if not known:
            return None
        return (max if mode == "max" else min)(known, key=lambda pair: pair[0])[1]

    def _with(self, metric: str) -> list[Trial]:
        """The trials whose last results have a metric; all that have results if none has it."""
        having = [each for each in self.trials if metric in dict(trials.numbers_of(each.last_result))]
        return having or [each for each in self.trials if each.last_result]

    @property
    def best_trial(self) -> Trial:
        """The best trial.

        Raises:
            UsageError: no trial has a value of the metric.
        """
        best = self.get_best_trial()
        if best is None:
            raise UsageError(f"no trial has a value of {self.metric!r}")
        return best

    @property
    def best_config(self) -> dict[str, Any]:
        """The values of the best trial, by name."""
        return self.best_trial.config

    @property
    def best_result(self) -> ResultDict:
        """The last result of the best trial."""
        return self.best_trial.last_result

    @property
    def best_checkpoint(self) -> str | None:
        """The last checkpoint of the best trial."""
        return self.best_trial.checkpoint

    @property
    def errors(self) -> dict[str, str]:
        """Errors of failed trials, by the trial's number."""
        return {each.trial_id: each.error or "" for each in self.trials if each.status == trials.ERROR}

    @property
    def results(self) -> dict[str, ResultDict]:
        """The last result of each trial, by the trial's number."""
        return {each.trial_id: each.last_result for each in self.trials}

    @property
    def last_result(self) -> ResultDict:
        """The last result of the only trial."""
        return self._only().last_result

    @property
    def checkpoint(self) -> str | None:
        """The last checkpoint of the only trial."""
        return self._only().checkpoint

    @property
    def algorithm(self) -> str:
        """The name of the algorithm."""
        return self.trials[0].algorithm

    def _only(self) -> Trial:
        if not self.single:
            raise UsageError("the search has several trials: take best_result, best_checkpoint, or one of .trials")
        return self.trials[0]

    def rows(self) -> list[dict[str, Any]]:
        """A row for each trial: number, status, values, last and best metric, iterations and steps."""
        return [
            {
                "trial": each.trial_id,
                "status": each.status,
                **each.config,
                self.metric: each.score("last", self.mode),
                "best": each.score("all", self.mode),
                "iterations": each.iteration,
                "steps": each.last_result.get("timesteps_total", 0),
                "error": (each.error or "").strip().rpartition("\n")[2],
            }
            for each in self.trials
        ]

    def dataframe(self) -> Any:
        """`rows` as a ``pandas.DataFrame``.

        Raises:
            UsageError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise UsageError(f"dataframe(): {error}; pip install pandas, or take rows()") from error
        return pandas.DataFrame(self.rows())

    def draw(self, path: str | Path) -> Path | None:
        """Draw the learning curves of all trials that wrote results, as PNG; None if there are none."""
        if self.experiment_path is None:
            raise UsageError("draw(): the results were not kept; give run(…) a storage_path")
        folders = {each.title: trial_folder(self.experiment_path, each, single=self.single) for each in self.trials}
        rows = {title: trials.read_results(folder) for title, folder in folders.items()}
        return draw_curves(Path(path), rows, self.metric)

    def __str__(self) -> str:
        rows = self.rows()
        columns = [name for name in rows[0] if any(row.get(name) not in (None, "") for row in rows)]
        cells = [columns, *([trials.shortened(row.get(name, "")) for name in columns] for row in rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
        return "\n".join(line.rstrip() for line in lines)


def trial_folder(storage: Path, each: Trial, *, single: bool) -> Path:
    """The folder of a trial; the only trial of a run has the run's own folder."""
    return storage if single else storage / "trials" / each.trial_id


def save(analysis: ExperimentAnalysis, space: Mapping[str, str], seed: int, search: str) -> None:
    """Write the state of a search, with which it can be resumed; does nothing without a storage folder."""
    if analysis.experiment_path is None:
        return
    state = {
        "format": FORMAT,
        "metric": analysis.metric,
        "mode": analysis.mode,
        "space": dict(space),
        "seed": seed,
        "search": search,
        "trials": [
            {
                "trial_id": each.trial_id,
                "algorithm": each.algorithm,
                "status": each.status,
                "error": each.error,
                "failures": each.failures,
                "checkpoint": each.checkpoint,
                "history": each.history,
                "config": {name: storable(value) for name, value in each.config.items()},
            }
            for each in analysis.trials
        ],
    }
    trials.write_state(analysis.experiment_path / EXPERIMENT, state)


def load(storage: Path) -> dict[str, Any]:
    """The saved state of a search, as plain JSON values.

    Raises:
        UsageError: the folder has no search, or its state cannot be read.
    """
    path = storage / EXPERIMENT
    try:
        state = json.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"tune.run(resume=True): {storage} has no search (no {EXPERIMENT})") from None
    except ValueError as error:
        raise UsageError(f"tune.run(resume=True): {path} cannot be read: {error}") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise UsageError(f"tune.run(resume=True): {path} was written by another version of rlmesh")
    return state


def trial_of(row: Mapping[str, Any], folder: Path) -> Trial:
    """A trial from the state of a search, with its last result."""
    results = trials.read_results(folder)
    last = trials.nested(results[-1]) if results else ResultDict()
    history = [(int(iteration), float(value)) for iteration, value in row["history"]]
    fields = ("trial_id", "algorithm", "status", "error", "failures", "checkpoint", "config")
    return Trial(**{name: row[name] for name in fields}, last_result=last, history=history)


def storable(value: Any) -> Any:
    """The value itself if JSON can express it, otherwise its text."""
    plain = value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
    return value if plain else text_of(value)


def text_of(value: Any) -> str:
    """The value as text, which is the same in each process: without the addresses of functions and objects."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
