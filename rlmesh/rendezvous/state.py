"""How the nodes of a job find each other: who has joined, who is missing, what each is told to do. No I/O.

The first node's ``launch`` (the *head*, :mod:`rlmesh.rendezvous.server`) keeps the roster; the others
(:mod:`rlmesh.rendezvous.client`) join it, and then ask for their orders until the head says that it is over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from rlmesh.agent.machine_checks import Facts
from rlmesh.agent.protocol import AgentConfig
from rlmesh.errors import LaunchError

PROBE = "@probe"
"""Name under which a node answers the others' tries to reach it."""
RENDEZVOUS = "@rendezvous"
"""Name under which the head serves its control object."""
DEFAULT_PORT = 29400
"""Port of the head where the endpoint names none; torchrun's."""
SILENT_S = 10.0
"""A node that has not asked for orders for so long may be replaced by another one with its rank, before the start."""
ANY_RANK = -1


@dataclass(frozen=True, slots=True)
class NodeHello:
    """What a node says when it joins.

    Attributes:
        token: random, made once per ``launch``; a node that joins again is known by it.
        node_rank: the rank that it wants, ``ANY_RANK`` for the lowest that is free.
        name: of the host, for messages.
        host: its numeric address, at which the processes of other nodes are to reach its own.
        head_host: the numeric address by which it reached the head.
        pid: of its ``launch``.
        version: of rlmesh.
        nnodes: how many nodes it was told that there are; 0 if it was not told.
        group: equal for nodes that are one machine; empty for a machine of its own.
        probe: where it listens for other nodes' tries to reach it, before the job starts.
        facts: what it has, for checks before the start.
    """

    token: str
    node_rank: int
    name: str
    host: str
    head_host: str
    pid: int
    version: str
    nnodes: int = 0
    group: str = ""
    probe: str = ""
    facts: Facts | None = None


@dataclass(frozen=True, slots=True)
class Joined:
    node_rank: int
    nnodes: int


@dataclass(frozen=True, slots=True)
class ProbeNodes:
    """Try to reach these nodes: rank and address of each; and the head."""

    targets: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Start:
    """Start an agent. What only the node knows (its folder of sockets) is not filled in."""

    job: str
    config: AgentConfig


@dataclass(frozen=True, slots=True)
class Follow:
    """Print the logs of these members of the node: name and path of each."""

    job: str
    members: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ReleaseAgent:
    """Let go of the agent of a job: the job has ended."""

    job: str


@dataclass(frozen=True, slots=True)
class Over:
    """Nothing more will come: exit with ``code``."""

    code: int
    why: str = ""


Order: TypeAlias = ProbeNodes | Start | Follow | ReleaseAgent | Over


@dataclass(slots=True)
class NodeEntry:
    """A node that has joined. ``orders`` only grow; the node asks for those after the ones that it has seen. ``gone``:
    it ended after the start, and another machine may take its rank."""

    hello: NodeHello
    node_rank: int
    joined_at: float
    seen_at: float
    orders: list[Order] = field(default_factory=list)
    gone: bool = False

    @property
    def label(self) -> str:
        return f"{self.node_rank} ({self.hello.name}, {self.hello.host}, pid {self.hello.pid})"


