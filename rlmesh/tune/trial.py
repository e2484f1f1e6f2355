"""`Trial`: one training with one set of values, the criteria that end it, and the files that it leaves."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlmesh import private_files
from rlmesh.envs import ResultDict
from rlmesh.errors import UsageError
from rlmesh.job.nearest_name import did_you_mean
from rlmesh.observe.files.tensorboard import EventFile
from rlmesh.runtime.process import clock

__all__ = ["Trial", "TrialFiles"]

RESULTS, CHECKPOINTS, EVENTS = "results.jsonl", "checkpoints", "tensorboard"
PENDING, RUNNING, TERMINATED, PRUNED, STOPPED, ERROR = "PENDING", "RUNNING", "TERMINATED", "PRUNED", "STOPPED", "ERROR"
FINISHED = (TERMINATED, PRUNED, ERROR)
"""States that a resumed search leaves as they are."""

Stop = Mapping[str, float] | Callable[..., bool] | None


@dataclass
class Trial:
    """A training with one set of values.

    Attributes:
        trial_id: its number as text.
        algorithm: name of the algorithm.
        config: the values that the search chose, by name; empty without a search.
        status: ``PENDING``, ``RUNNING``, ``TERMINATED`` (a criterion ended it), ``PRUNED``, ``STOPPED`` (by Ctrl-C or
            the time budget), or ``ERROR``.
        last_result: what the last ``train()`` returned; empty if there was none.
        error: the traceback or message of a failure.
        failures: how often it failed.
        checkpoint: folder of the last checkpoint, if one was written.
        history: iteration and value of the search's metric; iterations without a value are left out.
    """

    trial_id: str
    algorithm: str
    config: dict[str, Any] = field(default_factory=dict)
    status: str = PENDING
    last_result: ResultDict = field(default_factory=ResultDict)
    error: str | None = None
    failures: int = 0
    checkpoint: str | None = None
    history: list[tuple[int, float]] = field(default_factory=list)

    @property
    def interrupted(self) -> bool:
        """True if Ctrl-C, or the time budget, ended the trial."""
        return self.status == STOPPED

    @property
    def iteration(self) -> int:
        """Number of finished iterations."""
        return int(self.last_result.get("training_iteration", 0))

    def is_finished(self, stop: Stop) -> bool:
        """True if a resumed search leaves the trial as it is: one that criteria ended goes on if it does not meet
        these; None and functions change nothing."""
        if self.status == TERMINATED and isinstance(stop, Mapping) and stop:
            return is_over(self.last_result, stop, evaluates=True)
        return self.status in FINISHED

    @property
    def title(self) -> str:
        """Number and values of the trial in a line."""
        values = ", ".join(f"{name}={shortened(value)}" for name, value in self.config.items())
        return f"{self.trial_id} ({values})" if values else self.trial_id

    def score(self, scope: str, mode: str) -> float:
        """The last or the best value of the metric; NaN without one."""
        values = [value for _, value in self.history]
        if not values:
            return math.nan
        return values[-1] if scope == "last" else max(values) if mode == "max" else min(values)


def shortened(value: Any) -> str:
    """A value in few characters."""
    text = f"{value:.4g}" if isinstance(value, float) else getattr(value, "__name__", None) or str(value)
    return text if len(text) <= 40 else f"{text[:37]}…"


def require_stop(stop: Stop) -> None:
    """Raise `UsageError` unless the criteria have the right form."""
    if stop is None or callable(stop):
        return
    if not isinstance(stop, Mapping):
        raise UsageError(f"tune.run(stop=…): a mapping of metrics to numbers, or a function, not {stop!r}")
    for name, value in stop.items():
        if type(value) not in (int, float):
            raise UsageError(f"tune.run(stop=…): {name!r} has a number, not {value!r}")


def is_over(result: ResultDict, stop: Stop, *, evaluates: bool = False) -> bool:
    """True if a criterion is met; one whose metric `metric_of` gives as NaN is not.

    Raises:
        UsageError: the results have no metric of this name.
    """
    if stop is None or not result:
        return False
    if callable(stop):
        return bool(stop(result))
    return any(metric_of(result, name, "stop", evaluates=evaluates) >= value for name, value in stop.items())


def metric_of(result: ResultDict, name: str, argument: str, *, evaluates: bool = False) -> float:
    """The number of a metric such as ``env_runners/episode_return_mean``; NaN if later results may have it.

    Args:
        evaluates: there are evaluations, though not after each iteration.

    Raises:
        UsageError: there is no metric of this name; names the nearest one.
    """
    flat = dict(numbers_of(result))
    if name not in flat:
        learners = ("learners/", "info/learner/")  # before learning starts, there are no statistics
        if name.startswith(learners) and not result.get("learners"):
            return math.nan
        if name.startswith("evaluation/") and evaluates and not result.get("evaluation"):
            return math.nan
        hint = did_you_mean(name, flat)
        raise UsageError(f"tune.run({argument}=…): the results have no metric {name!r}.{hint}")
    return float(flat[name])


def numbers_of(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers within nested metrics, by names such as ``env_runners/episode_return_mean``."""
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from numbers_of(value, f"{prefix}{name}/")
            continue
        if not isinstance(value, int | float) and getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
            value = value.item()  # of NumPy or torch
        if isinstance(value, int | float):
            yield f"{prefix}{name}", value


