"""The head: the first node's end of the rendezvous. The other nodes' ``launch`` processes join it and obey it.

It listens from before the user's script runs until ``launch`` ends, so that nodes may come in any order, and serves
all jobs that the script submits. It is no part of a job: when a job runs, its agents and members talk to the job's
master and to each other.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from rlmesh.agent.machine_checks import Facts, gather
from rlmesh.agent.protocol import AgentConfig, ExitReport
from rlmesh.errors import LaunchError, PreflightError, UsageError
from rlmesh.job.status import JobStatus
from rlmesh.master.jobspec import MASTER_PUBLIC
from rlmesh.rendezvous.preflight import PING_S, PairResult, ask_all, clock_notes, matrix, problems, targets_of
from rlmesh.rendezvous.remote_node import RemoteNode, unproven
from rlmesh.rendezvous.state import (
    PROBE,
    RENDEZVOUS,
    Follow,
    Joined,
    NodeHello,
    Order,
    Over,
    ProbeNodes,
    Roster,
    Start,
    node_hosts,
)
from rlmesh.runtime.process import clock as clocks
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime
from rlmesh.runtime.transport.inet import (
    ANY_ADDRESSES,
    is_loopback,
    is_numeric,
    join_host_port,
    listening_address,
    split_host_port,
)

__all__ = ["Head", "HeadOptions", "NodeAddress"]

logger = logging.getLogger(__name__)

ORDERS_WAIT_S = 3.0
"""So long a node's question after orders waits; half a minute without one, and the node counts as gone."""
GONE_S = 30.0
PROBED_S = 3.0
"""For the nodes' answers to come, after their tries to reach each other."""
RETURN_S = 3.0
"""A node whose connection was closed (not one whose packets do not come) is gone if it is not back in this time."""
OVER_WAIT_S = 5.0
"""How long the head waits at its end until all nodes have heard that it is over."""
LATE_S = 3.0
"""So long it stays for nodes that had not come yet: those that are about to are told, and do not wait in vain."""


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """How nodes come together.

    Attributes:
        least, most: number of nodes, the head included.
        host, port: the endpoint as it was given, host without brackets; port 0 lets the system choose.
        key: the job's.
        timeout_s: how long nodes may take to join, from the start of the head.
        last_call_s: with ``least`` nodes there, how long to wait for more.
        name: of this node, for messages.
        host_here: the address to advertise for this node, where the one by which others reach it is not right.
        group: nodes of the same group are one machine; empty for a machine of its own.
    """

    least: int
    most: int
    host: str
    port: int
    key: bytes
    version: str
    timeout_s: float = 600.0
    last_call_s: float = 30.0
    name: str = ""
    host_here: str = ""
    group: str = ""


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """One node of a job that starts."""

    node_rank: int
    name: str
    host: str
    group: str = ""


class _Service:
    """Served as ``@rendezvous``; its methods run on the head's loop."""

    def __init__(self, head: Head) -> None:
        self._head = head

    @rpc
    async def join(self, hello: NodeHello) -> Joined:
        """Be one of the nodes; may be repeated."""
        return self._head.join(hello)

    @rpc(concurrent=4096)
    async def orders(self, token: str, seen: int) -> tuple[Order, ...]:
        """The orders after the first ``seen``, as soon as there are some; none if none came for a while."""
        return await self._head.orders_for(token, seen)

    @rpc
    async def ping(self) -> float:
        """The head's clock; answers nodes that try to reach it."""
        return time.time()

    @rpc
    async def probed(self, token: str, results: tuple[PairResult, ...]) -> None:
        """Whom the node reached."""
        self._head.node_probed(token, results)

    @rpc
    async def ended(self, token: str, job: str, report: ExitReport) -> None:
        """The guardian of the node has ended."""
        self._head.node_ended(token, job, report)

    @rpc
    async def signalled(self, token: str, number: int) -> None:
        """The node's ``launch`` got a signal that asks for the job's end."""
        self._head.node_signalled(token, number)

    @rpc
    async def leave(self, token: str) -> None:
        """The node's ``launch`` ends."""
        self._head.node_left(token)


