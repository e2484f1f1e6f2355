"""The rendezvous client: joins a job, starts an agent when ordered to, and ends it when the job has ended.

``join_and_serve`` brings one node into a job, whether a person, ssh or Slurm started it. It blocks until the job is
over and returns its exit code.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rlmesh.agent.machine_checks import gather
from rlmesh.agent.monitoring.logs import written_before
from rlmesh.agent.node_start import GuardianProcess
from rlmesh.agent.protocol import ExitReport
from rlmesh.errors import CallError, CallTimeout, LaunchError, PeerLost, RemoteError, UsageError, WireError
from rlmesh.rendezvous.liveness import ServerLiveness
from rlmesh.rendezvous.preflight import Pong, ask_all
from rlmesh.rendezvous.server import ORDERS_WAIT_S, host_name
from rlmesh.rendezvous.state import (
    ANY_RANK,
    PROBE,
    RENDEZVOUS,
    Follow,
    Joined,
    NodeHello,
    Order,
    Over,
    ProbeNodes,
    ReleaseAgent,
    Start,
)
from rlmesh.rendezvous.stop_signals import HEEDED, gives_notice, handling
from rlmesh.run_directory.merged_logs import MergedLogs
from rlmesh.run_directory.workspace import NodeFolder
from rlmesh.runtime.future import Future
from rlmesh.runtime.handle import MemberHandle
from rlmesh.runtime.process import clock
from rlmesh.runtime.process.descriptors import await_readable
from rlmesh.runtime.runtime import Runtime
from rlmesh.runtime.transport.inet import join_host_port, local_route_to, probe, resolve, tell_tried

__all__ = ["NodeOptions", "join_and_serve"]

logger = logging.getLogger(__name__)

ADDRESS_TRY_S = 1.0
"""Seconds to try one address of the server before the next one."""
ORDERS_TIMEOUT_S = 10.0
LATE_ANSWER_S = ORDERS_WAIT_S + 1.0
CHECK_S = 0.5
CHECK_TIMEOUT_S = 0.5
LOST_S = 20.0
"""Seconds of silence after which the server's job is given up: longer than an agent's lease."""
POLL_S = 0.2
GUARDIAN_END_S = 15.0
LAST_TRY_S = 1.0
_NOT_YET = ("RoleNotFound", "MethodNotFound")


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Options of one node.

    Attributes:
        host, port: the server's endpoint; the host may be a name and has no brackets.
        key: the job's key.
        node_rank: rank of this node, 1 or more; ``ANY_RANK`` for the lowest free one.
        nnodes: number of nodes, for a check against the server's; 0 for no check.
        timeout_s: maximum wait for the server.
        version: version of rlmesh.
        name: name of this node in messages; by default the host's name.
        host_here: numeric address to advertise for this node; by default the source address of packets to the server.
        output: takes the lines that this node's members print.
        lifeline: a file descriptor; the node ends when it reaches end of file.
        group: nodes of the same group are one machine.
    """

    host: str
    port: int
    key: bytes = field(repr=False)
    version: str
    node_rank: int = ANY_RANK
    nnodes: int = 0
    timeout_s: float = 600.0
    name: str = ""
    host_here: str = ""
    output: Callable[[str], None] | None = None
    lifeline: int | None = None
    group: str = ""


def join_and_serve(options: NodeOptions) -> int:
    """Join the job, run this node's agent for as long as the job lasts, and return the job's exit code.

    On the main thread, the first SIGINT or SIGTERM asks the server to stop the job, the second ends this node at once.

    Raises:
        LaunchError: the server was not reached in time, rejected this node, or was lost.
        AuthenticationFailed: the server has another key.
    """
    with Runtime.start(name=f"node:{options.node_rank}", key=options.key, bind=False) as runtime:
        return _NodeClient(options, runtime).live()