class Roster:
    """The nodes that have joined. The head itself is node 0.

    Args:
        least, most: how many nodes the job starts with; with ``least`` of them it waits ``last_call_s`` for more.
        head: how the head is called in messages.
        now: seconds of a clock that only grows.
    """

    def __init__(self, least: int, most: int, head: str, version: str, *, last_call_s: float = 30.0) -> None:
        self.least, self.most = least, most
        self._head, self._version, self._last_call_s = head, version, last_call_s
        self._nodes: dict[int, NodeEntry] = {}
        self._changed_at = 0.0
        self.closed = False
        """Whether the job has started with those that are there."""

    def __len__(self) -> int:
        return len(self._nodes) + 1

    def nodes(self) -> list[NodeEntry]:
        """All but the head, by rank."""
        return sorted(self._nodes.values(), key=lambda node: node.node_rank)

    def find(self, token: str) -> NodeEntry | None:
        return next((node for node in self._nodes.values() if node.hello.token == token), None)

    def join(self, hello: NodeHello, now: float) -> NodeEntry:
        """Take a node in; one that is known stays as it is.

        Raises:
            LaunchError: it cannot be part of this job; says why and what to do.
        """
        known = self.find(hello.token)
        if known is not None:
            known.seen_at = now
            return known
        self._check(hello)
        rank = hello.node_rank if hello.node_rank != ANY_RANK else self._free_rank(hello)
        there = self._nodes.get(rank)
        replaces = there is not None and there.gone
        if there is not None and not replaces and (self.closed or now - there.seen_at < SILENT_S):
            raise LaunchError(
                f"node rank {rank} of {hello.name} ({hello.host}, pid {hello.pid}) is taken: node {there.label} has "
                f"joined {now - there.joined_at:.0f} s ago. Give each node its own --node-rank, 1 to {self.most - 1}"
            )
        if self.closed and not replaces and len(self) >= self.most:
            raise LaunchError(f"the job has started with all of its {len(self)} nodes; {hello.name} is one too many")
        entry = NodeEntry(hello, rank, now, now)
        self._nodes[rank] = entry
        self._changed_at = now
        return entry

    def _check(self, hello: NodeHello) -> None:
        if hello.version != self._version:
            raise LaunchError(
                f"node {hello.name} ({hello.host}) has rlmesh {hello.version}, the head {self._head} has "
                f"{self._version}: install the same version everywhere"
            )
        if hello.nnodes and not self.least <= hello.nnodes <= self.most:
            raise LaunchError(
                f"node {hello.name} ({hello.host}) was told of {hello.nnodes} nodes, the head {self._head} of "
                f"{self._size()}: give the same --nnodes everywhere"
            )
        if hello.node_rank != ANY_RANK and not 0 < hello.node_rank < self.most:
            what = "is the head itself" if hello.node_rank == 0 else f"is not one of {self._size()} nodes"
            raise LaunchError(
                f"node rank {hello.node_rank} of {hello.name} ({hello.host}) {what}: ranks of the others are 1 to "
                f"{self.most - 1}"
            )

    def _free_rank(self, hello: NodeHello) -> int:
        free = [rank for rank in range(1, self.most) if rank not in self._nodes or self._nodes[rank].gone]
        if not free:
            raise LaunchError(f"all {self.most} nodes are there; {hello.name} ({hello.host}) is one too many")
        return free[0]

    def leave(self, token: str, now: float) -> None:
        """A node has gone by itself; its rank is free again."""
        entry = self.find(token)
        if entry is not None and self.closed:
            entry.gone = True
        elif entry is not None:
            del self._nodes[entry.node_rank]
            self._changed_at = now

    def drop_silent(self, now: float) -> list[NodeEntry]:
        """Forget nodes that do not ask any more, before the start; gives them."""
        silent = [] if self.closed else [node for node in self.nodes() if now - node.seen_at >= SILENT_S]
        for node in silent:
            del self._nodes[node.node_rank]
            self._changed_at = now
        return silent

    def complete(self, now: float) -> bool:
        """Whether the job may start with those that are there: all, or enough and no more came for a while."""
        if len(self) >= self.most:
            return True
        return len(self) >= self.least and now - self._changed_at >= self._last_call_s

    def missing(self) -> list[int]:
        return [rank for rank in range(1, self.most) if rank not in self._nodes]

    def describe(self) -> str:
        """Who is there and who is missing."""
        there = ", ".join([f"0 ({self._head})", *(node.label for node in self.nodes())])
        missing = ", ".join(map(str, self.missing())) or "none"
        return f"{len(self)} of {self._size()} nodes are there: {there}; missing: node rank {missing}"

    def _size(self) -> str:
        return str(self.most) if self.least == self.most else f"{self.least} to {self.most}"


def node_hosts(roster: Roster, head_host: str, is_loopback: Callable[[str], bool]) -> list[str]:
    """The address of each node, the head first. The head's is the one by which the others reached it, so that it is
    right however the endpoint's name resolves on the head itself.

    Args:
        head_host: used where no other node is there.
    """
    reached = [node.hello.head_host for node in roster.nodes()]
    outside = [host for host in reached if not is_loopback(host)]
    head = (outside or reached or [head_host])[0]
    return [head, *(node.hello.host for node in roster.nodes())]
