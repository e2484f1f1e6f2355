"""The picture of a run, drawn only from its ``metrics.jsonl``: learning curves, and the step time by role."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmesh import private_files
from rlmesh.errors import import_fault, is_absent
from rlmesh.job.status import MetricRecord
from rlmesh.observe.files.metric_files import METRICS_FILE, read_records
from rlmesh.observe.time_use import STEP_TIME, TimeUse, calls_to_roles
from rlmesh.observe.views.progress import Curve

__all__ = ["REPORT_FILE", "StepTimes", "draw_report", "step_times"]

logger = logging.getLogger(__name__)

REPORT_FILE = "report.png"
"""Name of the picture inside the run directory."""

OWN = "own work"
RLMESH = "rlmesh itself"

_INK, _FAINT, _PALE = "#1f2933", "#9aa5b1", "#cbd2d9"
_RED = "#d64545"
_COLORS = ("#2f6db5", "#e08e2b", "#3a9d6e", "#8e5bb0", "#c7a93c", "#4fa9c4", "#b5655f", "#6b7a8f")
_DPI = 120
_BINS = 60
_SMOOTH_FROM = 8
"""Curves with fewer points are not smoothed."""
_END = 5
"""The ends of a long curve are means over this many steps."""


class StepTimes:
    """Seconds per step by the role that the caller waited for; ``parts`` add up to the step, unless calls overlap.

    ``steps[i]`` is the middle of the i-th group of steps, ``parts[name][i]`` the mean over that group.
    """

    def __init__(self, caller: str, steps: list[float], parts: dict[str, list[float]]) -> None:
        self.caller = caller
        self.steps = steps
        self.parts = parts

    def fraction(self, name: str) -> float:
        """The fraction of all time that ``name`` took, 0 to 1."""
        total = sum(sum(values) for values in self.parts.values())
        return sum(self.parts[name]) / total if total > 0 else 0.0


def draw_report(run_dir: Path) -> Path | None:
    """Draw ``<run_dir>/report.png``: reward, held-out accuracy, KL and the breakdown of the step time.

    Returns:
        The path, or None if nothing was reported, matplotlib cannot be imported, or the disk failed: a
        picture is never a reason for a job to fail, so the reason is only logged.
    """
    records = list(read_records(run_dir / METRICS_FILE))
    if not records:
        return None
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except Exception as error:  # a broken installation may raise anything
        log = logger.info if is_absent("matplotlib", error) else logger.warning
        log("no report was drawn: %s", import_fault("matplotlib", error, "rlmesh[report]"))
        return None
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    figure = Figure(figsize=(12, 7.6), layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    _draw(figure, run_dir.name, records)
    path = run_dir / REPORT_FILE
    try:
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=_DPI)
        private_files.write_whole(path, picture.getvalue())
    except OSError as error:
        logger.warning("the report could not be written to %s: %s", path, error)
        return None
    return path


def step_times(records: Sequence[MetricRecord]) -> StepTimes | None:
    """The breakdown of the steps of the role that waits most for other roles; None if no role called another."""
    callers = TimeUse(records).callers()
    if not callers:
        return None
    caller = callers[0].caller
    own = [record for record in records if record.role == caller]
    timed = [record for record in own if STEP_TIME in record.metrics]
    by_step: dict[int, list[MetricRecord]] = {}
    for record in timed or own:
        by_step.setdefault(record.step, []).append(record)
    rows = [(step, _step_parts(by_step[step])) for step in sorted(by_step)]
    names = [OWN, *(use.role for use in callers[0].roles), RLMESH]
    steps: list[float] = []
    parts: dict[str, list[float]] = {name: [] for name in names}
    size = math.ceil(len(rows) / _BINS)
    for start in range(0, len(rows), size):
        group = rows[start : start + size]
        steps.append((group[0][0] + group[-1][0]) / 2)
        for name in names:
            parts[name].append(sum(row.get(name, 0.0) for _, row in group) / len(group))
    return StepTimes(caller, steps, parts)


def _step_parts(records: Sequence[MetricRecord]) -> dict[str, float]:
    """One step of a role in seconds by awaited role, averaged over the members that reported it."""
    members = len({record.rank for record in records})
    parts: dict[str, float] = {OWN: sum(record.metrics.get(STEP_TIME, 0.0) for record in records)}
    for call in (call for record in records for call in calls_to_roles(record)):
        waited = call.share_s or call.wall_s
        own = min(max(call.overhead_s, 0.0), waited)
        parts[call.role] = parts.get(call.role, 0.0) + waited - own
        parts[RLMESH] = parts.get(RLMESH, 0.0) + own
        parts[OWN] -= waited
    parts[OWN] = max(parts[OWN], 0.0)
    return {name: seconds / members for name, seconds in parts.items()}


def _draw(figure: Any, title: str, records: Sequence[MetricRecord]) -> None:
    curves: dict[str, Curve] = {}
    for record in records:
        for name, value in record.metrics.items():
            if math.isfinite(value):
                curves.setdefault(name, Curve(name)).add(record.step, value)
    seconds = max(record.at for record in records) - min(record.at for record in records)
    span = f"{seconds:.0f} s from the first report to the last"
    figure.suptitle(f"{title}    {span}", x=0.01, ha="left", color=_INK)
    (reward, accuracy), (kl, times) = figure.subplots(2, 2)
    _curve(reward, "reward, mean of the step's samples", "reward_mean", curves, _COLORS[0])
    if "val/reward_mean" in curves:
        _curve(accuracy, "reward, mean of the validation", "val/reward_mean", curves, _COLORS[2], rare=True)
    else:
        _curve(accuracy, "held-out accuracy", "heldout_accuracy", curves, _COLORS[2], rare=True)
    _curve(kl, "KL to the reference policy", "kl", curves, _COLORS[3])
    _breakdown(times, step_times(records))
    steps = [record.step for record in records]
    for axes in (reward, accuracy, kl, times):
        axes.set_xlabel("step", color=_INK)
        axes.set_xlim(min(steps) - 0.5, max(steps) + 0.5)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=_INK)


def _curve(axes: Any, title: str, name: str, curves: Mapping[str, Curve], color: str, *, rare: bool = False) -> None:
    """Draw one metric over the steps; a ``rare`` metric is not reported at each step, so its points are marked."""
    _title(axes, title)
    axes.grid(alpha=0.25)
    if name not in curves:
        _absent(axes, f"{name} was not reported")
        return
    steps, values = zip(*curves[name].points(), strict=True)
    if rare or len(values) < _SMOOTH_FROM:
        ends = values[0], values[-1]
        axes.plot(steps, values, color=color, linewidth=1.8, marker="o", markersize=4, clip_on=False)
    else:
        end = min(_END, 1 + len(values) // 10)
        ends = _mean(values[:end]), _mean(values[-end:])
        axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.35)
        axes.plot(steps, _smooth(values), color=color, linewidth=2)
    axes.set_title(f"{ends[0]:.3g} → {ends[1]:.3g}", loc="right", fontsize=11, color=color, fontweight="bold")
    if min(values) >= 0:
        axes.set_ylim(bottom=0)


def _breakdown(axes: Any, times: StepTimes | None) -> None:
    if times is None:
        _title(axes, "step time")
        _absent(axes, "no calls were reported")
        return
    _title(axes, f"step time of {times.caller} in seconds: waiting for whom")
    names = list(times.parts)
    roles = [name for name in names if name not in (OWN, RLMESH)]
    colors = {role: _COLORS[i % len(_COLORS)] for i, role in enumerate(roles)} | {OWN: _PALE, RLMESH: _RED}
    if len(times.steps) > 1:
        axes.stackplot(times.steps, *times.parts.values(), colors=[colors[n] for n in names], linewidth=0)
    else:
        bottom = 0.0
        for name in names:
            axes.bar(times.steps, times.parts[name], bottom=bottom, color=colors[name], width=0.6)
            bottom += times.parts[name][0]
    axes.margins(y=0.05)
    axes.grid(axis="y", alpha=0.25)
    for name in reversed(names):
        axes.fill_between([], [], [], color=colors[name], label=f"{name}  {100 * times.fraction(name):.1f} %")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)


def _title(axes: Any, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=11, color=_INK)


def _absent(axes: Any, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=_FAINT)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _smooth(values: Sequence[float]) -> list[float]:
    """The mean over a window around each point, narrower at both ends so that it stays centred."""
    half = max(1, len(values) // 30)
    out = []
    for i in range(len(values)):
        reach = min(half, i, len(values) - 1 - i)
        out.append(_mean(values[i - reach : i + reach + 1]))
    return out
