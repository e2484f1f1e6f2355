"""One job from the driver's side: start the nodes, watch, show, end, clean up.

All of this happens on the thread that waits for the job, because the guardians' parent-death signal is bound to the
thread that started them.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlmesh.agent.monitoring.logs import written_before
from rlmesh.agent.node_start import GuardianProcess
from rlmesh.agent.processes.stopped import LOOK_S, StoppedLooks
from rlmesh.agent.protocol import MASTER, AgentConfig, ExitReport
from rlmesh.driver.interrupt import Interrupt
from rlmesh.driver.job_processes import ProcessWatch, tail_of
from rlmesh.driver.outcome import JobResult, cut_short, job_failed, job_interrupted, job_stopped
from rlmesh.driver.post_mortem import write_post_mortem
from rlmesh.errors import CallError, LaunchError, RLMeshError
from rlmesh.job.status import ENDED, FailureInfo, JobStatus
from rlmesh.master.jobspec import WANTED_NODES
from rlmesh.rendezvous.remote_node import RemoteNode
from rlmesh.run_directory.merged_logs import MergedLogs
from rlmesh.run_directory.records import write_end
from rlmesh.run_directory.starts import note_end
from rlmesh.run_directory.workspace import Workspace
from rlmesh.runtime.process import clock
from rlmesh.runtime.process.descriptors import await_readable

if TYPE_CHECKING:
    from rlmesh.driver.relaunch import Relaunch
    from rlmesh.observe.views.live import JobView
    from rlmesh.rendezvous.server import RendezvousServer
    from rlmesh.runtime.handle import MemberHandle

logger = logging.getLogger(__name__)

POLL_S = 0.2
START_POLL_S = 0.02
STOP_GRACE_S = 2.5
"""Grace of the members after Ctrl-C; all must be gone within 5 s."""
STOP_WITHIN_S = 600.0
"""Seconds in which the ranks must reach the step at which they stop together."""
STOP_MARGIN_S = 0.7
"""Seconds after the grace until the agents are killed and the guardians end the remaining processes."""
NODE_END_S = 10.0
END_LOOK_S = 0.5
SILENCE_S = 30.0
"""Seconds for which a living master may leave the driver without an answer."""
MASTER_RETURN_S = 30.0
"""Seconds that a master may be away before the job is given up; its agent restarts it if it died."""


class _Broken(Exception):
    """The job can no longer end by itself; an empty message means that the exit reports have the cause."""


class Session:
    """Runs one job. ``status`` is the last snapshot and may be read from any thread.

    Args:
        space: folders and key, made for this job; the socket folder is removed at the end.
        configs: one agent's configuration per node.
        make_view: makes the view of the job; called while the nodes are starting, because it is slow.
        interrupt: source of stop requests.
        first_answer_s: maximum time of the master's start.
        report: draws the report of a run that succeeded.
        head: the rendezvous server, if nodes other than the first are on other machines.
        relaunch: asks for another machine when a needed one is lost.
        grace_s: between SIGTERM and SIGKILL when the job is stopped.
        stop_within_s: time in which the ranks must stop together.
    """

    def __init__(
        self, job_name: str, space: Workspace, configs: Sequence[AgentConfig], interrupt: Interrupt, *,
        make_view: Callable[[], JobView], first_answer_s: float, report: Callable[[Path], Path | None],
        head: RendezvousServer | None = None, relaunch: Relaunch | None = None, grace_s: float = STOP_GRACE_S,
        stop_within_s: float = STOP_WITHIN_S,
    ) -> None:  # fmt: skip
        self.status = JobStatus(job_name, space.job_id, "starting", configs[0].submitted_at, str(space.run_dir))
        self._job_name, self._space, self._configs = job_name, space, configs
        self._make_view, self._interrupt, self._report = make_view, interrupt, report
        self._first_answer_s = first_answer_s
        self._head, self._relaunch = head, relaunch
        self._replaced: list[RemoteNode] = []
        self._grace_s, self._stop_within_s = grace_s, stop_within_s
        self._nodes: list[GuardianProcess | RemoteNode] = []
        self._lost: set[int] = set()
        self._watch = ProcessWatch()
        self._records = 0
        self._ended_nodes: set[int] = set()
        self._away_since: float | None = None
        self._stop_sent_at: float | None = None
        self._notice_sent = False

    @property
    def address_and_key(self) -> tuple[str, bytes]:
        """Address of the job's master and the job's key."""
        return self._space.master_endpoint, self._space.key

    def run(self) -> JobResult:
        """Run the job to its end.

        Raises:
            JobFailed: the job failed, or one of its own processes died.
            JobStopped: the job stopped after a notice and can be resumed.
            KeyboardInterrupt: the job was stopped by ``interrupt``.
        """
        try:
            before = written_before(self._space.run_dir)
            broken = self._start_nodes()
            # Slow imports of the driver itself happen while the nodes start on other cores.
            self._view = self._make_view()
            self._logs = MergedLogs(self._view.output, self._view.ready, bars=self._view.bars)
            self._logs.skip(before)
            try:
                broken = self._drive(broken)
                return self._outcome(self._end_nodes(), broken)
            finally:
                self._view.close()
        finally:
            self._end_nodes()
            if self._relaunch is not None:
                self._relaunch.close()
            self._watch.close()
            self._space.remove_sockets()

    def _start_nodes(self) -> str | None:
        """Start all nodes; return why that failed, else None."""
        try:
            for config in self._configs:
                remote = self._head is not None and config.node_rank != 0
                self._nodes.append(self._head.start_node(config) if self._head and remote else GuardianProcess(config))
        except LaunchError as error:
            return str(error)
        return None

    def _drive(self, broken: str | None) -> str | None:
        if broken is not None:
            return broken
        from rlmesh.runtime.runtime import Runtime

        try:
            with Runtime.start(name="driver", key=self._space.key, bind=False, job_id=self._space.job_id) as runtime:
                self._follow(runtime.peer(MASTER, self._space.master_endpoint))
        except _Broken as error:
            return str(error)
        return None

    # Following the job

    def _follow(self, master: MemberHandle) -> None:
        """Follow the job until it has ended, or can no longer end by itself."""
        self._await_master()
        began = time.monotonic()
        while self.status.stage not in ENDED and self._update(master):
            self._logs.poll()
            self._forward_requests(master)  # a request during the snapshot, whose wake-up was consumed
            # Frequent at first, so that the view shows the start as it happens.
            self._wait(POLL_S if time.monotonic() - began > 2.0 else POLL_S / 4)
        if self.status.stage in ENDED:
            try:
                master.options(timeout_s=2.0).call("goodbye").result()
            except RLMeshError as error:
                logger.debug("goodbye was not answered: %s", error)

    def _await_master(self) -> None:
        """Wait until the master listens."""
        path = self._space.master_endpoint.partition("://")[2]
        deadline, looks, look_at = clock.now() + self._first_answer_s, StoppedLooks(), 0.0
        while not os.path.exists(path) and not self._interrupt.count:
            if clock.now() > deadline:
                where = tail_of(self._space.run_dir, "master.log", "agent-0.log")
                raise _Broken(f"the master did not start within {self._first_answer_s:g} s.\n{where}")
            if clock.now() >= look_at:
                look_at = clock.now() + LOOK_S
                self._end_stopped(looks)
            self._wait(START_POLL_S)

    def _end_stopped(self, looks: StoppedLooks) -> None:
        """Kill guardians that were stopped before they started their node, which would block the job's start for
        ever."""
        here = {node.pid: node for node in self._nodes if isinstance(node, GuardianProcess)}
        for pid in looks.look(here):
            logger.error("the guardian of node %d (pid %d) was stopped; it is killed", here[pid].node_rank, pid)
            here[pid].kill()

    def _update(self, master: MemberHandle) -> bool:
        """Take one snapshot; False if the job is to be cut short."""
        answer = master.options(timeout_s=SILENCE_S, idempotent=True).call("status", self._records)
        answer.add_done_callback(lambda _: self._interrupt.wake())
        while not answer.done():
            self._forward_requests(master)
            if self._is_cut_short():
                answer.cancel()
                self._watch.kill_agents()
                return False
            self._wait(POLL_S)
        try:
            status: JobStatus = answer.result()
        except CallError as error:
            self._await_return(error)
            return True
        self._away_since = None
        self._records = status.records_from + len(status.records)
        self._take(status, master)
        return True

    def _take(self, status: JobStatus, master: MemberHandle) -> None:
        self.status = status
        self._watch.learn(status.extra)
        self._view.update(status)
        if self._head is None:
            self._logs.follow(status.members)
        else:  # The other nodes print the logs of their own members.
            self._logs.follow(member for member in status.members if member.node_rank == 0)
            self._head.on_status(status)
            self._report_lost_nodes(master)
            self._replace_lost_nodes(status)

    def _replace_lost_nodes(self, status: JobStatus) -> None:
        """Ask for replacements of lost machines, and take in the ones that joined."""
        assert self._head is not None
        if self._relaunch is not None:
            wanted = {int(rank) for rank in status.extra.get(WANTED_NODES, "").split(",") if rank}
            # The server accepts no replacement before it knows that the node is gone.
            wanted -= {node.node_rank for node in self._nodes if node.running()}
            self._relaunch.look(wanted, {config.node_rank: config.node_name for config in self._configs})
        for new in self._head.replacements(status.job_id):
            at = next(i for i, node in enumerate(self._nodes) if node.node_rank == new.node_rank)
            old, self._nodes[at] = self._nodes[at], new
            assert isinstance(old, RemoteNode)
            self._replaced.append(old)
            self._lost.discard(new.node_rank)

    def _await_return(self, error: CallError) -> None:
        """Wait while the master is away: its agent restarts it, and the members go on.

        Raises:
            _Broken: the master has been away for too long.
        """
        now = clock.now()
        self._away_since = self._away_since or now
        if now - self._away_since > MASTER_RETURN_S:
            raise _Broken(f"the master has not answered for {now - self._away_since:.0f} s: {error}") from None
        self._wait(POLL_S)

    def _report_lost_nodes(self, master: MemberHandle) -> None:
        for node in self._nodes:
            if isinstance(node, RemoteNode) and not node.running() and node.node_rank not in self._lost:
                self._lost.add(node.node_rank)
                report = node.wait(0.0)
                how = f"has ended: {report.why or 'it gave no reason'}"
                self._notify(master, "agent_ended", node.node_rank, how, report.agent_code is not None)

    def _forward_requests(self, master: MemberHandle) -> None:
        """Pass stop requests on to the master, once."""
        if self._interrupt.noticed and not self._notice_sent:
            self._notice_sent = True
            self._notify(master, "notice", self._interrupt.noticed, self._stop_within_s, self._grace_s)
        if self._interrupt.count and self._stop_sent_at is None:
            self._stop_sent_at = clock.now()
            self._notify(master, "stop", self._interrupt.reason, self._grace_s)

    def _notify(self, master: MemberHandle, what: str, *args: object) -> None:
        """Call the master. If it dies before it has saved the request, the next master gets the call."""
        master.options(timeout_s=SILENCE_S, idempotent=True).call(what, *args)

    def _is_cut_short(self) -> bool:
        limit_s = self._grace_s + STOP_MARGIN_S
        late = self._stop_sent_at is not None and clock.now() - self._stop_sent_at > limit_s
        return late or self._interrupt.count > 1

    def _wait(self, seconds: float) -> None:
        """Wait until something happens, for ``seconds`` at most.

        Raises:
            _Broken: the guardian or the agent of the first node died; the exit reports will say which.
        """
        here = [node for node in self._nodes if isinstance(node, GuardianProcess)]
        running = [node for node in here if node.node_rank not in self._ended_nodes]
        watched = [self._interrupt.fileno(), *self._watch.fds(), *(node.fileno() for node in running)]
        await_readable(watched, seconds)
        self._interrupt.clear()
        self._ended_nodes |= {node.node_rank for node in running if not node.running()}
        if self._watch.fatal() or self._configs[0].node_rank in self._ended_nodes:
            raise _Broken("")
        for name in self._watch.died():
            what = "its agent starts it again, the members run on" if name.startswith("master") else "its node is lost"
            self._view.update(
                replace(self.status, records=(), records_from=self._records, note=f"the {name} died: {what}")
            )

    # The end

    def _end_nodes(self) -> tuple[ExitReport, ...]:
        """End all nodes and wait for their exit reports. Idempotent."""
        for node in self._nodes:
            node.let_go()
        reports = [node.wait(0.0) for node in self._replaced]
        running = clock.RunningTime(time.monotonic)
        # One deadline for all nodes together: many may be out of reach, and each would take the whole time.
        deadline = running() + NODE_END_S
        for node in self._nodes:
            while (report := _ended(node, min(END_LOOK_S, max(0.0, deadline - running())))) is None:
                if running() >= deadline:
                    logger.error("node %s did not end within %g s; it is killed", node.node_rank, NODE_END_S)
                    node.kill()
                    report = node.wait(NODE_END_S)
                    break
            reports.append(report)
        self._watch.await_end(NODE_END_S)
        return tuple(reports)

    def _outcome(self, reports: tuple[ExitReport, ...], broken: str | None) -> JobResult:
        self._logs.finish()
        for report in reports:
            for item in report.leftovers:
                level = logging.DEBUG if item.removed else logging.WARNING
                logger.log(level, "node %s left %s: %s", report.node_rank, item.kind, item.what)
        status, run_dir = self.status, self._space.run_dir
        if broken is not None:
            cause = broken or self._watch.cause_of_death(self._configs, reports, self._nodes, run_dir)
            failure = FailureInfo(cause, at=clock.epoch())
            status = replace(status, stage="failed", failures=(failure, *status.failures))
            if incident := write_post_mortem(status, run_dir, failure):
                status = replace(status, incidents=(*status.incidents, str(incident)))
        elif status.stage not in ENDED:
            status = cut_short(status)
        self.status = replace(status, records=())
        write_end(self.status)
        picture = self._report(run_dir) if status.stage == "succeeded" else None
        self._view.finish(replace(status, records_from=self._records, records=()), picture)
        note_end(
            run_dir, succeeded=status.stage == "succeeded", stopped_at=status.stopped_at,
            samples_trained=status.samples_trained,
        )  # fmt: skip
        if status.stage == "stopped" and status.resumable and not self._interrupt.count:
            raise job_stopped(self._job_name, status, self._interrupt.noticed, run_dir)
        if status.stage == "stopped":
            reason = self._interrupt.reason or status.note.removeprefix("stopped: ")
            raise job_interrupted(self._job_name, reason, status.killed)
        if status.stage == "failed":
            raise job_failed(self._job_name, status.failures, run_dir, output_shown=getattr(self._view, "shows", True))
        return JobResult(self.status, run_dir, picture, reports)


def _ended(node: GuardianProcess | RemoteNode, within_s: float) -> ExitReport | None:
    """Return a node's exit report; None if it has not ended within the time."""
    try:
        return node.wait(within_s)
    except TimeoutError:
        return None
