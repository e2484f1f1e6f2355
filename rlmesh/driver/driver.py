"""The driver: runs a submitted job and waits for its end.

``run_job`` blocks until the job has ended. ``Driver`` does the same on a thread of the caller's choice, with ``stop()``
and ``status``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlmesh import private_files
from rlmesh.agent.machine_checks import gather, judge
from rlmesh.agent.processes.oom import at_the_limit
from rlmesh.driver.failure_report import report_ends_briefly
from rlmesh.driver.interrupt import Interrupt
from rlmesh.driver.options import Cluster, LaunchOptions, ambient, effective, register_job
from rlmesh.driver.outcome import CTRL_C, JobResult, describe_failure
from rlmesh.driver.session import STOP_GRACE_S, STOP_WITHIN_S, Session
from rlmesh.driver.standard_streams import fill_standard_streams
from rlmesh.driver.submission import agent_configs, cluster_for, demand_of, expected_nodes, job_spec
from rlmesh.errors import LaunchError, PreflightError, UsageError
from rlmesh.job.context import current_worker
from rlmesh.job.description.checks import checks_nodes
from rlmesh.job.description.config import JobDescription
from rlmesh.job.jsonable import jsonable
from rlmesh.job.masking import masked, register_secrets, secrets_in
from rlmesh.job.status import JobStatus
from rlmesh.master.chaos_plan import parse_kills
from rlmesh.master.state.store import STORE_FILE, StoreRefused, check_store
from rlmesh.observe.views.safe_text import json_text
from rlmesh.placement.planner import make_plan
from rlmesh.rendezvous.stop_signals import HEEDED, gives_notice, handling
from rlmesh.run_directory.discovery import running_jobs
from rlmesh.run_directory.records import forget_end, remember
from rlmesh.run_directory.starts import await_guardians, hold, note_start
from rlmesh.run_directory.workspace import Workspace
from rlmesh.runtime.process import clock
from rlmesh.runtime.process.forked import forget_in_children
from rlmesh.wire.main_module import alias_main

if TYPE_CHECKING:
    from rlmesh.driver.relaunch import Relaunch
    from rlmesh.observe.views.live import JobView
    from rlmesh.rendezvous.server import RendezvousServer

__all__ = ["Driver", "JobResult", "LaunchOptions", "ambient", "describe_failure", "run_job"]

DEFAULT_NAME = "job"
ANSWER_MARGIN_S = 15.0
RELAUNCH_WAIT_S = 300.0
"""Default number of seconds that a requested replacement machine may take to join."""


def run_job(config: JobDescription, job_name: str | None = None, options: LaunchOptions | None = None) -> JobResult:
    """Run a job with a checked description on the calling thread and wait for its end.

    On the main thread, the first Ctrl-C or SIGTERM stops the job with grace, the second at once; in both cases all its
    processes are gone before ``KeyboardInterrupt`` is raised. SIGUSR1 lets all ranks stop at the same step.

    Raises:
        JobSpecError: the configuration cannot be sent to the workers.
        PlacementError: the cluster cannot hold the job; nothing was started.
        JobFailed: the job failed; the exceptions are the first causes, ``run_dir`` has the logs.
        JobStopped: the job stopped after a notice and can be resumed.
        KeyboardInterrupt: the job was stopped.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise UsageError(
            "submit() would block the event loop that runs in this thread: use 'async with job.start()' instead"
        )
    report_ends_briefly()
    driver = Driver(config, job_name, options)
    with handling((signal.SIGINT, *HEEDED), driver.on_signal):
        return driver.run()


