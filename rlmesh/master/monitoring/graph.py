"""The call graph of a job: vertices are members and roles, edges are calls or dependencies.

Edges are *observed* by the caller's runtime, or *declared* by the job: ``.calls("REWARD")`` of a role, the process
group of an elastic role, a device that roles share. The graph may have cycles. No I/O; the master holds it in its
context, and the store saves it as plain values.

With respect to a failed member, **upstream** are its callers, which wait for it and see the error; **downstream** are
its callees, which do work for it that nobody will fetch. Members of one process group are each other's **peers**: none
of them can go on without the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlmesh.job.status import EdgeStats, GraphEdge
from rlmesh.observe.views.folding import ranks_text

__all__ = ["CallGraph", "Touched", "describe_touched", "graph_lines"]

Kind = Literal["observed", "declared"]


@dataclass(frozen=True, slots=True)
class Touched:
    """Members that a failure affects, each once, nearest first.

    ``upstream`` and ``downstream`` are direct neighbours, ``further_upstream`` are the callers of the upstream;
    ``peers``
    and ``cohabitants`` share a process group, or a device, with a failed member.
    """

    failed: tuple[str, ...]
    upstream: tuple[str, ...] = ()
    further_upstream: tuple[str, ...] = ()
    downstream: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    cohabitants: tuple[str, ...] = ()

    @property
    def all(self) -> frozenset[str]:
        return frozenset((*self.upstream, *self.further_upstream, *self.downstream, *self.peers, *self.cohabitants))


@dataclass(slots=True)
class CallGraph:
    """Vertices and edges of one job. Names of members are ``ROLE:rank``."""

    members: dict[str, str] = field(default_factory=dict)
    """Role by member."""
    _observed: dict[tuple[str, str, str], GraphEdge] = field(default_factory=dict)
    _declared: set[tuple[str, str]] = field(default_factory=set)
    _groups: set[str] = field(default_factory=set)
    _devices: list[frozenset[str]] = field(default_factory=list)
    version: int = 0
    """Incremented with every change of the graph's shape; new counts on known edges do not change it."""

    # Declarations

    def add_member(self, role: str, rank: int) -> None:
        if (name := f"{role}:{rank}") not in self.members:
            self.members[name] = role
            self.version += 1

    def declare(self, caller: str, callee: str) -> None:
        """Declare that members of role ``caller`` call those of role ``callee``."""
        if (caller, callee) not in self._declared:
            self._declared.add((caller, callee))
            self.version += 1

    def declare_group(self, role: str) -> None:
        """Declare that the members of ``role`` are one process group."""
        if role not in self._groups:
            self._groups.add(role)
            self.version += 1

    def declare_collocation(self, members: Iterable[str]) -> None:
        """Declare that these members share a device."""
        sharing = frozenset(members)
        if len(sharing) > 1 and sharing not in self._devices:
            self._devices.append(sharing)
            self.version += 1

    # Observations

    def observe(self, caller: str, edges: Iterable[EdgeStats], at: float) -> None:
        """Add calls that ``caller`` made. ``at``: seconds since the epoch."""
        for edge in edges:
            key = (caller, edge.callee, edge.method)
            known = self._observed.get(key)
            if known is None:
                self.version += 1
                self._observed[key] = GraphEdge(caller, edge, at)
            else:
                self._observed[key] = GraphEdge(caller, known.stats.plus(edge), at)

    # Queries

    def edges(self) -> tuple[GraphEdge, ...]:
        """Return the observed edges, by caller, callee and method."""
        return tuple(self._observed[key] for key in sorted(self._observed))

    def declared(self) -> tuple[tuple[str, str], ...]:
        """Return the declared edges, as pairs of roles."""
        return tuple(sorted(self._declared))

    def groups(self) -> frozenset[str]:
        """Return the roles whose members are one process group."""
        return frozenset(self._groups)

    def devices(self) -> tuple[frozenset[str], ...]:
        """Return the members that share a device, for each shared device."""
        return tuple(self._devices)

    def callers_of(self, member: str) -> frozenset[str]:
        """Return the observed or declared callers of a member."""
        return self._neighbours(member, lambda caller, callee: (callee, caller))

    def callees_of(self, member: str) -> frozenset[str]:
        """Return the observed or declared callees of a member."""
        return self._neighbours(member, lambda caller, callee: (caller, callee))

    def touched_by(self, failed: Iterable[str]) -> Touched:
        """Return the members that the failure of these members affects."""
        names = tuple(dict.fromkeys(failed))
        upstream = self._next(names, self.callers_of, set(names))
        downstream = self._next(names, self.callees_of, set(names))
        peers = [m for m, role in self.members.items() if m not in names and self._is_peer(role, names)]
        sharing = {m for group in self._devices if group & set(names) for m in group} - set(names)
        further: list[str] = []
        wave: tuple[str, ...] = upstream
        reached = {*names, *upstream}
        while wave := self._next(wave, self.callers_of, reached):
            further += wave
        return Touched(names, upstream, tuple(further), downstream, tuple(peers), tuple(sorted(sharing)))

    def reached_from(self, names: Iterable[str]) -> frozenset[str]:
        """Return all members that these call, directly or through others, including their process groups; start
        members only if reached again."""
        calls: dict[str, set[str]] = {}
        for caller, callee, _ in self._observed:
            calls.setdefault(caller, set()).add(callee)
        of_role: dict[str, set[str]] = {}
        for member, role in self.members.items():
            of_role.setdefault(role, set()).add(member)
        declared: dict[str, set[str]] = {}
        for caller, callee in self._declared:
            declared.setdefault(caller, set()).update(of_role.get(callee, ()))
        reached: set[str] = set()
        wave = list(names)
        done = set(wave)
        while wave:
            name = wave.pop()
            role = self._role(name)
            group = of_role.get(role, set()) - {name} if role in self._groups else set()
            for other in (calls.get(name, set()) | declared.get(role, set()) | group) - {name}:
                reached.add(other)
                if other not in done:
                    done.add(other)
                    wave.append(other)
        return frozenset(reached)

    def beside(self, member: str) -> frozenset[str]:
        """Return the members that share a device with a member."""
        return frozenset(name for group in self._devices if member in group for name in group) - {member}

    def _is_peer(self, role: str, names: Iterable[str]) -> bool:
        return role in self._groups and any(self._role(name) == role for name in names)

    def _role(self, member: str) -> str:
        return self.members.get(member) or member.rpartition(":")[0]

    def _next(self, names: Iterable[str], of: Callable[[str], frozenset[str]], seen: set[str]) -> tuple[str, ...]:
        found = sorted({other for name in names for other in of(name)} - seen)
        seen.update(found)
        return tuple(found)

    def _neighbours(self, member: str, ordered: Callable[[str, str], tuple[str, str]]) -> frozenset[str]:
        found = set()
        for caller, callee, _ in self._observed:
            own, other = ordered(caller, callee)
            if own == member:
                found.add(other)
        role = self._role(member)
        for caller, callee in self._declared:
            own, other = ordered(caller, callee)
            if own == role:
                found |= {name for name, its in self.members.items() if its == other}
        return frozenset(found - {member})

    # Serialisation

    def plain(self) -> dict[str, Any]:
        """Return the graph as lists, texts and numbers."""
        return {
            "version": self.version,
            "members": dict(self.members),
            "declared": [list(pair) for pair in self.declared()],
            "groups": sorted(self._groups),
            "devices": [sorted(group) for group in self._devices],
            "observed": [edge.plain() for edge in self.edges()],
        }

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> CallGraph:
        """Return the graph of the values that ``plain`` made."""
        edges = [GraphEdge.of_plain(item) for item in plain["observed"]]
        return cls(
            members=dict(plain["members"]),
            _observed={(edge.caller, edge.callee, edge.method): edge for edge in edges},
            _declared={(caller, callee) for caller, callee in plain["declared"]},
            _groups=set(plain["groups"]),
            _devices=[frozenset(group) for group in plain["devices"]],
            version=int(plain["version"]),
        )


