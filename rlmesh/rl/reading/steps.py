"""The reports of a run's steps, read from its run directory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlmesh import private_files
from rlmesh.errors import UsageError

__all__ = ["METRICS", "StepReported", "read_steps", "undone_steps"]

METRICS = "metrics.jsonl"
"""The file of all reports in a run directory."""
_MARK = "step_time_s"
"""A metric that the report of each training step has, and no other report."""


@dataclass(frozen=True)
class StepReported:
    """The report of a training step.

    Attributes:
        step: of the run.
        at: seconds since 1970.
        metrics: by name; numbers that are not finite are left out.
    """

    step: int
    at: float
    metrics: Mapping[str, float]

    @property
    def validated(self) -> bool:
        """True if a validation of these weights was reported with the step."""
        return any(name.startswith("val/") for name in self.metrics)


def read_steps(run_dir: Path) -> list[StepReported]:
    """The reports of all training steps that count, in order.

    When a run goes back to a checkpoint, it makes a step again. From its new report on, neither the earlier report of
    the step counts, nor those of the steps after it, whose weights are gone.

    Raises:
        UsageError: the directory has no reports of a run, or another user may have written them.
    """
    found: list[StepReported] = []
    for made in _reports(run_dir):
        while found and found[-1].step >= made.step:
            found.pop()
        found.append(made)
    if not found:
        raise UsageError(f"{run_dir} has no report of a training step yet")
    return found


def undone_steps(run_dir: Path) -> frozenset[int]:
    """The steps that were reported and do not count, since the run went back and has not made them again; none if the
    directory has no reports of a run."""
    try:
        counted = {one.step for one in read_steps(run_dir)}
        return frozenset(one.step for one in _reports(run_dir)) - counted
    except UsageError:
        return frozenset()


def _reports(run_dir: Path) -> Iterator[StepReported]:
    """All reports of training steps, in the order in which they were made."""
    path = run_dir / METRICS
    try:
        text = private_files.read(path)
    except FileNotFoundError:
        raise UsageError(f"{run_dir} has no {METRICS}, so it is no directory of a run") from None
    except OSError as error:
        raise UsageError(f"{path} is not read: {error}") from error
    for line in text.splitlines():
        if _MARK.encode() not in line:
            continue
        try:
            entry = json.loads(line)
            metrics = {name: float(value) for name, value in entry["metrics"].items() if value is not None}
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # an incomplete last line of a file that is being written
        if _MARK in metrics:
            yield StepReported(int(entry["step"]), float(entry["at"]), metrics)
