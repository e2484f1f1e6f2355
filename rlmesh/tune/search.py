"""Ways to choose the values of trials: grids and random values, or a study of Optuna."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, Protocol

from rlmesh.errors import UsageError
from rlmesh.tune.analysis import storable
from rlmesh.tune.space import ChoiceDomain, Domain, NumberDomain, Path, named, variants

__all__ = ["BasicSearch", "OptunaSearch", "Search"]

NUMBER = "rlmesh_trial"
"""Name of the attribute in which a trial of an Optuna study keeps the number of its `Trial`."""


class Search(Protocol):
    """Chooses the values of trials, and receives their results."""

    total: int

    def ask(self, number: int) -> dict[Path, Any]: ...

    def go_on(self, number: int, history: Sequence[tuple[int, float]]) -> None: ...

    def report(self, number: int, iteration: int, value: float) -> bool: ...

    def tell(self, number: int, value: float | None, *, pruned: bool, failed: bool) -> None: ...

    def end(self) -> None: ...


class BasicSearch:
    """All combinations of grids, each ``num_samples`` times with random values of the other domains.

    Attributes:
        total: number of trials.
    """

    def __init__(self, space: Mapping[Path, Domain], num_samples: int, seed: int) -> None:
        self._variants = list(variants(space, num_samples, seed))
        self.total = len(self._variants)

    def ask(self, number: int) -> dict[Path, Any]:
        """The values of a trial."""
        return self._variants[number]

    def go_on(self, number: int, history: Sequence[tuple[int, float]]) -> None:
        """Keeps nothing: later values do not depend on results."""

    def report(self, number: int, iteration: int, value: float) -> bool:
        """False: no trial is pruned."""
        return False

    def tell(self, number: int, value: float | None, *, pruned: bool, failed: bool) -> None:
        """Keeps nothing: later values do not depend on results."""

    def end(self) -> None:
        """Closes nothing: this search has no storage."""


class OptunaSearch:
    """Values are chosen by a study of Optuna: ``tune.run(…, search_alg=OptunaSearch(pruner=MedianPruner()))``.

    Args:
        sampler: a sampler of Optuna; None: ``TPESampler`` with the seed.
        pruner: a pruner of Optuna that ends trials early, by the metric after each iteration; None: none is ended.
        seed: seed of the default sampler; None: that of `run`.
        storage: Optuna's storage, or its URL such as ``sqlite:///study.db``; None: ``study.db`` in the
            ``storage_path`` of `run`, or memory without one.
        study_name: name of the study in the storage.
    """

    def __init__(
        self, *, sampler: Any = None, pruner: Any = None, seed: int | None = None, storage: Any = None,
        study_name: str = "rlmesh",
    ) -> None:  # fmt: skip
        self._sampler, self._pruner, self._seed = sampler, pruner, seed
        self._storage, self._name = storage, study_name
        self.total = 0
        self.study: Any = None
        self._trials: dict[int, Any] = {}
        self._reported: set[int] = set()
        self._known: dict[int, dict[str, Any]] = {}
        self._own_storage: Any = None

    def begin(
        self, space: Mapping[Path, Domain], num_samples: int, seed: int, mode: str, folder: FilePath | None,
        *, resume: bool,
    ) -> None:  # fmt: skip
        """Make or load the study.

        Raises:
            UsageError: Optuna is not installed, has no such distribution, or has another study of this name.
        """
        optuna = _optuna()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.total = num_samples
        self._domains = {named(path): (path, domain) for path, domain in space.items()}
        self._distributions = {name: _distribution(name, domain) for name, (_, domain) in self._domains.items()}
        storage = self._storage
        if storage is None and folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            storage = f"sqlite:///{folder / 'study.db'}"
        if isinstance(storage, str):
            storage = self._own_storage = optuna.storages.RDBStorage(storage)
        chosen_seed = seed if self._seed is None else self._seed
        try:
            self.study = optuna.create_study(
                storage=storage, study_name=self._name, load_if_exists=resume,
                sampler=self._sampler or optuna.samplers.TPESampler(seed=chosen_seed),
                pruner=self._pruner or optuna.pruners.NopPruner(),
                direction="maximize" if mode == "max" else "minimize",
            )  # fmt: skip
        except optuna.exceptions.DuplicatedStudyError:
            raise UsageError(
                f"the storage has a study {self._name!r} already: go on with it by resume=True, or name another by "
                "OptunaSearch(study_name=…)"
            ) from None
        if resume and self._sampler is None:  # the same seed would draw the values of the first trials again
            self.study.sampler = optuna.samplers.TPESampler(seed=chosen_seed + len(self.study.trials))
        wanted = optuna.study.StudyDirection.MAXIMIZE if mode == "max" else optuna.study.StudyDirection.MINIMIZE
        if self.study.direction != wanted:
            raise UsageError(f"the study {self._name!r} has another direction than mode={mode!r}")
        for trial in self.study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):  # of a run that was killed
            self.study.tell(trial.number, state=optuna.trial.TrialState.FAIL)

    def again(self, number: int, values: Mapping[str, Any]) -> None:
        """Let `ask` return these values for a trial that an earlier run did not finish.

        Raises:
            UsageError: values of a ``choice`` cannot be told apart.
        """
        self._known[number] = {name: self._encoded(name, value) for name, value in values.items()}

    def ask(self, number: int) -> dict[Path, Any]:
        """The values of a trial."""
        known = self._known.pop(number, None)
        if known is not None:
            self.study.enqueue_trial(known, user_attrs={NUMBER: number})
        trial = self._trials[number] = self._next(None if known is None else number)
        trial.set_user_attr(NUMBER, number)
        return {path: self._decoded(name, trial.params[name]) for name, (path, _) in self._domains.items()}

    def _next(self, number: int | None) -> Any:
        """Take the next trial that the study's queue has for the trial of this number; None: for a new trial.

        The queue is in the storage. Trials that earlier runs queued and did not begin are marked as failed.
        """
        while True:
            trial = self.study.ask(self._distributions)
            found = trial.user_attrs.get(NUMBER)
            if found == number:
                return trial
            self.study.tell(trial, state=_optuna().trial.TrialState.FAIL)
            if found is None:  # queued by the user, for a new trial
                self.study.enqueue_trial(trial.params)

    def go_on(self, number: int, history: Sequence[tuple[int, float]]) -> None:
        """Let a trial begin again from a checkpoint; ``history`` has the iterations and values before it.

        Reported values cannot be taken back, so a failed trial stays in the study as failed, beside a new one.
        """
        trial = self._trials[number]
        if number in self._reported:
            self._reported.discard(number)
            self.study.tell(trial, state=_optuna().trial.TrialState.FAIL)
            self.study.enqueue_trial(trial.params, user_attrs={NUMBER: number})
            trial = self._trials[number] = self._next(number)
        for iteration, value in history:
            trial.report(value, iteration)

    def report(self, number: int, iteration: int, value: float) -> bool:
        """Report a value to the pruner; True if the pruner ends the trial."""
        trial = self._trials[number]
        if math.isfinite(value):
            trial.report(value, iteration)
            self._reported.add(number)
        return bool(trial.should_prune())

    def tell(self, number: int, value: float | None, *, pruned: bool, failed: bool) -> None:
        """End a trial in the study."""
        states = _optuna().trial.TrialState
        trial = self._trials.pop(number)
        if failed or (value is None and not pruned):
            self.study.tell(trial, state=states.FAIL)
        elif pruned:
            self.study.tell(trial, state=states.PRUNED)
        else:
            self.study.tell(trial, value)

    def end(self) -> None:
        """Close the connections to the storage; later uses of `study` open new ones."""
        if self._own_storage is not None:
            self._own_storage.remove_session()
            self._own_storage.engine.dispose()

    def _encoded(self, name: str, value: Any) -> Any:
        domain = self._domains[name][1]
        if isinstance(domain, ChoiceDomain) and not _is_plain(domain):
            texts, text = [repr(storable(each)) for each in domain.values], repr(storable(value))
            if texts.count(text) != 1:
                raise UsageError(
                    f"tune.run(resume=True): {name} was {text}, which is not one of the values {', '.join(texts)}, or "
                    "several of them look alike; choose among names in place of objects"
                )
            return texts.index(text)
        return value

    def _decoded(self, name: str, value: Any) -> Any:
        domain = self._domains[name][1]
        return domain.values[value] if isinstance(domain, ChoiceDomain) and not _is_plain(domain) else value


def _is_plain(domain: ChoiceDomain) -> bool:
    """True if a storage of Optuna can hold the values themselves; otherwise it holds their positions in the list."""
    return all(value is None or type(value) in (bool, int, float, str) for value in domain.values)


def _distribution(name: str, domain: Domain) -> Any:
    kinds = _optuna().distributions
    if isinstance(domain, ChoiceDomain):
        return kinds.CategoricalDistribution(domain.values if _is_plain(domain) else range(len(domain.values)))
    if isinstance(domain, NumberDomain) and not (domain.log and domain.q is not None):
        if domain.whole:
            step = int(domain.q or 1)
            low, high = -(-int(domain.low) // step) * step, int(domain.high) // step * step
            return kinds.IntDistribution(low, high, log=domain.log, step=step)
        return kinds.FloatDistribution(domain.low, domain.high, log=domain.log, step=domain.q)
    raise UsageError(
        f"{name}: Optuna has choice, uniform, quniform, loguniform, randint, qrandint and lograndint; leave search_alg "
        "out for grid_search, randn, sample_from and logarithms in steps"
    )


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise UsageError(f"OptunaSearch: {error}; pip install 'rlmesh[optuna]'") from error
    return optuna
