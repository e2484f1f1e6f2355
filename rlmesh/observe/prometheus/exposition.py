"""Prometheus' text format, as its servers read it. Pure.

Version 0.0.4: https://prometheus.io/docs/instrumenting/exposition_formats/. A family has a name, a help text, a type
and samples; a sample has labels and a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["CONTENT_TYPE", "Family", "exposition", "label_safe"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(slots=True)
class Family:
    """One metric with all its label sets. Names of counters end in ``_total``."""

    name: str
    help: str
    type: Literal["gauge", "counter"] = "gauge"
    samples: list[tuple[dict[str, str], float]] = field(default_factory=list)

    def add(self, value: float, **labels: object) -> None:
        self.samples.append(({name: str(text) for name, text in labels.items()}, float(value)))


def exposition(families: Iterable[Family]) -> str:
    """The text of all families that have samples."""
    lines: list[str] = []
    for family in families:
        if not family.samples:
            continue
        lines.append(f"# HELP {family.name} {_escaped(family.help, quotes=False)}")
        lines.append(f"# TYPE {family.name} {family.type}")
        lines += [f"{family.name}{_labels(labels)} {_number(value)}" for labels, value in family.samples]
    return "\n".join(lines) + "\n"


def label_safe(text: str) -> str:
    """``text`` with what a metric's name cannot hold replaced by ``_``."""
    safe = "".join(char if char.isascii() and (char.isalnum() or char in "_:") else "_" for char in text)
    return f"_{safe}" if not safe or safe[0].isdigit() else safe


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items()) + "}"


def _escaped(text: str, *, quotes: bool = True) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(int(value)) if value == int(value) and abs(value) < 2**53 else repr(value)
