"""Monitoring of the job's own processes on this machine, through pidfds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlmesh.agent.monitoring.logs import last_lines
from rlmesh.agent.node_start import GuardianProcess
from rlmesh.agent.protocol import AgentConfig, ExitReport
from rlmesh.master.jobspec import AGENT_PIDS, MASTER_PID
from rlmesh.rendezvous.remote_node import RemoteNode
from rlmesh.runtime.process.descriptors import await_readable


class ProcessWatch:
    """Watches master and agents as soon as their pids are known.

    The job ends with the first node's agent, whose child the master is. Other deaths are handled by the master, or, for
    the master, by its agent.
    """

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}
        self._dead: dict[str, None] = {}
        self._reported: set[str] = set()
        self._first = ""

    def learn(self, extra: Mapping[str, str]) -> None:
        """Take the pids from ``JobStatus.extra``."""
        named = [("master", pid) for pid in filter(None, [extra.get(MASTER_PID)])]
        agents = [("agent", pid) for pid in filter(None, extra.get(AGENT_PIDS, "").split(","))]
        for what, pid in named + agents:
            name = f"{what} (pid {pid})"
            if name not in self._fds and name not in self._dead:
                try:
                    self._fds[name] = os.pidfd_open(int(pid))
                except OSError:
                    self._dead[name] = None
        if agents and not self._first:
            self._first = f"agent (pid {agents[0][1]})"

    def fds(self) -> list[int]:
        """Return the pidfds of processes that are not known to be dead."""
        return [fd for name, fd in self._fds.items() if name not in self._dead]

    def fatal(self) -> bool:
        """True if the first node's agent has ended, without which the job cannot go on."""
        self._check()
        return self._first in self._dead

    def died(self) -> list[str]:
        """Return the names of processes that have ended since the last call."""
        self._check()
        new = [name for name in self._dead if name not in self._reported]
        self._reported.update(new)
        return new

    def _check(self) -> None:
        living = self.fds()
        ready = await_readable(living, 0.0)
        self._dead |= {name: None for name, fd in self._fds.items() if fd in ready}

    def cause_of_death(
        self, configs: Sequence[AgentConfig], reports: Sequence[ExitReport],
        nodes: Sequence[GuardianProcess | RemoteNode],
        run_dir: Path,
    ) -> str:  # fmt: skip
        """Return which of the job's own processes died first, once all of them are gone.

        In the order guardian, agent, master, the death of each ends those after it. So the first dead one in this order
        is the cause.
        """
        for config, report, node in zip(configs, reports, nodes, strict=False):
            tail = tail_of(run_dir, f"agent-{config.node_rank}.log")
            if report.cause:
                return report.cause
            if report.agent_code is None:
                return f"the guardian of node {config.node_name} (pid {node.pid}) died, and its node with it.\n{tail}"
            if report.agent_code < 0:
                how = signal.Signals(-report.agent_code).name
                why = f" ({report.why})" if "lease" in report.why or "stopped" in report.why else ""
                return f"the agent of node {config.node_name} was killed by {how}{why}, and its node with it.\n{tail}"
        for config, report in zip(configs, reports, strict=False):
            if report.agent_code:
                tail = tail_of(run_dir, f"agent-{config.node_rank}.log")
                return f"the agent of node {config.node_name} exited with code {report.agent_code}.\n{tail}"
        return f"the job's own processes ended too early.\n{tail_of(run_dir, 'agent-0.log', 'master.log')}"

    def kill_agents(self) -> None:
        """Kill the agents; their guardians then end all remaining processes, without grace."""
        for name, fd in self._fds.items():
            if name.startswith("agent"):
                try:
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                except ProcessLookupError:
                    pass

    def await_end(self, timeout_s: float) -> None:
        """Wait until all watched processes have ended, which they do after their guardian."""
        deadline = time.monotonic() + timeout_s
        for fd in self._fds.values():
            await_readable([fd], deadline - time.monotonic())

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


def tail_of(run_dir: Path, *names: str) -> str:
    """Return the last lines of the first of the given logs that has any, as text for an error."""
    for name in names:
        path = run_dir / "logs" / name
        if lines := last_lines(str(path)):
            shown = "\n".join("    " + line for line in lines)
            return f"Last lines of {path}:\n{shown}"
    return f"Its logs are in {run_dir / 'logs'}"
