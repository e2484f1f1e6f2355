"""`run`: one trial of an algorithm."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlmesh.envs import Algorithm, AlgorithmConfig, ResultDict, get_algorithm_class
from rlmesh.errors import UsageError

__all__ = ["Trial", "run"]

RESULTS, CHECKPOINTS = "results.jsonl", "checkpoints"

Stop = Mapping[str, float] | Callable[[ResultDict], bool] | None


@dataclass
class Trial:
    """The outcome of `run`.

    Attributes:
        algorithm: name of the algorithm.
        last_result: what the last ``train()`` returned; empty if there was none.
        interrupted: True if Ctrl-C ended the trial.
        checkpoint: folder of the last checkpoint, if one was written.
    """

    algorithm: str
    last_result: ResultDict = field(default_factory=ResultDict)
    interrupted: bool = False
    checkpoint: str | None = None


def run(
    run_or_experiment: str | type[Algorithm], *, config: AlgorithmConfig | Mapping[str, Any] | None = None,
    stop: Stop = None, storage_path: str | Path | None = None, checkpoint_freq: int = 0,
    checkpoint_at_end: bool = False, restore: str | Path | None = None, verbose: int = 1,
) -> Trial:  # fmt: skip
    """Train an algorithm: ``run("PPO", config=PPOConfig().environment("CartPole-v1"), stop={"timesteps_total": 1e5})``.

    Args:
        run_or_experiment: name or class of the algorithm.
        config: its config, or a mapping of settings, ``env`` among them.
        stop: metrics and the values at which the trial ends, or a function of a result. Nested metrics are named as
            ``env_runners/episode_return_mean``. None: the trial runs until it is interrupted by Ctrl-C.
        storage_path: folder of the results (one JSON object per line) and of checkpoints.
        checkpoint_freq: iterations between two checkpoints; 0: none.
        checkpoint_at_end: write a checkpoint at the end, also after Ctrl-C.
        restore: go on from this checkpoint.
        verbose: 0 prints nothing, 1 one line per iteration.

    Raises:
        UsageError: wrong settings, an unknown metric, or checkpoints without a ``storage_path``.
    """
    algorithm_class = (
        get_algorithm_class(run_or_experiment) if isinstance(run_or_experiment, str) else run_or_experiment
    )
    if (checkpoint_freq or checkpoint_at_end) and storage_path is None:
        raise UsageError("tune.run: checkpoints need a storage_path")
    _require_stop(stop)
    trial = Trial(algorithm_class.__name__)
    folder = Path(storage_path) if storage_path is not None else None
    with algorithm_class(_config_for(algorithm_class, config)) as algorithm:
        if restore is not None:
            algorithm.restore(restore)
        try:
            while not _is_over(trial.last_result, stop):
                trial.last_result = algorithm.train()
                if verbose:
                    print(_line(trial), flush=True)
                if folder is not None:
                    _record(trial.last_result, folder)
                    if checkpoint_freq and algorithm.iteration % checkpoint_freq == 0:
                        trial.checkpoint = algorithm.save(folder / CHECKPOINTS / f"{algorithm.iteration:06}")
        except KeyboardInterrupt:
            trial.interrupted = True
        if folder is not None and checkpoint_at_end:
            trial.checkpoint = algorithm.save(folder / CHECKPOINTS / f"{algorithm.iteration:06}")
    return trial


def _config_for(algorithm_class: type[Algorithm], config: Any) -> AlgorithmConfig:
    if not isinstance(config, AlgorithmConfig):
        return algorithm_class.get_default_config().update_from_dict(config or {})
    if not issubclass(algorithm_class, config.algorithm_class) and config.algorithm_class is not Algorithm:
        name = type(config).__name__
        raise UsageError(f"tune.run: {name} is for {config.algorithm_class.__name__}, not {algorithm_class.__name__}")
    return config.copy()


def _require_stop(stop: Stop) -> None:
    if stop is None or callable(stop):
        return
    if not isinstance(stop, Mapping):
        raise UsageError(f"tune.run(stop=…): a mapping of metrics to numbers, or a function, not {stop!r}")
    for name, value in stop.items():
        if type(value) not in (int, float):
            raise UsageError(f"tune.run(stop=…): {name!r} has a number, not {value!r}")


def _is_over(result: ResultDict, stop: Stop) -> bool:
    if stop is None or not result:
        return False
    if callable(stop):
        return bool(stop(result))
    flat = dict(_flat(result, ""))
    for name, value in stop.items():
        if name not in flat:
            near = difflib.get_close_matches(name, flat, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" There is {', '.join(sorted(flat))}."
            raise UsageError(f"tune.run(stop=…): the results have no metric {name!r}.{hint}")
        if flat[name] >= value:
            return True
    return False


def _flat(metrics: Mapping[str, Any], prefix: str) -> Any:
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", value


def _record(result: ResultDict, folder: Path) -> None:
    """Append a result as a line of JSON; NaN, which JSON has not, becomes null."""
    folder.mkdir(parents=True, exist_ok=True)
    row = {name: value if math.isfinite(value) else None for name, value in _flat(result, "")}
    with (folder / RESULTS).open("a") as file:
        file.write(json.dumps(row) + "\n")


def _line(trial: Trial) -> str:
    result = trial.last_result
    mean = result["env_runners"]["episode_return_mean"]
    returns = "no episode has ended" if math.isnan(mean) else f"mean return {mean:.1f}"
    steps, iteration = result["timesteps_total"], result["training_iteration"]
    return f"{trial.algorithm} {iteration}: {steps} steps, {returns}, {result['time_total_s']:.1f} s"
