"""The rendezvous server, on the first node. The ``launch`` processes of the other nodes join it and follow its orders.

It listens from before the user's script runs until ``launch`` ends, so that nodes may join in any order, and serves
all jobs that the script submits. It is not part of a job: a running job's agents and members talk to the job's master
and to each other.
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

__all__ = ["NodeAddress", "RendezvousOptions", "RendezvousServer"]

logger = logging.getLogger(__name__)

ORDERS_WAIT_S = 3.0
"""Seconds that a node's request for orders waits for one."""
GONE_S = 30.0
PROBED_S = 3.0
"""Additional seconds for the nodes' test results to arrive."""
RETURN_S = 3.0
"""Seconds after which a node whose connection was closed counts as gone. A cut network does not close a connection."""
OVER_WAIT_S = 5.0
"""Maximum seconds that the closing server waits until all nodes have received the end."""
LATE_S = 3.0
"""Seconds that a closing server waits for nodes that have not joined yet, so that they learn of the end."""


@dataclass(frozen=True, slots=True)
class RendezvousOptions:
    """Options of the rendezvous.

    Attributes:
        least, most: number of nodes, the first one included.
        host, port: the endpoint as it was given, host without brackets; port 0 lets the system choose.
        key: the job's key.
        timeout_s: time in which nodes must join, from the start of the server.
        last_call_s: with ``least`` nodes joined, time to wait for more.
        name: name of this node in messages.
        host_here: address to advertise for this node, if the one by which others reach it is wrong.
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


class RendezvousServer:
    """The rendezvous server. Use it in a ``with`` block, from the thread that runs the script.

    Raises:
        LaunchError: it cannot listen at its endpoint.
    """

    def __init__(self, options: RendezvousOptions, clock: Callable[[], float] | None = None) -> None:
        self.options, self._clock = options, clock or (lambda: clocks.now())
        self.on_signal: Callable[[int, str], None] | None = None
        """Called when a node's ``launch`` got a signal, with its number and a text that names the node."""
        self.on_full: Callable[[str], None] | None = None
        """Called once when the nodes have joined, with a text that names them."""
        self._began = self._clock()
        self._lock = threading.RLock()
        self._roster = Roster(
            options.least, options.most, f"{options.name or 'head'}, pid {os.getpid()}", options.version,
            last_call_s=options.last_call_s,
        )  # fmt: skip
        self._remote: dict[int, RemoteNode] = {}
        self._waiting_start: dict[str, list[RemoteNode]] = {}
        self._followed: dict[int, tuple[tuple[str, str], ...]] = {}
        self._checked = False
        self._probed: dict[int, tuple[PairResult, ...]] = {}
        self._over: Over | None = None
        self._know_end: set[str] = set()
        self._rejected_late: set[str] = set()
        bound = listening_address(options.host)
        address = f"tcp://{join_host_port(bound, options.port or '*')}"
        try:
            self._runtime = Runtime.start(name=RENDEZVOUS, key=options.key, bind=address)
        except UsageError as error:
            raise LaunchError(
                f"the head cannot listen at {join_host_port(options.host, options.port)}: {error}. Another job may "
                "be using the port: name another one in --rdzv-endpoint (port 0 lets the system choose one)"
            ) from None
        self._changed = asyncio.Event()
        assert self._runtime.endpoint is not None
        self.bound_host, self.port = split_host_port(self._runtime.endpoint.removeprefix("tcp://"))
        self._runtime.serve(RENDEZVOUS, self, inline=True)

    @property
    def is_full(self) -> bool:
        """True if all nodes have joined."""
        with self._lock:
            return len(self._roster) >= self.options.most

    @property
    def endpoint(self) -> str:
        """The value of ``--rdzv-endpoint`` for the other nodes."""
        return join_host_port(self.options.host, self.port)

    def __enter__(self) -> RendezvousServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(1, "the head ended")

    def close(self, code: int, why: str = "") -> None:
        """Tell all nodes that the job is over, with their exit code, and stop listening."""
        with self._lock:
            if self._over is not None:
                return
            self._over = Over(code, why)
            waiting = {node.hello.token for node in self._roster.nodes() if self._clock() - node.seen_at < GONE_S}
            late = 0 if self._roster.closed else self.options.most - len(self._roster)
        self._wake()
        began = self._clock()
        while self._clock() < began + OVER_WAIT_S and not waiting <= self._know_end:
            time.sleep(0.01)
        while self._clock() < began + LATE_S and len(self._rejected_late) < late:
            time.sleep(0.01)
        self._runtime.close()

    # Called by the driver

    def wait_full(self, stopped: Callable[[], bool]) -> tuple[NodeAddress, ...]:
        """Wait until all nodes have joined; from the second job on they have joined already.

        Raises:
            LaunchError: they did not in time; says which nodes have joined and which are missing.
            KeyboardInterrupt: ``stopped`` returned True.
        """
        deadline, warned_at = self._began + self.options.timeout_s, self._clock()
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
            if now - warned_at > 10.0:
                warned_at = now
                logger.warning("waiting for nodes: %s", text)
            time.sleep(0.02)

    def check(self, addresses: Sequence[NodeAddress]) -> None:
        """Let each node connect to each other one, and check each node's facts, once; the matrix goes to `on_full`.

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
        """Let a node start its agent, as soon as the master's address is known (see `on_status`).

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
            self._waiting_start.setdefault(config.job_id, []).append(node)
        return node

    def on_status(self, status: JobStatus) -> None:
        """Handle a snapshot of the running job: start nodes once the master listens, and tell each node which logs to
        print."""
        self._end_gone_nodes()
        public = status.extra.get(MASTER_PUBLIC, "")
        with self._lock:
            for node in self._waiting_start.pop(status.job_id, []) if public else []:
                self.order(node.node_rank, Start(status.job_id, replace(node.config, master_endpoint=public)))
            for rank, node in self._remote.items():
                own = [m for m in status.members if m.node_rank == rank and not m.fused_with]
                logs = tuple((f"{m.role}:{m.rank}", m.log_path) for m in own)
                if logs and self._followed.get(rank) != logs and node.config.job_id == status.job_id:
                    self._followed[rank] = logs
                    self.order(rank, Follow(status.job_id, logs))

    def replacements(self, job_id: str) -> list[RemoteNode]:
        """Return machines that joined in place of lost ones since the last call; their agents are started."""
        found = []
        with self._lock:
            for entry in self._roster.nodes():
                node = self._remote.get(entry.node_rank)
                if node is None or node.config.job_id != job_id or node.running() or entry.gone:
                    continue
                config = replace(node.config, host=entry.hello.host, group=entry.hello.group)
                new = self._remote[entry.node_rank] = RemoteNode(self.order, entry, config)
                self._followed.pop(entry.node_rank, None)
                self._waiting_start.setdefault(job_id, []).append(new)
                found.append(new)
        return found

    def order(self, node_rank: int, order: Order) -> None:
        """Give a node an order. May be called from any thread."""
        with self._lock:
            for entry in self._roster.nodes():
                if entry.node_rank == node_rank:
                    entry.orders.append(order)
        self._wake()

    def _end_gone_nodes(self) -> None:
        now = self._clock()
        with self._lock:
            for entry in self._roster.nodes():
                node = self._remote.get(entry.node_rank)
                if node is not None and node.running() and now - entry.seen_at > GONE_S:
                    entry.gone = True
                    node.end(unproven(entry.node_rank, f"nothing was heard of node {entry.label} for {GONE_S:g} s"))

    # Called by nodes, on the runtime's loop

    @rpc
    async def join(self, hello: NodeHello) -> Joined:
        """Join as a node; idempotent."""
        with self._lock:
            if self._over is not None:
                self._rejected_late.add(hello.token)
                raise LaunchError(f"the job is over: {self._over.why or f'exit code {self._over.code}'}")
            entry = self._roster.join(hello, self._clock())
            return Joined(entry.node_rank, self._roster.most)

    @rpc(concurrent=4096)
    async def orders(self, token: str, seen: int) -> tuple[Order, ...]:
        """Return the orders after the first ``seen`` as soon as there are any; empty if none came for a while."""
        try:
            async with asyncio.timeout(ORDERS_WAIT_S):
                while not (found := self._orders(token, seen)):
                    await self._changed.wait()
        except TimeoutError:
            return ()
        except asyncio.CancelledError:
            # The connection was closed: the node returns at once, or its process has ended.
            asyncio.get_running_loop().call_later(RETURN_S, self._check_returned, token, self._clock())
            raise
        return found

    def _check_returned(self, token: str, lost_at: float) -> None:
        with self._lock:
            entry = self._roster.find(token)
            if entry is None or entry.seen_at > lost_at:
                return
            self._know_end.add(token)  # the node is gone and cannot receive the end
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
                self._know_end.add(token)
                return (self._over,)
            return orders

    @rpc
    async def ping(self) -> float:
        """Return the server's clock; answers connection tests."""
        return time.time()

    @rpc
    async def probed(self, token: str, results: tuple[PairResult, ...]) -> None:
        """Report the results of the node's connection tests."""
        with self._lock:
            entry = self._roster.find(token)
            if entry is not None:
                self._probed[entry.node_rank] = results

    @rpc
    async def ended(self, token: str, job: str, report: ExitReport) -> None:
        """Report that the node's guardian has ended."""
        with self._lock:
            entry = self._roster.find(token)
            node = self._remote.get(entry.node_rank) if entry is not None else None
        if node is not None and node.config.job_id == job:
            node.end(report)

    @rpc
    async def signalled(self, token: str, number: int) -> None:
        """Report that the node's ``launch`` got a signal that asks for the job's end."""
        with self._lock:
            entry = self._roster.find(token)
        if entry is not None and self.on_signal is not None:
            self.on_signal(number, f"{_signal_name(number)} at node {entry.label}")

    @rpc
    async def leave(self, token: str) -> None:
        """Report that the node's ``launch`` ends."""
        with self._lock:
            self._know_end.add(token)
            entry = self._roster.find(token)
            node = self._remote.get(entry.node_rank) if entry is not None else None
            self._roster.leave(token, self._clock())
        if node is not None and node.running() and entry is not None:
            node.end(unproven(entry.node_rank, f"the launch of node {entry.label} ended"))

    def _wake(self) -> None:
        def wake() -> None:
            self._changed.set()
            self._changed = asyncio.Event()

        self._runtime.post(wake)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _unique(names: Sequence[str]) -> list[str]:
    """Return unique names of nodes, with the rank added where two hosts have the same name."""
    return [name if names.count(name) == 1 else f"{name}.{rank}" for rank, name in enumerate(names)]


def host_name() -> str:
    """Return this machine's own name, which need not resolve."""
    return socket.gethostname() or "node"
