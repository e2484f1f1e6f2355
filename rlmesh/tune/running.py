"""`run`: trials of an algorithm, one or several."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rlmesh.envs import Algorithm, AlgorithmConfig, get_algorithm_class
from rlmesh.errors import RLMeshError, UsageError
from rlmesh.runtime.process import clock
from rlmesh.tune import analysis as states
from rlmesh.tune import space as spaces
from rlmesh.tune import trial as trials
from rlmesh.tune.analysis import DEFAULT_METRIC, EXPERIMENT, ExperimentAnalysis
from rlmesh.tune.execution import LocalSlot, RemoteSlot, TrialSlot, remote_slots
from rlmesh.tune.loop import TrialLoop
from rlmesh.tune.search import BasicSearch, OptunaSearch, Search
from rlmesh.tune.trial import Stop, Trial

__all__ = ["TrialsFailed", "run"]

OWN_JOBS = ("num_env_runners", "num_learners", "evaluation_num_env_runners")
"""Settings that start a job if they are not 0."""
SEED = 0
"""Seed of searches without one, so that a search can be repeated."""


class TrialsFailed(RLMeshError):
    """Trials of a search failed.

    Attributes:
        analysis: all trials, with their errors.
    """

    code = "RM820"
    analysis: ExperimentAnalysis


def run(
    run_or_experiment: str | type[Algorithm], *, config: AlgorithmConfig | Mapping[str, Any] | None = None,
    stop: Stop = None, num_samples: int = 1, metric: str | None = None, mode: str = "max",
    search_alg: OptunaSearch | None = None, max_concurrent_trials: int | None = None,
    time_budget_s: float | None = None, seed: int | None = None, max_failures: int = 0,
    raise_on_failed_trial: bool = False, storage_path: str | Path | None = None, resume: bool = False,
    checkpoint_freq: int = 0, checkpoint_at_end: bool = False, restore: str | Path | None = None, verbose: int = 1,
) -> ExperimentAnalysis:  # fmt: skip
    """Train an algorithm: ``run("PPO", config=PPOConfig().environment("CartPole-v1"), stop={"timesteps_total": 1e5})``.

    Settings may be search spaces (`rlmesh.tune.space`); then each combination of values is a trial. Trials that run one
    after the other are trained in this process; trials that run at the same time are trained in the processes of an
    rlmesh job. Ctrl-C ends all trials; `run` then returns what they reached.

    Args:
        run_or_experiment: name or class of the algorithm.
        config: its config, or a mapping of settings, ``env`` among them.
        stop: metrics and the values at which a trial ends, or a function of a result. Nested metrics are named as
            ``env_runners/episode_return_mean``. None: the trial runs until it is interrupted by Ctrl-C.
        num_samples: number of trials; with grids, how often each combination of grid values is tried.
        metric: the metric that decides which trial is best, and that a study optimizes; None: the mean return.
        mode: ``"max"`` or ``"min"`` of the metric.
        search_alg: an `OptunaSearch`; None: grids and random values.
        max_concurrent_trials: trials at once; None: as many as there are cores, and 1 for trials with remote runners.
        time_budget_s: seconds after which all trials end, as with Ctrl-C.
        seed: seed of the random values; None: 0. It does not seed trainings: ``debugging(seed=…)`` does.
        max_failures: how often a failed trial of a search begins again, from its last checkpoint if there is one.
        raise_on_failed_trial: raise `TrialsFailed` at the end of a search if any trial failed, and not only if all did.
        storage_path: folder of results (JSON lines, events of TensorBoard, curves) and of checkpoints.
        resume: continue the search in ``storage_path``: finished trials stay, and the others begin again, from their
            last checkpoint if there is one. Without a study, trials that have not met a new
            ``stop`` are not finished.
        checkpoint_freq: iterations between two checkpoints; 0: none.
        checkpoint_at_end: write a checkpoint at the end of a trial, also after Ctrl-C.
        restore: the checkpoint from which a single trial continues.
        verbose: 0 prints nothing, 1 one line per iteration.

    Raises:
        UsageError: wrong settings, an unknown metric, or an argument that needs a ``storage_path``. The settings of all
            trials are checked before the first trial begins; of a study, one random set of values is checked.
            Iterations without an evaluation may lack an evaluation's metric.
        TrialsFailed: all trials of a search failed. A run without a search raises the trial's own error.
    """
    if isinstance(run_or_experiment, str):
        run_or_experiment = get_algorithm_class(run_or_experiment)
    if (checkpoint_freq or checkpoint_at_end or resume) and storage_path is None:
        raise UsageError("tune.run: checkpoints need a storage_path, and so does resume")
    at_most = 1 if max_concurrent_trials is None else max_concurrent_trials
    _require_whole(1, num_samples=num_samples, max_concurrent_trials=at_most)
    _require_whole(0, max_failures=max_failures, checkpoint_freq=checkpoint_freq)
    if mode not in ("max", "min"):
        raise UsageError(f"tune.run(mode={mode!r}): 'max' or 'min'")
    trials.require_stop(stop)
    settings = _Settings(run_or_experiment, config)
    single = not settings.space and num_samples == 1 and search_alg is None
    if restore is not None and not single:
        raise UsageError("tune.run(restore=…) is for one trial; resume=True goes on with a search")
    if resume and single:
        raise UsageError("tune.run(resume=True) goes on with a search; for one trial, give restore=CHECKPOINT")
    if search_alg is not None and not settings.space:
        raise UsageError("tune.run(search_alg=…): no setting is a search space, such as tune.uniform(0.9, 1)")
    folder = Path(storage_path).absolute() if storage_path is not None else None
    if single and folder is not None:
        _require_own(folder, restore)
    found = ExperimentAnalysis([], metric or DEFAULT_METRIC, mode, folder, single=single)
    seed = SEED if seed is None else seed
    search, todo = _search(settings, found, search_alg, num_samples, seed, stop, resume=resume)
    at_once = 1 if single else _at_once(max_concurrent_trials, settings, len(todo))
    loop = TrialLoop(
        found, search, settings.of_trial, stop=stop, checkpoint_freq=checkpoint_freq,
        checkpoint_at_end=checkpoint_at_end, max_failures=max_failures, verbose=verbose, seed=seed,
        evaluates=settings.config["evaluation_interval"] is not None,
        restore=None if restore is None else str(Path(restore).absolute()), space=described(settings.space),
        threads=0 if at_once == 1 else max(1, _cores() // at_once),
        ends=None if time_budget_s is None else clock.now() + time_budget_s,
    )  # fmt: skip
    _carry_out(loop, todo, at_once)
    if not single and (found.errors if raise_on_failed_trial else len(found.errors) == len(found.trials) > 0):
        raise _failure(found)
    return found


def _require_own(folder: Path, restore: str | Path | None) -> None:
    """Refuse the folder of another training, whose results and checkpoints would pass for those of this one."""
    if trials.has_training(folder) and trials.iteration_of(folder, restore) is None:
        raise UsageError(
            f"tune.run: {folder} has a training: go on with it by restore=CHECKPOINT, one of {folder / 'checkpoints'}, "
            "or name another folder"
        )


def _require_whole(least: int, **numbers: Any) -> None:
    """Check that arguments of `run` are whole numbers of at least ``least``."""
    for name, value in numbers.items():
        if type(value) is not int or value < least:
            raise UsageError(f"tune.run({name}={value!r}): a whole number of at least {least}")


def _carry_out(loop: TrialLoop, todo: deque[Trial], at_once: int) -> None:
    """Carry out trials: in this process if one runs at a time, else in the processes of a job."""
    with ExitStack() as stack:
        stack.callback(loop.search.end)
        stack.callback(loop.close)
        slots: list[TrialSlot]
        if at_once == 1:
            local = LocalSlot(loop.answers, raises=loop.found.single)
            stack.callback(local.session.end)
            slots = [local]
        else:
            folder = loop.found.experiment_path
            members = stack.enter_context(remote_slots(at_once, None if folder is None else str(folder / "job")))
            slots = [RemoteSlot(loop.answers, member) for member in members]
        loop.work(todo, slots)
    loop.finish()


def _failure(found: ExperimentAnalysis) -> TrialsFailed:
    """The error of a search with failed trials."""
    number, text = next(iter(found.errors.items()))
    error = TrialsFailed(f"{len(found.errors)} of {len(found.trials)} trials failed; trial {number}: {text.strip()}")
    error.analysis = found
    return error


class _Settings:
    """The settings of a run, with its search space.

    Attributes:
        space: domains by their place; the first part of a place is the name of a setting.
    """

    def __init__(self, algorithm_class: type[Algorithm], config: Any) -> None:
        self.algorithm_class = algorithm_class
        if not isinstance(config, AlgorithmConfig):
            config = algorithm_class.get_default_config().update_from_dict(config or {})
        elif not issubclass(algorithm_class, config.algorithm_class) and config.algorithm_class is not Algorithm:
            name, own = type(config).__name__, config.algorithm_class.__name__
            raise UsageError(f"tune.run: {name} is for {own}, not {algorithm_class.__name__}")
        self.config: AlgorithmConfig = config.copy()
        values = {name: value for name, value in self.config.to_dict().items() if name != "env"}
        env = self.config["env"]
        self.space = spaces.find(values)
        if isinstance(env, spaces.Domain) or (isinstance(env, Mapping) and set(env) == {spaces.GRID}):
            self.space |= spaces.find(env, ("env",))

    def of_trial(self, chosen: Mapping[spaces.Path, Any], *, pickled: bool) -> Any:
        """The class and the settings of a trial, or both pickled."""
        config = self.with_values(chosen)
        config.validate()
        if not pickled:
            return self.algorithm_class, config
        import cloudpickle

        return cloudpickle.dumps((self.algorithm_class, config))

    def with_values(self, chosen: Mapping[spaces.Path, Any]) -> AlgorithmConfig:
        """The settings with the values of a trial."""
        config = self.config.copy()
        for name in {str(path[0]) for path in chosen}:
            here = {path[1:]: value for path, value in chosen.items() if path[0] == name}
            config[name] = spaces.fill(config[name], here)
        return config


def _search(
    settings: _Settings, found: ExperimentAnalysis, given: OptunaSearch | None, num_samples: int, seed: int,
    stop: Stop, *, resume: bool,
) -> tuple[Search, deque[Trial]]:  # fmt: skip
    """The search, and the trials that are left to carry out, those of an earlier run included."""
    space, folder = settings.space, found.experiment_path
    before = states.load(folder) if resume and folder is not None else None
    if before is None and folder is not None and (folder / EXPERIMENT).exists():
        raise UsageError(f"tune.run: {folder} has a search: go on with it by resume=True, or name another folder")
    if before is not None:
        told = {
            "space": described(space), "metric": found.metric, "mode": found.mode, "seed": seed,
            "search": (BasicSearch if given is None else type(given)).__name__,
        }  # fmt: skip
        for name, value in told.items():
            if before.get(name) != value:
                hint = ". Give search_alg as in the run before" if name == "search" else ""
                raise UsageError(f"tune.run(resume=True): {name} was {before.get(name)!r} and is {value!r} now{hint}")
    search: Search
    if given is not None:
        given.begin(space, num_samples, seed, found.mode, folder, resume=before is not None)
        settings.with_values(spaces.draw(space, {}, random.Random(seed))).validate()
        search = given
    else:
        search = basic = BasicSearch(space, num_samples, seed)
        for number in range(basic.total):
            settings.with_values(basic.ask(number)).validate()
    known = [] if before is None else before["trials"]
    if given is None and search.total < len(known):
        raise UsageError(
            f"tune.run(resume=True, num_samples={num_samples}): the search has {len(known)} trials, and these are "
            f"{search.total} only; give at least the num_samples of the run before"
        )
    algorithm = settings.algorithm_class.__name__
    for number in range(max(search.total, len(known))):
        if number < len(known) and folder is not None:
            trial = states.trial_of(known[number], folder / "trials" / f"{number:05}")
        else:
            trial = Trial(f"{number:05}", algorithm)
        if given is None:
            trial.config = {spaces.named(path): value for path, value in search.ask(number).items()}
        found.trials.append(trial)
    # A study has the values of its finished trials already, and takes no second one.
    todo = deque(trial for trial in found.trials if not trial.is_finished(None if given else stop))
    for trial in todo:
        if given is not None and trial.config:
            given.again(int(trial.trial_id), trial.config)
    return search, todo


def described(space: Mapping[spaces.Path, spaces.Domain]) -> dict[str, str]:
    """The domains by name, as text."""
    return {spaces.named(path): states.text_of(domain) for path, domain in space.items()}


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _at_once(asked: int | None, settings: _Settings, number: int) -> int:
    """The number of trials that run at the same time: 1 if trials start jobs of their own.

    Raises:
        UsageError: more than one was asked for, and trials start jobs of their own.
    """
    needs = [name for name in OWN_JOBS if settings.config.get(name, 0) != 0]
    if needs and (asked or 1) > 1:
        raise UsageError(
            f"tune.run(max_concurrent_trials={asked}): with {needs[0]}={settings.config[needs[0]]!r} each trial starts "
            f"a job, which it cannot do within one; set {needs[0]}=0, or max_concurrent_trials=1"
        )
    return max(1, min(number, 1 if needs else _cores() if asked is None else asked))
