"""One job from the driver's side: start the nodes, watch, show, end, leave nothing.

All of it happens on one thread, the one that waits for the job: the guardians' parent-death signal belongs
to the thread that started them.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rlmesh.agent.protocol import MASTER, AgentConfig, ExitReport
from rlmesh.agent.start import GuardianProcess
from rlmesh.errors import CallError, JobFailed, LaunchError, RLMeshError
from rlmesh.job.status import JobStatus
from rlmesh.master.merged_logs import MergedLogs
from rlmesh.master.outcome import JobResult, job_failed, launch_failed
from rlmesh.master.processes import ProcessWatch, tail_of
from rlmesh.master.workspace import Workspace
from rlmesh.observe.live import JobView
from rlmesh.runtime.handle import MemberHandle
from rlmesh.runtime.runtime import Runtime

logger = logging.getLogger(__name__)

POLL_S = 0.2
START_POLL_S = 0.02
STOP_GRACE_S = 2.5
"""Grace of the members after Ctrl-C; all must be gone within 5 s."""
STOP_LIMIT_S = 3.2
"""After this the guardians end what the master has not ended."""
NODE_END_S = 10.0
SILENCE_S = 30.0
"""How long a master that lives may leave the driver without an answer."""

ENDED = ("succeeded", "failed", "stopped")


class Interrupt:
    """Asks a session to stop: once with grace, twice at once. Safe to call from signal handlers and threads."""

    def __init__(self) -> None:
        self.count = 0
        self.reason = ""
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        # Reentrant: a signal handler may run while this thread is inside.
        self._lock = threading.RLock()
        self._closed = False

    def fileno(self) -> int:
        return self._read

    def ask(self, reason: str) -> None:
        with self._lock:
            if self._closed:
                return
            self.count += 1
            self.reason = self.reason or reason
            try:
                os.write(self._write, b"x")
            except BlockingIOError:
                pass

    def clear(self) -> None:
        try:
            os.read(self._read, 4096)
        except BlockingIOError:
            pass

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self._read)
            os.close(self._write)


class Session:
    """Runs one job. ``status`` is the last snapshot and may be read from any thread.

    Args:
        space: folders and key, made for this job; the socket folder is removed at the end.
        configs: one agent's configuration per node.
        view: shows the job.
        interrupt: asks to stop.
        first_answer_s: how long the master may take to come up.
    """

    def __init__(
        self, job_name: str, space: Workspace, configs: Sequence[AgentConfig], view: JobView, interrupt: Interrupt,
        *, first_answer_s: float, report: Callable[[Path], Path | None],
    ) -> None:  # fmt: skip
        self.status = JobStatus(job_name, space.job_id, "starting", configs[0].submitted_at, str(space.run_dir))
        self._job_name, self._space, self._configs = job_name, space, configs
        self._view, self._interrupt, self._report = view, interrupt, report
        self._first_answer_s = first_answer_s
        self._nodes: list[GuardianProcess] = []
        self._watch = ProcessWatch()
        self._logs = MergedLogs(view.output)
        self._records = 0
        self._stop_sent_at: float | None = None
        self._killed = False

    def run(self) -> JobResult:
        """Run the job to its end.

        Raises:
            JobFailed: it failed, or one of its own processes died.
            KeyboardInterrupt: it was stopped by ``interrupt``.
        """
        try:
            try:
                self._start_nodes()
                with Runtime.start(name="driver", key=self._space.key, bind=False) as runtime:
                    self._follow(runtime.peer(MASTER, self._space.master_endpoint))
            except LaunchError as error:
                raise launch_failed(self._job_name, str(error), self._space.run_dir) from None
            finally:
                reports = self._end_nodes()
            return self._outcome(reports)
        finally:
            self._view.close()
            self._watch.close()
            self._space.remove_sockets()

    def _start_nodes(self) -> None:
        for config in self._configs:
            self._nodes.append(GuardianProcess(config))

    # Following

    def _follow(self, master: MemberHandle) -> None:
        """Until the job has ended, or can no longer end by itself."""
        self._await_master()
        began = time.monotonic()
        answered = began
        while self.status.stage not in ENDED:
            if self._is_cut_short():
                return
            try:
                self._take(master.options(timeout_s=2.0).call("status", self._records).result())
                answered = time.monotonic()
            except CallError as error:
                self._raise_if_dead()
                if time.monotonic() - answered > SILENCE_S:
                    raise LaunchError(f"the master has not answered for {SILENCE_S:g} s: {error}") from None
            self._send_stop(master)
            self._logs.poll()
            # Often at first, so that the view shows the start as it happens.
            self._sleep(POLL_S if time.monotonic() - began > 2.0 else POLL_S / 4)
        try:
            master.options(timeout_s=2.0).call("goodbye").result()
        except RLMeshError as error:
            logger.debug("goodbye was not answered: %s", error)

    def _await_master(self) -> None:
        """Until the master listens."""
        path = self._space.master_endpoint.removeprefix("ipc://")
        deadline = time.monotonic() + self._first_answer_s
        while not os.path.exists(path):
            self._raise_if_dead()
            if self._interrupt.count:
                return
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"the master did not start within {self._first_answer_s:g} s. "
                    + tail_of(self._space.run_dir, "agent-0.log", "master.log")
                )
            self._sleep(START_POLL_S)

    def _take(self, status: JobStatus) -> None:
        self._records = status.records_from + len(status.records)
        self.status = status
        self._watch.learn(status.extra)
        self._view.update(status)
        self._logs.follow(status.members)

    def _sleep(self, seconds: float) -> None:
        """Wait, but no longer than until a process of the job dies or a stop is asked for."""
        watched = [self._interrupt.fileno(), *self._watch.fds(), *(n.fileno() for n in self._nodes)]
        ready, _, _ = select.select(watched, [], [], seconds)
        if ready and self._interrupt.fileno() not in ready:
            # A death is told by its fd at once; its report may take a moment longer.
            time.sleep(START_POLL_S)
        self._interrupt.clear()

    def _raise_if_dead(self) -> None:
        """Raise if the job's own processes cannot carry it any further."""
        for node in self._nodes:
            if not node.running():
                report = node.wait(1.0)
                raise LaunchError(self._death_of_node(node, report))
        if (dead := self._watch.dead()) and self.status.stage not in ENDED:
            time.sleep(START_POLL_S * 5)
            for node in self._nodes:
                if not node.running():
                    raise LaunchError(self._death_of_node(node, node.wait(1.0)))
            raise LaunchError(
                f"the {dead} died, and the job with it. {tail_of(self._space.run_dir, 'agent-0.log', 'master.log')}"
            )

    def _death_of_node(self, node: GuardianProcess, report: ExitReport) -> str:
        name = self._configs[node.node_rank].node_name
        tail = tail_of(self._space.run_dir, f"agent-{node.node_rank}.log")
        if report.agent_code is None:
            return f"the guardian of node {name} (pid {node.pid}) died, and the node's processes with it. {tail}"
        how = f"exited with code {report.agent_code}"
        if report.agent_code < 0:
            how = f"was killed by {signal.Signals(-report.agent_code).name}"
        return f"the agent of node {name} {how}, and the node's processes ended with it. {tail}"

    # Stopping

    def _is_cut_short(self) -> bool:
        if self._interrupt.count > 1 and not self._killed:
            self._killed = True
            self._watch.kill_agents()
            return True
        return self._stop_sent_at is not None and time.monotonic() - self._stop_sent_at > STOP_LIMIT_S

    def _send_stop(self, master: MemberHandle) -> None:
        if self._interrupt.count and self._stop_sent_at is None:
            self._stop_sent_at = time.monotonic()
            master.notify("stop", self._interrupt.reason, STOP_GRACE_S)

    def _end_nodes(self) -> tuple[ExitReport, ...]:
        """Let every node end, and make sure of it."""
        for node in self._nodes:
            node.let_go()
        reports = []
        for node in self._nodes:
            try:
                reports.append(node.wait(NODE_END_S))
            except TimeoutError as error:
                logger.error("%s; it is killed", error)
                os.kill(node.pid, signal.SIGKILL)
                reports.append(node.wait(NODE_END_S))
        self._watch.await_end(NODE_END_S)
        return tuple(reports)

    def _outcome(self, reports: tuple[ExitReport, ...]) -> JobResult:
        self._logs.finish()
        for report in reports:
            for item in report.leftovers:
                level = logging.DEBUG if item.removed else logging.WARNING
                logger.log(level, "node %s left %s: %s", report.node_rank, item.kind, item.what)
        status, run_dir = self.status, self._space.run_dir
        picture = self._report(run_dir) if status.stage == "succeeded" else None
        self._view.finish(status, picture)
        if self._interrupt.count:
            raise KeyboardInterrupt(f"job {self._job_name} was stopped: {self._interrupt.reason}")
        if status.stage != "succeeded":
            raise job_failed(self._job_name, status.failures, run_dir)
        return JobResult(status, run_dir, picture, reports)


__all__ = ["Interrupt", "JobFailed", "Session"]