class Head:
    """Listens for the other nodes. Use it in a ``with`` block, from the thread that runs the script.

    Raises:
        LaunchError: it cannot listen at its endpoint.
    """

    def __init__(self, options: HeadOptions, clock: Callable[[], float] | None = None) -> None:
        self.options, self._clock = options, clock or (lambda: clocks.now())
        self.on_signal: Callable[[int, str], None] | None = None
        """Called when a node's ``launch`` got a signal, with its number and a text that says so."""
        self.on_full: Callable[[str], None] | None = None
        """Called once when the nodes are together, with a text that names them."""
        self._began = self._clock()
        self._lock = threading.RLock()
        self._roster = Roster(
            options.least, options.most, f"{options.name or 'head'}, pid {os.getpid()}", options.version,
            last_call_s=options.last_call_s,
        )  # fmt: skip
        self._remote: dict[int, RemoteNode] = {}
        self._held: dict[str, list[RemoteNode]] = {}
        self._followed: dict[int, tuple[tuple[str, str], ...]] = {}
        self._checked = False
        self._probed: dict[int, tuple[PairResult, ...]] = {}
        self._over: Over | None = None
        self._heard: set[str] = set()
        self._turned_away: set[str] = set()
        bound = listening_address(options.host)
        address = f"tcp://{join_host_port(bound, options.port or '*')}"
        try:
            self._runtime = Runtime.start(name=RENDEZVOUS, key=options.key, bind=address)
        except UsageError as error:
            raise LaunchError(
                f"the head cannot listen at {join_host_port(options.host, options.port)}: {error}. Another job may "
                "be using the port: name another one in --rdzv-endpoint (port 0 lets the system choose one)"
            ) from None
        self._news = asyncio.Event()
        assert self._runtime.endpoint is not None
        self.bound_host, self.port = split_host_port(self._runtime.endpoint.removeprefix("tcp://"))
        self._runtime.serve(RENDEZVOUS, _Service(self), inline=True)

    @property
    def is_full(self) -> bool:
        """Whether all nodes have joined."""
        with self._lock:
            return len(self._roster) >= self.options.most

    @property
    def endpoint(self) -> str:
        """What the other nodes pass as ``--rdzv-endpoint``."""
        return join_host_port(self.options.host, self.port)

    def __enter__(self) -> Head:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(1, "the head ended")

    def close(self, code: int, why: str = "") -> None:
        """Tell all nodes that it is over, with the exit code that they are to end with, and stop listening."""
        with self._lock:
            if self._over is not None:
                return
            self._over = Over(code, why)
            waiting = {node.hello.token for node in self._roster.nodes() if self._clock() - node.seen_at < GONE_S}
            late = 0 if self._roster.closed else self.options.most - len(self._roster)
        self._wake()
        began = self._clock()
        while self._clock() < began + OVER_WAIT_S and not waiting <= self._heard:
            time.sleep(0.01)
        while self._clock() < began + LATE_S and len(self._turned_away) < late:
            time.sleep(0.01)
        self._runtime.close()

    # The driver's side.

    def wait_full(self, stopped: Callable[[], bool]) -> tuple[NodeAddress, ...]:
        """Wait until all nodes have joined; from the second job on they are there already.

        Raises:
            LaunchError: they did not within the time; says who is there and who is missing.
            KeyboardInterrupt: ``stopped`` said so.
        """
        deadline, told = self._began + self.options.timeout_s, self._clock()
        while True:
            now = self._clock()
            with self._lock:
                for node in self._roster.drop_silent(now):
                    logger.warning("node %s is gone before the job started", node.label)
                if self._roster.complete(now) or self._roster.closed:
                    if not self._roster.closed and self.on_full is not None:
                        self.on_full(self._roster.describe())
                    self._roster.closed = True
                    return self._addresses()
                text = self._roster.describe()
            if stopped():
                raise KeyboardInterrupt(f"stopped while waiting for nodes: {text}")
            if now > deadline:
                raise LaunchError(
                    f"not all nodes joined within {self.options.timeout_s:g} s at {self.endpoint}. {text}. Start "
                    f"`rlmesh launch --nnodes {self.options.most} --node-rank R --rdzv-endpoint {self.endpoint} …` on "
                    "each of them with this job's key"
                )
            if now - told > 10.0:
                told = now
                logger.warning("waiting for nodes: %s", text)
            time.sleep(0.02)

    def check(self, addresses: Sequence[NodeAddress]) -> None:
        """Have each node try to reach each other, and look at what each has; tell the matrix to `on_full`. Once.

        Raises:
            PreflightError: the job cannot run on these nodes; says which, and has the matrix.
        """
        with self._lock:
            nodes = {node.node_rank: node for node in self._roster.nodes()}
            asked = self._checked
            self._checked = True
        if asked or not nodes:
            return
        ranks = [0, *nodes]
        for rank, node in nodes.items():
            targets = tuple((each, nodes[each].hello.probe) for each in targets_of(rank, ranks))
            self.order(node.node_rank, ProbeNodes(targets))
        peers = {rank: self._runtime.peer(PROBE, nodes[rank].hello.probe) for rank in targets_of(0, ranks)}
        own = ask_all(0, peers)
        deadline = self._clock() + PING_S + PROBED_S
        while self._clock() < deadline and not nodes.keys() <= self._probed.keys():
            time.sleep(0.01)
        results = [*own, *(each for rank in nodes for each in self._probed.get(rank, ()))]
        names = {address.node_rank: address.name for address in addresses}
        facts = {0: gather(names=False), **{rank: node.hello.facts for rank, node in nodes.items() if node.hello.facts}}
        self._judge(names, results, facts, [rank for rank in nodes if rank not in self._probed])

    def _judge(
        self, names: dict[int, str], results: list[PairResult], facts: dict[int, Facts], silent: list[int]
    ) -> None:
        table = matrix(names, results)
        if wrong := problems(names, results, facts, silent):
            raise PreflightError("\n".join(["the nodes are not fit for the job:", *wrong, table]))
        if self.on_full is not None:
            self.on_full("\n".join(["round trips between the nodes:", table, *clock_notes(names, results)]))

    def _addresses(self) -> tuple[NodeAddress, ...]:
        options, nodes = self.options, self._roster.nodes()
        alone = options.host if is_numeric(options.host) and options.host not in ANY_ADDRESSES else self.bound_host
        head, *others = node_hosts(self._roster, alone, is_loopback)
        names = _unique([options.name or "head", *(node.hello.name for node in nodes)])
        ranks = [0, *(node.node_rank for node in nodes)]
        hosts = [options.host_here or head, *others]
        groups = [options.group, *(node.hello.group for node in nodes)]
        return tuple(NodeAddress(*each) for each in zip(ranks, names, hosts, groups, strict=True))

    def start_node(self, config: AgentConfig) -> RemoteNode:
        """Have a node start its agent, as soon as the master's address is known (see `on_status`).

        Raises:
            LaunchError: the node has gone.
        """
        with self._lock:
            entry = next((node for node in self._roster.nodes() if node.node_rank == config.node_rank), None)
            if entry is None or self._clock() - entry.seen_at > GONE_S:
                name = entry.label if entry is not None else str(config.node_rank)
                raise LaunchError(f"node {name} joined, but is gone now: start it again")
            node = RemoteNode(self.order, entry, config)
            self._remote[config.node_rank] = node
            self._held.setdefault(config.job_id, []).append(node)
        return node

    def on_status(self, status: JobStatus) -> None:
        """A snapshot of the job that runs: starts nodes once the master listens, tells them whose logs to print."""
        self._look_for_gone()
        public = status.extra.get(MASTER_PUBLIC, "")
        with self._lock:
            for node in self._held.pop(status.job_id, []) if public else []:
                self.order(node.node_rank, Start(status.job_id, replace(node.config, master_endpoint=public)))
            for rank, node in self._remote.items():
                own = [m for m in status.members if m.node_rank == rank and not m.fused_with]
                logs = tuple((f"{m.role}:{m.rank}", m.log_path) for m in own)
                if logs and self._followed.get(rank) != logs and node.config.job_id == status.job_id:
                    self._followed[rank] = logs
                    self.order(rank, Follow(status.job_id, logs))

    def replacements(self, job_id: str) -> list[RemoteNode]:
        """Machines that came in the place of lost ones since the last time: their agents are started."""
        found = []
        with self._lock:
            for entry in self._roster.nodes():
                node = self._remote.get(entry.node_rank)
                if node is None or node.config.job_id != job_id or node.running() or entry.gone:
                    continue
                config = replace(node.config, host=entry.hello.host, group=entry.hello.group)
                new = self._remote[entry.node_rank] = RemoteNode(self.order, entry, config)
                self._followed.pop(entry.node_rank, None)
                self._held.setdefault(job_id, []).append(new)
                found.append(new)
        return found

    def order(self, node_rank: int, order: Order) -> None:
        """Give a node something to do. Any thread."""
        with self._lock:
            for entry in self._roster.nodes():
                if entry.node_rank == node_rank:
                    entry.orders.append(order)
        self._wake()

    def _look_for_gone(self) -> None:
        now = self._clock()
        with self._lock:
            for entry in self._roster.nodes():
                node = self._remote.get(entry.node_rank)
                if node is not None and node.running() and now - entry.seen_at > GONE_S:
                    entry.gone = True
                    node.end(unproven(entry.node_rank, f"nothing was heard of node {entry.label} for {GONE_S:g} s"))

    # On the runtime's loop.

    def join(self, hello: NodeHello) -> Joined:
        with self._lock:
            if self._over is not None:
                self._turned_away.add(hello.token)
                raise LaunchError(f"the job is over: {self._over.why or f'exit code {self._over.code}'}")
            entry = self._roster.join(hello, self._clock())
            return Joined(entry.node_rank, self._roster.most)

    async def orders_for(self, token: str, seen: int) -> tuple[Order, ...]:
        try:
            async with asyncio.timeout(ORDERS_WAIT_S):
                while not (found := self._orders(token, seen)):
                    await self._news.wait()
        except TimeoutError:
            return ()
        except asyncio.CancelledError:
            # Its connection was closed: it comes back at once, or its process has ended.
            asyncio.get_running_loop().call_later(RETURN_S, self._not_back, token, self._clock())
            raise
        return found

    def _not_back(self, token: str, lost_at: float) -> None:
        with self._lock:
            entry = self._roster.find(token)
            if entry is None or entry.seen_at > lost_at:
                return
            self._heard.add(token)  # nobody is there any more who could hear that it is over
            if self._over is not None:
                return
            node = self._remote.get(entry.node_rank)
            self._roster.leave(token, self._clock())
        if node is not None and node.running():
            node.end(unproven(entry.node_rank, f"the launch of node {entry.label} closed its connection and is gone"))

    def _orders(self, token: str, seen: int) -> tuple[Order, ...]:
        with self._lock:
            entry = self._roster.find(token)
            if entry is None:
                raise LaunchError("this node has not joined, or was given up; join again")
            entry.seen_at = self._clock()
            orders = tuple(entry.orders[seen:])
            if not orders and self._over is not None:
                self._heard.add(token)
                return (self._over,)
            return orders

    def node_probed(self, token: str, results: tuple[PairResult, ...]) -> None:
        with self._lock:
            entry = self._roster.find(token)
            if entry is not None:
                self._probed[entry.node_rank] = results

    def node_ended(self, token: str, job: str, report: ExitReport) -> None:
        with self._lock:
            entry = self._roster.find(token)
            node = self._remote.get(entry.node_rank) if entry is not None else None
        if node is not None and node.config.job_id == job:
            node.end(report)

    def node_signalled(self, token: str, number: int) -> None:
        with self._lock:
            entry = self._roster.find(token)
        if entry is not None and self.on_signal is not None:
            self.on_signal(number, f"{_signal_name(number)} at node {entry.label}")

    def node_left(self, token: str) -> None:
        with self._lock:
            self._heard.add(token)
            entry = self._roster.find(token)
            node = self._remote.get(entry.node_rank) if entry is not None else None
            self._roster.leave(token, self._clock())
        if node is not None and node.running() and entry is not None:
            node.end(unproven(entry.node_rank, f"the launch of node {entry.label} ended"))

    def _wake(self) -> None:
        def wake() -> None:
            self._news.set()
            self._news = asyncio.Event()

        self._runtime.post(wake)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _unique(names: Sequence[str]) -> list[str]:
    """Names of nodes, with their rank where two hosts have the same one."""
    return [name if names.count(name) == 1 else f"{name}.{rank}" for rank, name in enumerate(names)]


def host_name() -> str:
    """The name of this machine, as it calls itself; it need not resolve."""
    return socket.gethostname() or "node"