class TrialFiles:
    """The files of a trial: ``results.jsonl``, ``tensorboard/`` and ``checkpoints/``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._events = EventFile(folder / EVENTS)

    def checkpoint(self, iteration: int) -> Path:
        """The folder of the checkpoint of an iteration."""
        return self.folder / CHECKPOINTS / f"{iteration:06}"

    def begin(self, iteration: int) -> ResultDict:
        """Drop the results of later iterations, which a restored training computes again; return the last one."""
        rows = read_results(self.folder)
        kept = [row for row in rows if (row.get("training_iteration") or 0) <= iteration]
        last = nested(kept[-1]) if kept and kept[-1].get("training_iteration") == iteration else ResultDict()
        path = self.folder / RESULTS
        text = "".join(json.dumps(row) + "\n" for row in kept)
        if path.exists() and path.read_text() != text:  # there are later results, or a line was cut off
            private_files.write_whole(path, text)
        if len(kept) == len(rows):
            return last
        self._events.expect_replay(max(int(row["timesteps_total"] or 0) for row in rows), at=clock.epoch())
        return last

    def add(self, result: ResultDict) -> None:
        """Append a result as a line of JSON, with null for NaN, and as scalars of TensorBoard."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / EVENTS).mkdir(exist_ok=True)
        row = {name: value if math.isfinite(value) else None for name, value in numbers_of(result)}
        with (self.folder / RESULTS).open("ab+") as file:
            private_files.cut_torn_line(file.fileno())
            file.write((json.dumps(row) + "\n").encode())
        scalars = {name: float(value) for name, value in row.items() if value is not None and name[:5] != "info/"}
        self._events.add_scalars(scalars, step=int(result["timesteps_total"]), at=clock.epoch())

    def close(self) -> None:
        """Close the event file, and draw the learning curves."""
        self._events.close()
        from rlmesh.tune.curves import CURVES, draw_curves

        draw_curves(self.folder / CURVES, {"": read_results(self.folder)})


def has_training(folder: Path) -> bool:
    """True if a folder has results of a training."""
    return (folder / RESULTS).is_file()


def iteration_of(folder: Path, checkpoint: str | Path | None) -> int | None:
    """The iteration of a checkpoint of the training in a folder; None if it is none of these."""
    path = None if checkpoint is None else Path(checkpoint).absolute()
    return int(path.name) if path is not None and path.parent == folder / CHECKPOINTS and path.name.isdigit() else None


def read_results(folder: Path) -> list[dict[str, Any]]:
    """The results in a folder, one dict of numbers each. A line that was cut off is left out."""
    try:
        lines = (folder / RESULTS).read_text().splitlines()
    except FileNotFoundError:
        return []
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def nested(row: Mapping[str, Any]) -> ResultDict:
    """A result of which ``results.jsonl`` has the numbers."""
    result = ResultDict()
    for name, value in row.items():
        *parents, last = name.split("/")
        inner: dict[str, Any] = result
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = math.nan if value is None else value
    return result


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write JSON as a whole or not at all."""
    os.makedirs(path.parent, exist_ok=True)
    private_files.write_whole(path, json.dumps(state, indent=1) + "\n")