def describe_touched(touched: Touched) -> str:
    """Return a text such as ``REWARD:0 is called by TRAINER:0 and calls nobody``."""
    who = ", ".join(touched.failed)
    verb = "is" if len(touched.failed) == 1 else "are"
    parts = [f"{who} {verb} called by {', '.join(touched.upstream) or 'nobody'}"]
    if touched.further_upstream:
        parts[0] += f" (and through them by {', '.join(touched.further_upstream)})"
    parts.append(f"and {'calls' if verb == 'is' else 'call'} {', '.join(touched.downstream) or 'nobody'}")
    if touched.peers:
        parts.append(f"its process group: {', '.join(touched.peers)}")
    if touched.cohabitants:
        parts.append(f"on its device: {', '.join(touched.cohabitants)}")
    return f"{parts[0]} {parts[1]}" + "".join(f"; {part}" for part in parts[2:])


def graph_lines(graph: CallGraph) -> list[str]:
    """Return the graph as text lines: per calling role, called role and method, all members together."""
    sums: dict[tuple[str, str, str], tuple[set[str], set[str], EdgeStats]] = {}
    for edge in graph.edges():
        key = (edge.caller.rpartition(":")[0], edge.callee.rpartition(":")[0], edge.method)
        callers, callees, known = sums.get(key, (set(), set(), EdgeStats("", edge.method, 0, 0, 0, 0, 0, 0, 0)))
        callers.add(edge.caller.rpartition(":")[2])
        callees.add(edge.callee.rpartition(":")[2])
        sums[key] = (callers, callees, known.plus(edge.stats))
    lines = []
    for (caller, callee, method), (callers, callees, stats) in sums.items():
        arrow = f"{caller}:{ranks_text(callers)} → {callee}:{ranks_text(callees)}"
        lost = f", {stats.failed} unanswered" if stats.failed else ""
        lines.append(
            f"{arrow}  {method}  {stats.calls} calls{lost}, {1000 * stats.wall_s / stats.calls:.1f} ms each, "
            f"{1000 * stats.method_s / stats.calls:.1f} ms in the method, {_mib(stats.sent_bytes)} there, "
            f"{_mib(stats.received_bytes)} back"
        )
    observed = {key[:2] for key in sums}
    lines += [f"{caller} → {callee}  declared, no call yet" for caller, callee in graph.declared()
              if (caller, callee) not in observed]  # fmt: skip
    return lines or ["no call was seen yet"]


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
