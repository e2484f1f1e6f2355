"""The rows of benchmarks/rpc.py, and the table that they make."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

OURS = "rlmesh"
RIVALS = ("ray", "xoscar", "monarch")
"""Whom the ratios compare rlmesh with; bare sockets stand beside."""


@dataclass(frozen=True)
class Row:
    key: str
    title: str
    unit: str
    better: Literal["lower", "higher"]
    compared: bool = True
    """Whether a ratio means anything: growth near nothing has none."""


def _lower(key: str, title: str, unit: str, *, compared: bool = True) -> Row:
    return Row(key, title, unit, "lower", compared)


def _higher(key: str, title: str, unit: str) -> Row:
    return Row(key, title, unit, "higher")


ROWS = (
    _lower("echo", "echo, caller's loop to async def, p50", "µs"),
    _lower("echo_def", "echo, caller's loop to def, p50", "µs"),
    _lower("echo_worker", "echo, worker's coroutine to async def, p50", "µs"),
    _lower("echo_thread", "echo, plain thread to async def, p50", "µs"),
    _lower("echo_service", "echo, service's loop to async def of a job it started, p50", "µs"),
    _lower("echo_joined", "echo, service's loop to async def of a job it joined, p50", "µs"),
    _lower("echo_trainer", "echo, trainer's run() to async def of its job, p50", "µs"),
    _higher("pipelined", "windows of 1,000 to async def", "calls/s"),
    _higher("pipelined_def", "windows of 1,000 to def", "calls/s"),
    _lower("group", "group call to 8, p50", "µs"),
    _higher("tensor_in_1", "tensor of 1 MiB to a member", "GB/s"),
    _higher("tensor_out_1", "tensor of 1 MiB back", "GB/s"),
    _higher("tensor_in_64", "tensor of 64 MiB to a member", "GB/s"),
    _higher("tensor_out_64", "tensor of 64 MiB back", "GB/s"),
    _higher("tensor_in_512", "tensor of 512 MiB to a member", "GB/s"),
    _higher("tensor_out_512", "tensor of 512 MiB back", "GB/s"),
    _higher("tensor_to_all", "tensor of 64 MiB to 8, in all", "GB/s"),
    _lower("members_1", "first member up, from nothing", "s"),
    _lower("members_8", "8 members up", "s"),
    _lower("death", "100 waiting calls see SIGKILL", "ms"),
    _lower("memory_caller", "70,000 calls, caller grows by", "MB", compared=False),
    _lower("memory_member", "70,000 calls, member grows by", "MB", compared=False),
    _lower("memory_peak", "70,000 calls, peak above the start", "MB", compared=False),
    _lower("calls_lost", "70,000 calls, lost", "calls", compared=False),
    _lower("import_time", "import", "ms"),
    _lower("import_modules", "modules that the import loads", "modules"),
    _lower("import_heavy", "of torch, numpy, pydantic, zmq", "modules", compared=False),
)


@dataclass
class Results:
    """What the runs gave, by peer and row."""

    values: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    errors: dict[tuple[str, str], str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    """Peers that could not be measured at all, and why."""

    def add(self, peer: str, row: str, value: float) -> None:
        self.values.setdefault((peer, row), []).append(value)

    def value(self, peer: str, row: str) -> float | None:
        """The median of the runs."""
        runs = self.values.get((peer, row))
        return statistics.median(runs) if runs else None

    def times_better(self, row: Row, rivals: Sequence[str]) -> float | None:
        """How many times better rlmesh is than the best of ``rivals``; below 1 it is worse."""
        ours = self.value(OURS, row.key)
        theirs = [value for rival in rivals if (value := self.value(rival, row.key)) is not None]
        if not row.compared or ours is None or not theirs or min(ours, *theirs) <= 0:
            return None
        return min(theirs) / ours if row.better == "lower" else ours / max(theirs)

    def lines(self, peers: Sequence[str], rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
        """One object per figure, for a file."""
        for row in rows:
            for peer in peers:
                line: dict[str, Any] = {
                    "row": row.key, "title": row.title, "unit": row.unit, "better": row.better, "peer": peer,
                    "value": self.value(peer, row.key), "runs": self.values.get((peer, row.key), []),
                }  # fmt: skip
                if (error := self.absent.get(peer) or self.errors.get((peer, row.key))) is not None:
                    line["error"] = error
                if peer == OURS:
                    line["times_best_peer"] = self.times_better(row, RIVALS)
                    line["times_ray"] = self.times_better(row, ("ray",))
                yield line


def table(results: Results, peers: Sequence[str], rows: Sequence[Row]) -> str:
    """The figures side by side, how many times better rlmesh is, and why a figure is missing."""
    ratios: Mapping[str, Sequence[str]] = {"× best": RIVALS, "× ray": ("ray",)} if OURS in peers else {}
    lines = [["", "", *peers, *ratios]]
    for row in rows:
        figures = [_number(results.value(peer, row.key)) for peer in peers]
        times = [_times(results.times_better(row, rivals)) for rivals in ratios.values()]
        lines.append([row.title, row.unit, *figures, *times])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in enumerate(pairs)).rstrip()
        for line in lines
        if (pairs := list(zip(line, widths, strict=True)))
    ]
    text += [f"{peer}: not measured: {why}" for peer, why in results.absent.items() if peer in peers]
    titles = {row.key: row.title for row in rows}
    for (peer, key), why in results.errors.items():
        if peer in peers and key in titles and results.value(peer, key) is None:
            text.append(f"{peer}, {titles[key]}: {why.partition(chr(10))[0]}")
    return "\n".join(text)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _times(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 20 else f"{value:.1f}" if value >= 2 else f"{value:.2f}"
