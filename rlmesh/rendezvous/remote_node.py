"""The driver's view of a node on another machine."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from rlmesh.agent.protocol import AgentConfig, ExitReport, Leftover
from rlmesh.rendezvous.state import NodeEntry, Order, ReleaseAgent

__all__ = ["RemoteNode", "unproven"]


class RemoteNode:
    """A node of one job on another machine, with the interface of a local guardian process.

    It ends when its ``launch`` has reported the end of its guardian, or is gone itself.
    """

    def __init__(self, order: Callable[[int, Order], None], entry: NodeEntry, config: AgentConfig) -> None:
        self.node_rank, self.pid = config.node_rank, entry.hello.pid
        self.config, self._order, self.label = config, order, entry.label
        self._ended, self._report = threading.Event(), ExitReport(config.node_rank, -1)
        self._let_go = False
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def fileno(self) -> int:
        return self._read

    def running(self) -> bool:
        return not self._ended.is_set()

    def let_go(self) -> None:
        if not self._let_go and self.running():
            self._let_go = True
            self._order(self.node_rank, ReleaseAgent(self.config.job_id))

    def wait(self, timeout_s: float) -> ExitReport:
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"node {self.label} did not report its end within {timeout_s:g} s")
        self.close()
        return self._report

    def kill(self) -> None:
        """Give the node up, without knowing what is left there."""
        self.end(unproven(self.node_rank, f"node {self.label} did not say that it has ended"))

    def end(self, report: ExitReport) -> None:
        """Record the node's end; called by the rendezvous server, from any thread."""
        if not self._ended.is_set():
            self._report = report
            self._ended.set()
            if self._write >= 0:
                os.write(self._write, b"x")

    def close(self) -> None:
        for fd in (self._read, self._write):
            if fd >= 0:
                os.close(fd)
        self._read = self._write = -1


def unproven(node_rank: int, what: str) -> ExitReport:
    """Make the exit report of a node that did not send one: it says that nothing is proven."""
    return ExitReport(node_rank, -1, (Leftover("unproven", what, False),), None, what)
