"""Lines about trials in the terminal: coloured where the output is a terminal, plain elsewhere."""

from __future__ import annotations

import math
import sys
from typing import Any

from rlmesh.envs import ResultDict
from rlmesh.observe.views.safe_text import shown
from rlmesh.tune.trial import Trial

__all__ = ["result_line", "say"]


def result_line(trial: Trial, *, titled: bool) -> str:
    """One iteration of a trial as text.

    Args:
        titled: begin with the trial's number and values.
    """
    result = trial.last_result
    steps, iteration = result["timesteps_total"], result["training_iteration"]
    parts = [f"{trial.algorithm} {iteration}: {steps} steps", f"{_returns(result)}"]
    evaluation = result.get("evaluation")
    if evaluation:
        parts.append(f"evaluation {_number(evaluation['env_runners']['episode_return_mean'])}")
    parts.append(f"{result['time_total_s']:.1f} s")
    return f"{trial.title}  {', '.join(parts)}" if titled else ", ".join(parts)


def _returns(result: ResultDict) -> str:
    mean: float = result["env_runners"]["episode_return_mean"]
    return "no episode has ended" if math.isnan(mean) else f"mean return {mean:.1f}"


def _number(value: float) -> str:
    return "without an episode" if math.isnan(value) else f"{value:.1f}"


def say(text: str, *, style: str = "") -> None:
    """Print a line at once; on a terminal, numbers are highlighted, and ``style`` is that of rich."""
    if not sys.stdout.isatty():
        print(shown(text, lines=True), flush=True)
        return
    from rich.console import Console
    from rich.text import Text

    console: Any = Console(soft_wrap=True)
    line = Text(shown(text, lines=True), style=style)
    if not style:
        console.highlighter.highlight(line)
    console.print(line)
