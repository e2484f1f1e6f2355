"""Learning curves of trials as a picture."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmesh.errors import import_fault, is_absent

__all__ = ["CURVES", "draw_curves"]

logger = logging.getLogger(__name__)

CURVES = "curves.png"
NAMED = 12
"""Most trials that the legend names."""
PANELS = (
    ("mean return of the last episodes", "env_runners/episode_return_mean"),
    ("mean length of the last episodes", "env_runners/episode_len_mean"),
    ("mean return of the evaluation", "evaluation/env_runners/episode_return_mean"),
)


def draw_curves(
    path: Path, trials: Mapping[str, Sequence[Mapping[str, Any]]], metric: str | None = None
) -> Path | None:
    """Draw returns, lengths and evaluations over the sampled steps.

    Args:
        path: file of the picture, PNG.
        trials: rows of results by the trial's title.
        metric: a further metric.

    Returns:
        The path; None if there is nothing to draw, or matplotlib cannot be imported (then the log has a line about it).
    """
    panels = [*PANELS, *([("", metric)] if metric and metric not in dict(PANELS).values() else [])]
    curves = {name: {title: _points(rows, name) for title, rows in trials.items()} for _, name in panels}
    shown = [(title or name, curves[name]) for title, name in panels if any(curves[name].values())]
    if not shown:
        return None
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except Exception as error:  # a broken installation may raise anything
        log = logger.info if is_absent("matplotlib", error) else logger.warning
        log("no curves were drawn: %s", import_fault("matplotlib", error, "rlmesh[report]"))
        return None
    figure = Figure(figsize=(6 * len(shown), 4), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    for axes, (title, lines) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        for name, points in lines.items():
            if points:
                axes.plot(*zip(*points, strict=True), label=name, linewidth=1.6, marker="." if len(points) < 3 else "")
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel("environment steps")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if 1 < sum(map(bool, lines.values())) <= NAMED:
            axes.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=110)
    return path


def _points(rows: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    pairs = [(row.get("timesteps_total"), row.get(name)) for row in rows]
    return [(float(x), float(y)) for x, y in pairs if x is not None and y is not None and math.isfinite(y)]
