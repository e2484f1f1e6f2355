"""Deadlock detection: members that wait for each other in a circle. No I/O: reports of waits in, circles out.

The graph has two kinds of vertices. A *holder* is a running call, a ``setup()`` or a ``run()`` that waits for answers:
it continues only when it has all of them. A *queued call* begins when any of the holders before it has ended. The
search starts from the processes that are not known to wait: they can continue. It removes, step by step, each vertex
that can continue once those removed before have ended. The vertices that remain wait for ever.

Such a state ends only by a deadline or a cancellation. A report of that may still be on its way, so a circle counts
only if each of its processes has reported it a second time after it was first found.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from rlmesh.runtime.serving.wait_report import BlockedCalls, CallKey, Holder, QueuedCall

__all__ = ["Circle", "CircleWatch", "circles_in"]

FRESH_S = 5.0
"""Seconds for which a report is valid; a blocked process reports about once a second."""
DRAWN = 8

Vertex = tuple[str, str]
"""Name of a process, and key of a holder in it."""


@dataclass(frozen=True, slots=True)
class Circle:
    """Members that wait for each other, in this order.

    Attributes:
        calls: queued calls that can never begin, each with the process where it is queued.
    """

    vertices: tuple[Vertex, ...]
    members: tuple[str, ...]
    calls: tuple[tuple[str, CallKey], ...]
    text: str

    @property
    def processes(self) -> frozenset[str]:
        return frozenset(process for process, _ in self.vertices)


class _Waits:
    """The wait graph of one moment."""

    def __init__(self, reports: Mapping[str, BlockedCalls]) -> None:
        self.holders: dict[Vertex, Holder] = {}
        self.queued: dict[CallKey, tuple[str, QueuedCall]] = {}
        self.running: dict[CallKey, Vertex] = {}
        for process, report in reports.items():
            for holder in report.holders:
                self.holders[process, holder.key] = holder
                if holder.serves is not None:
                    self.running[holder.serves] = process, holder.key
            for queued in report.queued:
                self.queued[queued.call] = process, queued

    def before(self, call: CallKey) -> tuple[Vertex, ...]:
        """Return the holders of which one must end before a call can be answered; empty if the call is unknown."""
        if call in self.running:
            return (self.running[call],)
        if call not in self.queued:
            return ()
        process, queued = self.queued[call]
        return tuple((process, key) for key in queued.behind)

    def stuck(self) -> set[Vertex]:
        """Return the holders that can never continue."""
        left = set(self.holders)
        while True:
            free = {
                vertex for vertex in left if not any(self._lost(call, left) for call in self.holders[vertex].waits_for)
            }
            if not free:
                return left
            left -= free

    def _lost(self, call: CallKey, stuck: Collection[Vertex]) -> bool:
        before = self.before(call)
        return bool(before) and all(vertex in stuck for vertex in before)

    def next_of(self, vertex: Vertex, stuck: Collection[Vertex]) -> dict[Vertex, CallKey]:
        """Return the stuck holders that a stuck holder waits for, each with the call."""
        return {
            other: call
            for call in self.holders[vertex].waits_for
            if self._lost(call, stuck)
            for other in self.before(call)
        }


def circles_in(reports: Mapping[str, BlockedCalls]) -> list[Circle]:
    """Return the circles in the reports of processes, by process name; each holder is in at most one circle."""
    waits = _Waits(reports)
    stuck = waits.stuck()
    found: list[Circle] = []
    taken: set[Vertex] = set()
    for start in sorted(stuck):
        path = _path_back(waits, stuck - taken, start)
        if path and not taken & set(path):
            taken |= set(path)
            found.append(_circle(waits, path, stuck))
    return found


def _path_back(waits: _Waits, stuck: Collection[Vertex], start: Vertex) -> list[Vertex]:
    """Return the shortest path from a holder back to itself; empty if there is none."""
    came_from: dict[Vertex, Vertex] = {}
    wave = [start] if start in stuck else []
    while wave:
        ahead: list[Vertex] = []
        for vertex in wave:
            for other in sorted(waits.next_of(vertex, stuck)):
                if other == start:
                    path = [vertex]
                    while path[-1] != start:
                        path.append(came_from[path[-1]])
                    return path[::-1]
                if other in stuck and other not in came_from:
                    came_from[other] = vertex
                    ahead.append(other)
        wave = ahead
    return []


def _circle(waits: _Waits, path: list[Vertex], stuck: Collection[Vertex]) -> Circle:
    names: list[str] = []
    sentences: list[str] = []
    calls: list[tuple[str, CallKey]] = []
    for place, vertex in enumerate(path):
        holder, other = waits.holders[vertex], path[(place + 1) % len(path)]
        call = waits.next_of(vertex, stuck)[other]
        names.append(_member_of(holder, vertex))
        behind = waits.holders[other]
        if call in waits.queued:
            process, queued = waits.queued[call]
            asked = queued.what
            calls.append((process, call))
            sentences.append(f"{holder.what} waits for {asked}, which is queued behind {behind.what}")
        else:
            sentences.append(f"{holder.what} waits for {behind.what}")
    shown = names if len(names) <= DRAWN else [*names[: DRAWN - 1], f"({len(names) - DRAWN + 1} more)"]
    since_s = min(waits.holders[vertex].since_s for vertex in path)
    drawn = " → ".join([*shown, names[0]])
    text = (
        f"{drawn} wait for each other in a circle, for {since_s:.1f} s: {'; '.join(sentences[:DRAWN])}. Return the "
        "value instead of calling back, or make the method that is called `async def` or @rpc(concurrent=n)"
    )
    return Circle(tuple(path), tuple(names), tuple(calls), text)


def _member_of(holder: Holder, vertex: Vertex) -> str:
    """Return ``A:0`` for ``A:0.go()``: in a process with several roles, the member is shown."""
    return holder.what.partition(".")[0] or vertex[0]


@dataclass(slots=True)
class _Report:
    incarnation: int
    number: int
    at: float
    blocked: BlockedCalls


@dataclass(slots=True)
class CircleWatch:
    """Watches one job for circles. Times are seconds of one monotonic clock."""

    _reports: dict[str, _Report] = field(default_factory=dict)
    _seen: dict[Circle, dict[str, int]] = field(default_factory=dict)
    """Circles found once, with the number of each process's report at that time."""
    _numbers: int = 0

    def take(self, process: str, incarnation: int, blocked: BlockedCalls, now: float) -> list[Circle]:
        """Record a process's report; return the circles that are certain now, each once."""
        self._numbers += 1
        if blocked:
            self._reports[process] = _Report(incarnation, self._numbers, now, blocked)
        else:
            self._reports.pop(process, None)
        self._reports = {name: report for name, report in self._reports.items() if now - report.at <= FRESH_S}
        found = circles_in({name: report.blocked for name, report in self._reports.items()})
        known = {circle.calls: numbers for circle, numbers in self._seen.items()}
        certain = [circle for circle in found if self._is_certain(circle, known.get(circle.calls))]
        self._seen = {
            # The same calls may form a circle through other processes, which must then report again.
            circle: {name: self._reports[name].number for name in circle.processes} | dict(known.get(circle.calls, {}))
            for circle in found
            if circle not in certain
        }
        for circle in certain:
            for name in circle.processes:
                self._reports.pop(name, None)  # the report is outdated once the circle is broken
        return certain

    def _is_certain(self, circle: Circle, first: Mapping[str, int] | None) -> bool:
        return first is not None and all(
            name in first and self._reports[name].number > first[name] for name in circle.processes
        )

    def keep(self, living: Mapping[str, int]) -> None:
        """Drop the reports of processes that have ended or were replaced. ``living``: incarnation by name."""
        self._reports = {
            name: report for name, report in self._reports.items() if living.get(name) == report.incarnation
        }

    def circles(self) -> list[Circle]:
        """Return the circles that were found last."""
        return list(self._seen)