class Driver:
    """One start of a job. ``run`` works on the thread that calls it; other methods may be called from any thread.

    Args:
        config: the job's description.
        job_name: name of the run; by default the description's name.
        options: launch options.
        serves: a job without a role that drives it lives until it is stopped.

    Raises:
        UsageError: the driver was made inside a worker, by a script that submits a job when it is imported.
        JobSpecError, PlacementError: the job cannot be started; nothing was started.
    """

    def __init__(
        self, config: JobDescription, job_name: str | None = None, options: LaunchOptions | None = None, *,
        serves: bool = False,
    ) -> None:  # fmt: skip
        _refuse_inside_worker()
        self._serves = serves
        fill_standard_streams()
        alias_main()
        self._config = config
        self._options = effective(options)
        self._submitted_at = self._options.submitted_at or clock.epoch()
        self.job_name = job_name or config.job_name or DEFAULT_NAME
        if self._options.preview is not None:
            self._options.preview(config, self.job_name)
        self._demand = demand_of(config)
        self._cluster = cluster_for(config, self._demand, self._options.cluster)
        if self._options.head is not None:
            self._options.head.on_signal = self._signalled_elsewhere
        nodes = expected_nodes(self._cluster)
        if nodes is not None and self._options.head is None:
            make_plan(self._demand, nodes)
        self._interrupt = Interrupt()
        self._session: Session | None = None
        self._ended = threading.Event()
        self._lock_fd: int | None = None
        register_job(self)
        forget_in_children(self)

    def forked(self) -> None:
        """In a forked child: mark the job as ended, because it belongs to the parent."""
        self._ended = threading.Event()
        self._ended.set()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    @property
    def status(self) -> JobStatus:
        """The last snapshot, without metric records."""
        if self._session is None:
            return JobStatus(self.job_name, "", "starting", self._submitted_at, "")
        return self._session.status

    def stop(self, reason: str = "stop() was called") -> None:
        """End the job: the first call with grace, a second call at once. Returns immediately."""
        self._interrupt.ask(reason)

    def notice(self, reason: str) -> None:
        """Let all ranks stop at the same step, save what must survive, and end. Returns immediately."""
        self._interrupt.notice(reason)

    def _signalled_elsewhere(self, number: int, text: str) -> None:
        if gives_notice(number):
            self.notice(text)
        else:
            self.stop(text)

    @property
    def address_and_key(self) -> tuple[str, bytes] | None:
        """Address of the job's master and the job's key; None before there are members to call."""
        session = self._session
        return None if session is None or not session.status.members else session.address_and_key

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait until ``run`` has ended; False if it has not within ``timeout_s``."""
        return self._ended.wait(timeout_s)

    def run(self) -> JobResult:
        """Run the job. Call it once. Raises as ``run_job``."""
        try:
            trackers = self._trackers()
            session = self._make_session()
            with trackers(Path(session.status.run_dir)):
                return session.run()
        except Exception as error:
            if short := at_the_limit():
                error.add_note(short)
            raise
        finally:
            self._ended.set()
            self._interrupt.close()
            if self._lock_fd is not None:
                os.close(self._lock_fd)

    def _trackers(self) -> Callable[[Path], AbstractContextManager[None]]:
        """A function from the run directory to a block in which the job's trackers follow it.

        Raises:
            UsageError: a tracker cannot be used.
        """
        if not self._options.trackers:
            return lambda run_dir: nullcontext()
        from rlmesh.observe.trackers.trackers import Trackers

        trackers = Trackers(self._options.trackers)
        return lambda run_dir: trackers.following(run_dir, self.job_name)

    def _make_session(self) -> Session:
        config, options = self._config, self._options
        checked = checks_nodes(config.workloads)
        if checked:
            _check_this_machine()
        if options.head is not None:
            self._cluster = self._gathered(options.head, checked=checked)
        preload, limits = config.preload_items(), config.limits.under(options.limits)
        space = Workspace.create(self.job_name, options.run_dir, options.run_root, options.key)
        grace_s = STOP_GRACE_S if options.grace_s is None else options.grace_s
        try:
            check_store(space.run_dir / STORE_FILE)
            self._lock_fd = hold(space.run_dir)
            await_guardians(space.run_dir)
            running_jobs()  # removes the folders of dead jobs, that of this run directory's last job among them
            forget_end(space.run_dir)
            resume = note_start(space.run_dir, options.restarts or 0)
            relaunch = self._relaunch(space)
            if relaunch is not None and limits.node_wait_s == 0:
                limits = replace(limits, node_wait_s=RELAUNCH_WAIT_S)
            spec = job_spec(
                config, self.job_name, self._demand, self._cluster, space, limits=limits,
                restart=options.restart, max_restarts=options.max_restarts, submitted_at=self._submitted_at,
                grace_s=grace_s, resume=resume, serves=self._serves,
            )  # fmt: skip
            if options.observe is not None:
                parse_kills(options.observe.chaos, {role.name: role.members for role in spec.roles})
                if options.observe.metrics:
                    from rlmesh.observe.prometheus import check_free

                    check_free(options.observe.metrics)
                spec = replace(spec, observe=options.observe)
            register_secrets(secret for role in spec.roles for secret in secrets_in(role.env))
            space.write_job(spec, 1 if options.head is not None else len(self._cluster.names))
            private_files.write_whole(space.run_dir / "job.json", described(config) + "\n")
            remember(space.run_dir)
        except BaseException as error:
            space.remove_sockets()
            if isinstance(error, StoreRefused):
                raise LaunchError(str(error)) from None
            if isinstance(error, OSError):
                raise LaunchError(f"the job's files cannot be written: {error}") from error
            raise
        self._session = Session(
            self.job_name, space, agent_configs(spec, self._cluster, space, preload, config.global_env),
            self._interrupt, make_view=self._make_view, first_answer_s=limits.agents_s + ANSWER_MARGIN_S,
            report=self._draw_report, head=options.head, relaunch=relaunch, grace_s=grace_s,
            stop_within_s=STOP_WITHIN_S if options.stop_within_s is None else options.stop_within_s,
        )  # fmt: skip
        return self._session

    def _relaunch(self, space: Workspace) -> Relaunch | None:
        """Return the command runner for replacement machines, in a job of several nodes that names a command."""
        head = self._options.head
        if head is None or not self._config.relaunch:
            return None
        env = {
            "RLMESH_JOB_ID": space.job_id,
            "RLMESH_NNODES": str(head.options.most),
            "RLMESH_RDZV_ENDPOINT": head.endpoint,
        }
        from rlmesh.driver.relaunch import Relaunch

        return Relaunch(self._config.relaunch, space.run_dir, env)

    def _gathered(self, head: RendezvousServer, *, checked: bool) -> Cluster:
        """Return the nodes of this job, once they have joined and (``checked``) have reached each other."""
        nodes = head.wait_full(lambda: self._interrupt.count > 0)
        if checked:
            head.check(nodes)
        given = Cluster(
            tuple(node.name for node in nodes),
            self._options.cluster.devices_per_node if self._options.cluster is not None else None,
            tuple(node.node_rank for node in nodes),
            tuple(node.host for node in nodes),
            groups=tuple(node.group for node in nodes),
        )
        return cluster_for(self._config, self._demand, given)

    # Modules that are slow to import are imported on use, so that the nodes start without waiting for them.

    def _make_view(self) -> JobView:
        from rlmesh.observe.views.live import make_view

        return make_view(self._options.view or "auto")

    def _draw_report(self, run_dir: Path) -> Path | None:
        if self._options.report is False:
            return None
        from rlmesh.observe.run_report import draw_report

        return draw_report(run_dir)

    def on_signal(self, number: int) -> None:
        """SIGINT and SIGTERM stop the job, SIGUSR1 (under Slurm also SIGTERM) gives notice."""
        if gives_notice(number):
            self.notice(signal.Signals(number).name)
        else:
            self.stop(CTRL_C if number == signal.SIGINT else signal.Signals(number).name)


def described(config: JobDescription) -> str:
    """Return a job's description as JSON, without its secrets."""
    try:
        plain = config.model_dump(mode="json")
    except ValueError:  # text that UTF-8 cannot encode
        plain = jsonable(config.model_dump())
    return json_text(jsonable(masked(plain)), indent=2)


def _check_this_machine() -> None:
    """Check this machine before anything starts, for faults that would end the job later.

    Raises:
        PreflightError: this machine is not fit for jobs; says what to do.
    """
    wrong = [check for check in judge(gather(names=False)) if check.verdict == "failed"]
    if wrong:
        lines = "\n".join(f"{check.name}: {check.text}; {check.advice}" for check in wrong)
        raise PreflightError(f"{os.uname().nodename} is not fit for the job (see `rlmesh doctor`):\n{lines}")


def _refuse_inside_worker() -> None:
    try:
        worker = current_worker()
    except UsageError:
        return
    raise UsageError(
        f"{worker.name} (pid {os.getpid()}) is a worker and tried to submit a job: its script is imported by "
        "the workers, so submit only under  if __name__ == '__main__':"
    )