class _NodeClient:
    def __init__(self, options: NodeOptions, runtime: Runtime) -> None:
        self._options, self._runtime = options, runtime
        self._token = secrets.token_hex(8)
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._signals: list[int] = []
        self._notices: list[int] = []
        self._reported_signals: set[int] = set()
        self._job = ""
        self._guardian: GuardianProcess | None = None
        self._folder: NodeFolder | None = None
        self._logs = MergedLogs(options.output or _write_line)
        self._over: Over | None = None
        self._probe: Runtime | None = None
        self._liveness = ServerLiveness(clock.now(), quiet_s=LATE_ANSWER_S, check_s=CHECK_S, lost_s=LOST_S)
        self._head_ended = self._eof = False

    def live(self) -> int:
        with handling((signal.SIGINT, signal.SIGHUP, *HEEDED), self._note_signal):
            try:
                self._head, self.rank = self._join()
                return self._follow_orders()
            finally:
                self._end_guardian()
                self._close_probe()
                for fd in (self._wake_read, self._wake_write):
                    os.close(fd)

    # Joining

    def _join(self) -> tuple[MemberHandle, int]:
        options = self._options
        deadline = clock.now() + options.timeout_s
        refused: Exception | None = None
        while not self._signals:
            try:
                addresses = resolve(options.host)
            except OSError:
                addresses = ()
            asked = False
            for address in addresses:
                left = deadline - clock.now()
                try:
                    host = options.host_here or local_route_to(address, options.port)
                except OSError:
                    continue  # No route: reported at the end, with its errno.
                asked = True
                try:
                    return self._ask_to_join(address, host, min(ADDRESS_TRY_S, max(left, 0.05)))
                except (CallTimeout, PeerLost) as error:
                    refused = error
                except RemoteError as error:
                    if error.remote_type.rpartition(".")[2] not in _NOT_YET:
                        raise _as_launch_error(error) from None
                    refused = error  # The server listens, but does not serve yet.
            if clock.now() >= deadline:
                raise self._unreached(refused)
            if not asked:
                time.sleep(min(0.2, max(0.0, deadline - clock.now())))
        raise KeyboardInterrupt(f"stopped before the head {join_host_port(options.host, options.port)} was reached")

    def _ask_to_join(self, address: str, host: str, timeout_s: float) -> tuple[MemberHandle, int]:
        options = self._options
        endpoint = f"tcp://{join_host_port(address, options.port)}"
        head = self._runtime.peer(RENDEZVOUS, endpoint)
        hello = NodeHello(
            self._token, options.node_rank, options.name or host_name(), host, address, os.getpid(), options.version,
            options.nnodes, options.group, self._listen(host), gather(names=False),
        )  # fmt: skip
        joined: Joined = head.options(timeout_s=timeout_s).call("join", hello).result()
        return head.options(timeout_s=ORDERS_TIMEOUT_S), joined.node_rank

    def _listen(self, host: str) -> str:
        """Return the endpoint at which other nodes test their connection to this one before the job starts.

        It uses the address and the transport that members will use.

        Raises:
            LaunchError: this node does not have the address.
        """
        if self._probe is None:
            try:
                address = f"tcp://{join_host_port(host, '*')}"
                self._probe = Runtime.start(name=PROBE, key=self._options.key, bind=address)
            except UsageError as error:
                raise LaunchError(
                    f"this node cannot listen at its address {host}: {error}. Name another one by --local-addr"
                ) from None
            self._probe.serve(PROBE, Pong(), inline=True)
        return self._probe.endpoint or ""

    def _probe_nodes(self, order: ProbeNodes) -> None:
        peers = {0: self._head, **{rank: self._runtime.peer(PROBE, address) for rank, address in order.targets}}
        self._head.notify("probed", self._token, ask_all(self.rank, peers))

    def _close_probe(self) -> None:
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def _unreached(self, refused: Exception | None) -> LaunchError:
        options = self._options
        tried = probe(options.host, options.port, LAST_TRY_S)
        where = join_host_port(options.host, options.port)
        listening = any(each.code == 0 for each in tried)
        hint = (
            "Somebody listens there, but does not answer as the head of this job: is it another program's port?"
            if listening
            else "Is node 0 started, is this its address, and does a firewall let the port through?"
        )
        return LaunchError(
            f"the head of the job, {where}, was not reached within {options.timeout_s:g} s. Tried {tell_tried(tried)}. "
            f"{hint}"
        )

    # Following orders

    def _follow_orders(self) -> int:
        seen = 0
        asked: Future[tuple[Order, ...]] | None = None
        self._liveness.answered(clock.now())
        try:
            while self._over is None:
                if asked is None:
                    asked = self._head.call("orders", self._token, seen)
                    asked.add_done_callback(lambda _: self._wake())
                self._wait()
                self._logs.poll()
                self._check_signals()
                self._check_guardian()
                self._check_head()
                if asked.done():
                    orders = self._answer(asked)
                    asked = None
                    for order in orders:
                        seen += not isinstance(order, Over)
                        self._take(order)
        finally:
            if asked is not None:
                asked.cancel()
            self._end_guardian()
            self._leave()
        if self._over.code and self._over.why:
            logger.error("the job is over: %s", self._over.why)
        return self._over.code

    def _answer(self, asked: Future[tuple[Order, ...]]) -> tuple[Order, ...]:
        try:
            orders = asked.result()
        except RemoteError as error:
            raise _as_launch_error(error) from None
        except (CallError, WireError) as error:
            self._liveness.failed()
            if self._liveness.is_lost(clock.now()) or self._eof:
                raise LaunchError(
                    f"node {self.rank} has heard nothing from the head "
                    f"{join_host_port(self._options.host, self._options.port)} for "
                    f"{self._liveness.silent_s(clock.now()):.0f} s ({error}); the job is given up here"
                ) from None
            self._pause()
            return ()
        self._liveness.answered(clock.now())
        return orders

    def _check_head(self) -> None:
        """Check whether the server has ended. The port is looked at because a call to a server that is ending may
        just time out.

        Raises:
            LaunchError: the server has ended.
        """
        if self._liveness.check_due(clock.now()) and self._port_is_closed():
            self._head_ended = True
            raise LaunchError(
                f"the head {join_host_port(self._options.host, self._options.port)} has ended, and the job with "
                f"it; node {self.rank} ends too"
            )

    def _port_is_closed(self) -> bool:
        """True if the server's machine refuses connections to its port: the server has ended. A cut network gives
        other errors."""
        tried = probe(self._options.host, self._options.port, CHECK_TIMEOUT_S)
        return bool(tried) and all(each.code == errno.ECONNREFUSED for each in tried)

    def _pause(self) -> None:
        await_readable([self._wake_read], POLL_S)

    def _take(self, order: Order) -> None:
        if isinstance(order, Over):
            self._over = order
        elif isinstance(order, ProbeNodes):
            self._probe_nodes(order)
        elif isinstance(order, Start):
            self._close_probe()
            self._end_guardian()
            self._start(order)
        elif order.job != self._job:
            pass
        elif isinstance(order, Follow):
            self._logs.follow_files(order.members)
        elif isinstance(order, ReleaseAgent):
            self._end_guardian()

    def _start(self, order: Start) -> None:
        self._job = order.job
        try:
            self._folder = NodeFolder.create(order.config)
            self._logs.skip(written_before(order.config.run_dir))
            self._guardian = GuardianProcess(self._folder.config)
        except LaunchError as error:
            logger.error("the agent of node %d cannot be started: %s", self.rank, error)
            if self._folder is not None:
                self._folder.remove()
            self._report(ExitReport(self.rank, 0, (), 1, str(error)))

    def _check_guardian(self) -> None:
        if self._guardian is not None and not self._guardian.running():
            self._end_guardian()

    def _end_guardian(self) -> None:
        """Let the guardian end its processes, and report what it found."""
        guardian, self._guardian = self._guardian, None
        if guardian is None:
            return
        guardian.let_go()
        try:
            report = guardian.wait(GUARDIAN_END_S)
        except TimeoutError as error:
            logger.error("%s; it is killed", error)
            guardian.kill()
            report = guardian.wait(GUARDIAN_END_S)
        self._logs.finish()
        if self._folder is not None:
            self._folder.remove()
        self._report(report)

    def _report(self, report: ExitReport) -> None:
        if self._head_ended:
            return
        try:
            self._head.options(timeout_s=2.0).call("ended", self._token, self._job, report).result()
        except (CallError, WireError) as error:
            logger.debug("the head was not told that node %d has ended: %s", self.rank, error)

    def _leave(self) -> None:
        if self._head_ended:
            return
        try:
            self._head.options(timeout_s=1.0).call("leave", self._token).result()
        except (CallError, WireError):
            pass  # The server ended first.

    # Waiting

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"x")
        except OSError:
            pass

    def _wait(self) -> None:
        watched = [self._wake_read]
        if self._guardian is not None:
            watched.append(self._guardian.fileno())
        if self._options.lifeline is not None and not self._eof:
            watched.append(self._options.lifeline)
        ready = await_readable(watched, POLL_S)
        if self._wake_read in ready:
            os.read(self._wake_read, 4096)
        if self._options.lifeline in ready and not os.read(self._options.lifeline or 0, 4096):
            self._eof = True
            self._signals += [signal.SIGHUP, signal.SIGHUP]

    def _check_signals(self) -> None:
        for number in [*self._notices, *self._signals[:1]]:
            if number not in self._reported_signals:
                self._reported_signals.add(number)
                self._head.notify("signalled", self._token, number)
        if len(self._signals) > 1:
            name = signal.Signals(self._signals[-1]).name
            self._over = Over(128 + self._signals[-1], f"{name} at this node")

    def _note_signal(self, number: int) -> None:
        (self._notices if gives_notice(number) else self._signals).append(number)
        self._wake()


def _as_launch_error(error: CallError) -> LaunchError:
    return LaunchError(error.remote_message if isinstance(error, RemoteError) else str(error))


def _write_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
