"""The interface of a tracker, and the trackers by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from rlmesh.job.status import MetricRecord

__all__ = ["TRACKERS", "RunInfo", "Tracker", "make_tracker", "metrics_of", "tracker_faults"]

ALWAYS = "tensorboard"
"""Written by the master itself, for every job."""
TRACKERS = {
    "wandb": ("rlmesh.observe.trackers.wandb_tracker:WandbTracker", ("wandb",)),
    "mlflow": ("rlmesh.observe.trackers.mlflow_tracker:MlflowTracker", ("mlflow", "sqlalchemy")),
    "trackio": ("rlmesh.observe.trackers.trackio_tracker:TrackioTracker", ("trackio",)),
}
"""Name → class, and the modules that it needs; the extra of rlmesh has the same name."""
TRAINER = "TRAINER"


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The run that a tracker shows.

    Attributes:
        run_dir: with logs and metrics; a tracker may keep files there.
        name: of the job.
        project: the project or experiment of the tracker.
        run_id: the same if the run is started again in its directory.
        settings: of the job, without secrets.
    """

    run_dir: Path
    name: str
    project: str = "rlmesh"
    run_id: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


class Tracker(Protocol):
    """Shows metrics. It has a process of its own, and all methods are called on its main thread.

    If a method raises, the tracker is closed, made anew after a while, and gets the same report again.
    """

    def open(self, run: RunInfo) -> None:
        """Begin, or go on with the run of the same ``run_id``."""

    def log(self, record: MetricRecord) -> None:
        """Show one report. Steps may come again after a restart, and late ones after later ones."""

    def close(self) -> None:
        """Write what is held back, and end."""


def metrics_of(record: MetricRecord) -> dict[str, float]:
    """Metrics under the names that a tracker shows: plain for rank 0 of the trainer, else ``ROLE/name``."""
    member = record.role if record.rank == 0 else f"{record.role}:{record.rank}"
    return {name if member == TRAINER else f"{member}/{name}": value for name, value in record.metrics.items()}


def tracker_faults(names: Sequence[str]) -> Iterator[str]:
    """One sentence per tracker that cannot be used, with what to do. Imports none of their packages.

    Args:
        names: ``wandb``, or with a project ``wandb:PROJECT``; ``module:Class`` for one of the user's.
    """
    for given in names:
        name, _, rest = given.partition(":")
        if name == ALWAYS:
            continue
        if name in TRACKERS:
            missing = [module for module in TRACKERS[name][1] if find_spec(module) is None]
            if missing:
                yield f"{given!r} needs {' and '.join(missing)}: pip install 'rlmesh[{name}]'"
        elif not rest:
            near = get_close_matches(name, [*TRACKERS, ALWAYS], 1)
            there = ", ".join([ALWAYS, *TRACKERS])
            said = f"did you mean {near[0]!r}?" if near else f"there are {there}, and module:Class for your own"
            yield f"there is no tracker {given!r}; {said}"
        else:
            yield from _module_fault(given, name)


def _module_fault(given: str, name: str) -> Iterator[str]:
    """The fault of a module that a user named, if there is one. The packages around the module are imported."""
    package, found = name.rpartition(".")[0], None
    try:
        found = find_spec(name)
    except Exception as error:  # a user's packages may raise anything
        missing = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
        if package and not f"{name}.".startswith(f"{missing}."):
            yield f"{given!r}: importing {package} fails: {type(error).__name__}: {error}"
            return
    if found is None:
        yield f"{given!r}: there is no module {name!r} in this folder or on PYTHONPATH"


def make_tracker(name: str) -> Tracker:
    """A tracker by its name.

    Raises:
        ImportError, AttributeError: there is none.
    """
    kind = name.partition(":")[0]
    module, _, attribute = (TRACKERS[kind][0] if kind in TRACKERS else name).partition(":")
    made: Tracker = getattr(import_module(module), attribute)()
    return made


def project_of(name: str) -> str:
    """The project that a name such as ``wandb:PROJECT`` has."""
    kind, _, rest = name.partition(":")
    return rest if kind in TRACKERS and rest else "rlmesh"
