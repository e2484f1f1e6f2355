"""The state of the rendezvous: joined nodes, missing nodes, and orders to each. No I/O.

The first node's ``launch`` (:mod:`rlmesh.rendezvous.server`) has the roster; the others
(:mod:`rlmesh.rendezvous.client`) join it, and then ask for orders until the server says that the job is over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from rlmesh.agent.machine_checks import Facts
from rlmesh.agent.protocol import AgentConfig
from rlmesh.errors import LaunchError

PROBE = "@probe"
"""Name under which a node answers connection tests of other nodes."""
RENDEZVOUS = "@rendezvous"
"""Name of the server's RPC service."""
DEFAULT_PORT = 29400
"""Port of the server where the endpoint names none; the same as torchrun's."""
SILENT_S = 10.0
"""Seconds without a request for orders after which another node may take the node's rank, before the start."""
ANY_RANK = -1


@dataclass(frozen=True, slots=True)
class NodeHello:
    """A node's request to join.

    Attributes:
        token: random, made once per ``launch``; identifies a node that joins again.
        node_rank: the requested rank, ``ANY_RANK`` for the lowest free one.
        name: the host's name, for messages.
        host: numeric address at which processes of other nodes reach this node's.
        head_host: numeric address by which the node reached the server.
        pid: pid of the node's ``launch``.
        version: version of rlmesh.
        nnodes: number of nodes given to the node; 0 if none was given.
        group: equal for nodes that are one machine; empty for a machine of its own.
        probe: endpoint for connection tests of other nodes, before the job starts.
        facts: facts about the machine, for checks before the start.
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
    """Connect to these nodes, by rank and address, and to the server."""

    targets: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Start:
    """Start an agent. Values that only the node knows (its folder of sockets) are not filled in."""

    job: str
    config: AgentConfig


@dataclass(frozen=True, slots=True)
class Follow:
    """Print the logs of these members of the node: name and path of each."""

    job: str
    members: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ReleaseAgent:
    """Release the agent of a job that has ended."""

    job: str


@dataclass(frozen=True, slots=True)
class Over:
    """The job is over: exit with ``code``."""

    code: int
    why: str = ""


Order: TypeAlias = ProbeNodes | Start | Follow | ReleaseAgent | Over


@dataclass(slots=True)
class NodeEntry:
    """A node that has joined.

    Attributes:
        orders: all orders so far; the node asks for those that it has not seen.
        gone: the node ended after the start, and another machine may take its rank.
    """

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
    """The nodes that have joined. The server itself is node 0.

    Args:
        least, most: number of nodes that the job starts with; with ``least`` nodes it waits ``last_call_s`` for more.
        head: name of the server's node in messages.
        now: seconds of a monotonic clock.
    """

    def __init__(self, least: int, most: int, head: str, version: str, *, last_call_s: float = 30.0) -> None:
        self.least, self.most = least, most
        self._head, self._version, self._last_call_s = head, version, last_call_s
        self._nodes: dict[int, NodeEntry] = {}
        self._changed_at = 0.0
        self.closed = False
        """True once the job has started with the joined nodes."""

    def __len__(self) -> int:
        return len(self._nodes) + 1

    def nodes(self) -> list[NodeEntry]:
        """Return all nodes but the server's, by rank."""
        return sorted(self._nodes.values(), key=lambda node: node.node_rank)

    def find(self, token: str) -> NodeEntry | None:
        return next((node for node in self._nodes.values() if node.hello.token == token), None)

    def join(self, hello: NodeHello, now: float) -> NodeEntry:
        """Add a node; a known node stays as it is.

        Raises:
            LaunchError: the node cannot be part of this job; says why and what to do.
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
        """Remove a node that ended by itself; its rank is free again."""
        entry = self.find(token)
        if entry is not None and self.closed:
            entry.gone = True
        elif entry is not None:
            del self._nodes[entry.node_rank]
            self._changed_at = now

    def drop_silent(self, now: float) -> list[NodeEntry]:
        """Remove nodes that do not ask for orders any more, before the start, and return them."""
        silent = [] if self.closed else [node for node in self.nodes() if now - node.seen_at >= SILENT_S]
        for node in silent:
            del self._nodes[node.node_rank]
            self._changed_at = now
        return silent

    def complete(self, now: float) -> bool:
        """True if the job may start: all nodes have joined, or enough nodes and no more came for a while."""
        if len(self) >= self.most:
            return True
        return len(self) >= self.least and now - self._changed_at >= self._last_call_s

    def missing(self) -> list[int]:
        return [rank for rank in range(1, self.most) if rank not in self._nodes]

    def describe(self) -> str:
        """Return a text with the joined and the missing nodes."""
        there = ", ".join([f"0 ({self._head})", *(node.label for node in self.nodes())])
        missing = ", ".join(map(str, self.missing())) or "none"
        return f"{len(self)} of {self._size()} nodes are there: {there}; missing: node rank {missing}"

    def _size(self) -> str:
        return str(self.most) if self.least == self.most else f"{self.least} to {self.most}"


def node_hosts(roster: Roster, head_host: str, is_loopback: Callable[[str], bool]) -> list[str]:
    """Return the address of each node, the server's first.

    The server's address is the one by which the others reached it, because the endpoint's name may resolve differently
    on
    the server itself.

    Args:
        head_host: the server's address if there is no other node.
    """
    reached = [node.hello.head_host for node in roster.nodes()]
    outside = [host for host in reached if not is_loopback(host)]
    head = (outside or reached or [head_host])[0]
    return [head, *(node.hello.host for node in roster.nodes())]
