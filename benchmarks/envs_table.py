"""The table of benchmarks/envs_compare.py."""

from __future__ import annotations

import math
import statistics
from typing import Any

from compare import t_95
from envs_results import Measured
from envs_rows import ROWS, EnvRow

__all__ = ["table", "verdicts"]

Found = list[dict[str, Any]]


def values(row: EnvRow, found: Found) -> list[float]:
    """The numbers of a row; one that was stopped before its goal is worse than all others."""
    worst = 0.0 if row.higher else math.inf
    return [worst if each.get("reached") is False else float(each[row.key]) for each in found if row.key in each]


def middle(row: EnvRow, found: Found) -> float:
    """The median, NaN if nothing was measured."""
    numbers = values(row, found)
    return statistics.median(numbers) if numbers else math.nan


def least(row: EnvRow, found: Found) -> float:
    """Where the median is that of trainings that were stopped: the least that it can be."""
    return statistics.median(float(each[row.key]) for each in found if row.key in each)


def verdicts(name: str, measured: Measured) -> list[str]:
    """One text per goal of a row: the ratio, its goal, and whether it is met."""
    row = ROWS[name]
    own = middle(row, _found(measured, name, "rlmesh"))
    sources = [(other, peer) for other in (name, *row.also) for peer in ROWS[other].peers]
    medians = {
        (other, peer): middle(ROWS[other], _found(measured, other, peer)) for other, peer in sources
    }  # fmt: skip
    known = {source: value for source, value in medians.items() if not math.isnan(value)}
    texts = []
    for against, goal in row.goals.items():
        if against == "noise":
            texts.append(_noise(values(row, _found(measured, name, "rlmesh")), goal))
            continue
        sign = ">=" if row.higher else "<" if goal == 1 else "<="
        if against == "rlmesh":
            texts.append(_verdict(own, goal, row, f"{sign} {goal:g} {row.unit}"))
            continue
        if against == "best":
            if not known:
                texts.append(f"{sign} {goal:.3g} x the best peer: not measured")
                continue
            best = (max if row.higher else min)(known, key=lambda source: known[source])
            to, text = known[best], f"{sign} {goal:.3g} x the best, {best[1]}"
            missing = sorted({peer for _, peer in medians.keys() - known.keys()})
            text += f" (without {', '.join(missing)})" if missing else ""
        else:
            to, text = medians[name, against], f"{sign} {goal:.3g} x {against}"
        if math.isinf(to) and not math.isinf(own):  # the peer's median did not get there
            texts.append(f"{text}: met, it did not get there")
        else:
            texts.append(_verdict(own / to if to else math.nan, goal, row, text))
    return texts


def _noise(numbers: list[float], goal: float) -> str:
    """Whether the 95 % interval of the mean, by Student's t, has the goal in it."""
    if len(numbers) < 3:
        return f"{goal:g} in the 95 % interval of the mean: needs three seeds"
    mean, half = statistics.mean(numbers), t_95(len(numbers) - 1) * statistics.stdev(numbers) / len(numbers) ** 0.5
    met = mean - half <= goal <= mean + half
    return f"{goal:g} in [{mean - half:.1f}, {mean + half:.1f}], 95 % of the mean: {'met' if met else 'MISSED'}"


def _verdict(value: float, goal: float, row: EnvRow, text: str) -> str:
    if math.isnan(value):
        return f"{text}: not measured"
    met = value >= goal if row.higher else value < goal if goal == 1 else value <= goal
    return f"{text}: {value:.2f}, {'met' if met else 'MISSED'}"


def _found(measured: Measured, name: str, library: str) -> Found:
    return list(measured.get(name, {}).get(library, {}).values())


def table(measured: Measured) -> str:
    """The results as text: a line per row and library, then the goals of the row."""
    lines = [f"{'':<34}{'':<11}{'median':>12} {'unit':<10}{'min … max':>24}{'seeds':>7}{'minutes':>9}"]
    loads: list[float] = []
    for name in (name for name in ROWS if name in measured):
        row = ROWS[name]
        for library in (each for each in ("rlmesh", *row.peers, *row.beside) if each in measured[name]):
            found = _found(measured, name, library)
            loads += [each["load"] for each in found if "load" in each]
            lines.append(f"{row.title:<34}{library:<11}" + _line(row, found))
        lines += [f"{'':<36}goal {text}" for text in verdicts(name, measured)]
    if loads:
        lines.append(f"load when a measurement began: median {statistics.median(loads):.1f}, most {max(loads):.1f}")
    return "\n".join(lines)


def _line(row: EnvRow, found: Found) -> str:
    numbers = values(row, found)
    if not numbers:
        return f"{'failed':>12} {found[-1].get('failed', 'no number')}"
    median, known = statistics.median(numbers), [value for value in numbers if not math.isinf(value)]
    shown = f">{_shown(least(row, found))}" if math.isinf(median) else _shown(median)
    span = f"{_shown(min(known))} … {_shown(max(known))}" if known else ""
    minutes = sum(each.get("took_s", 0.0) for each in found) / 60
    notes = []
    if stopped := [each for each in found if each.get("reached") is False]:
        limits = ", ".join(sorted({each.get("stopped", "its end") for each in stopped}))
        means = ", ".join(str(each.get("mean")) for each in stopped)
        notes.append(f"{len(stopped)} of {len(numbers)} did not get there: {limits}; mean return {means}")
    if failed := [each["failed"] for each in found if "failed" in each]:
        notes.append(f"{len(failed)} failed: {failed[-1]}")
    note = "  " + "; ".join(notes) if notes else ""
    return f"{shown:>12} {row.unit:<10}{span:>24}{len(numbers):>7}{minutes:>9.1f}{note}"


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"
