"""Drawings of the call graph: DOT for Graphviz, or Mermaid for Markdown. No I/O.

Each role is a box, each pair of roles with calls an arrow labelled with the methods; a dashed arrow is a declared call
that was not observed yet. A double frame is a process group, a dotted line without a head joins roles that share a
device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rlmesh.master.monitoring.graph import CallGraph, graph_lines

__all__ = ["FORMATS", "Format", "drawn"]

Format: TypeAlias = Literal["text", "dot", "mermaid"]
FORMATS: tuple[Format, ...] = ("text", "dot", "mermaid")
SHOWN_METHODS = 4


@dataclass(frozen=True, slots=True)
class _Picture:
    """The content of a drawing.

    Attributes:
        roles: number of members of each role.
        groups: roles that are process groups.
        seen: number of calls of each method, by caller and callee.
        declared: pairs of roles without a call so far.
        shared: pairs of roles with members on the same device.
    """

    roles: Mapping[str, int]
    groups: frozenset[str]
    seen: Mapping[tuple[str, str], Mapping[str, int]]
    declared: tuple[tuple[str, str], ...]
    shared: tuple[tuple[str, str], ...]


def drawn(graph: CallGraph, how: Format) -> list[str]:
    """Return the lines of the drawing, or of the text."""
    if how == "text":
        return [*graph_lines(graph), *_facts(_picture(graph))]
    makers: dict[Format, Callable[[_Picture], Iterator[str]]] = {"dot": _dot, "mermaid": _mermaid}
    return list(makers[how](_picture(graph)))


def _picture(graph: CallGraph) -> _Picture:
    seen: dict[tuple[str, str], Counter[str]] = {}
    roles = Counter(graph.members.values())
    for edge in graph.edges():
        pair = (_role(edge.caller), _role(edge.callee))
        seen.setdefault(pair, Counter())[edge.method] += edge.stats.calls
        for role in pair:  # the driver makes calls too, and is not a member
            roles.setdefault(role, 0)
    shared = {
        (one, other)
        for device in graph.devices()
        for one in map(_role, device)
        for other in map(_role, device)
        if one < other
    }
    return _Picture(
        roles, graph.groups(), seen, tuple(pair for pair in graph.declared() if pair not in seen),
        tuple(sorted(shared)),
    )  # fmt: skip


def _role(member: str) -> str:
    return member.rpartition(":")[0] or member


def _facts(picture: _Picture) -> Iterator[str]:
    for role in sorted(picture.groups):
        yield f"{role}  {picture.roles.get(role, 0)} members in one process group"
    for one, other in picture.shared:
        yield f"{one} and {other}  share a device"


def _size(picture: _Picture, role: str) -> str:
    members = picture.roles[role]
    return f"{role} × {members}" if members > 1 else role


def _methods(calls: Mapping[str, int]) -> list[str]:
    """Return the most called methods, and the number of the others."""
    most = sorted(calls.items(), key=lambda item: (-item[1], item[0]))
    lines = [f"{method} × {count}" for method, count in most[:SHOWN_METHODS]]
    return [*lines, *([f"and {len(most) - SHOWN_METHODS} more"] if len(most) > SHOWN_METHODS else [])]


def _dot(picture: _Picture) -> Iterator[str]:
    def quoted(*lines: str) -> str:
        return '"' + "\\n".join(line.replace("\\", "\\\\").replace('"', '\\"') for line in lines) + '"'

    yield "digraph calls {"
    yield "  node [shape=box];"
    for role in picture.roles:
        frame = ", peripheries=2" if role in picture.groups else ""
        yield f"  {quoted(role)} [label={quoted(_size(picture, role))}{frame}];"
    for (caller, callee), calls in picture.seen.items():
        yield f"  {quoted(caller)} -> {quoted(callee)} [label={quoted(*_methods(calls))}];"
    for caller, callee in picture.declared:
        yield f"  {quoted(caller)} -> {quoted(callee)} [style=dashed];"
    for one, other in picture.shared:
        yield f"  {quoted(one)} -> {quoted(other)} [style=dotted, dir=none, label={quoted('share a device')}];"
    yield "}"


def _mermaid(picture: _Picture) -> Iterator[str]:
    names = {role: f"r{number}" for number, role in enumerate(picture.roles)}

    def quoted(*lines: str) -> str:
        return '"' + "<br>".join(line.replace("&", "&amp;").replace('"', "&quot;") for line in lines) + '"'

    yield "flowchart TD"
    for role, name in names.items():
        text = quoted(_size(picture, role))
        yield f"  {name}[[{text}]]" if role in picture.groups else f"  {name}[{text}]"
    for (caller, callee), calls in picture.seen.items():
        yield f"  {names[caller]} -->|{quoted(*_methods(calls))}| {names[callee]}"
    for caller, callee in picture.declared:
        yield f"  {names[caller]} -.-> {names[callee]}"
    for one, other in picture.shared:
        yield f"  {names[one]} -.-|{quoted('share a device')}| {names[other]}"
