"""``DLConfig``: the description of a job, which builders make and which starts itself.

The driver and the planner are imported when they are used, because workers import this module too.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args, overload

from rlmesh.errors import JobSpecError, UsageError
from rlmesh.job.description.checks import driver_problems
from rlmesh.job.description.config import JobDescription, job_name_problems
from rlmesh.job.nearest_name import did_you_mean
from rlmesh.runtime.process import clock

if TYPE_CHECKING:
    from rlmesh.driver.driver import JobResult, LaunchOptions
    from rlmesh.driver.handle import JobHandle
    from rlmesh.placement.planner import Plan
    from rlmesh.placement.preview import ClusterLike

__all__ = ["DLConfig", "DLJob"]

View: TypeAlias = Literal["auto", "live", "plain", "none"]


class DLConfig(JobDescription):
    """A job that can be planned, submitted and started; :class:`JobDescription` has its fields and checks."""

    def plan(self, cluster: ClusterLike | None = None) -> Plan:
        """Return where the members would run, without starting anything.

        Args:
            cluster: a TOML file that describes a cluster, an equal mapping, or the nodes; by default this machine.

        Raises:
            JobSpecError: the description cannot work; lists all its faults.
            PlacementError: the cluster cannot hold the job; has a table of what is missing.
        """
        self.check()
        from rlmesh.placement.preview import plan_job

        return plan_job(self, cluster)

    def known_run_dir(self, run_dir: str | Path | None = None) -> Path | None:
        """The run directory of `submit`, given its argument and what `rlmesh launch` says; None: it makes a new one."""
        from rlmesh.driver.options import effective

        return effective(self._launch_options(None, run_dir, 0.0)).run_dir

    @overload
    def submit(
        self,
        job_name: str | None = None,
        blocking: Literal[True] = True,
        *,
        view: View | None = None,
        run_dir: str | Path | None = None,
        trackers: Sequence[str] = (),
    ) -> JobResult: ...

    @overload
    def submit(
        self,
        job_name: str | None = None,
        *,
        blocking: Literal[False],
        view: View | None = None,
        run_dir: str | Path | None = None,
        trackers: Sequence[str] = (),
    ) -> JobHandle: ...

    def submit(
        self,
        job_name: str | None = None,
        blocking: bool = True,
        *,
        view: View | None = None,
        run_dir: str | Path | None = None,
        trackers: Sequence[str] = (),
    ) -> JobResult | JobHandle:
        """Run the job and wait for its end.

        Args:
            job_name: name of the run; by default the description's own name.
            blocking: ``False`` returns a ``JobHandle`` at once.
            view: how progress is shown; ``auto`` unless the launcher sets another.
            run_dir: folder of logs and metrics; by default a new one under ``runs``.
            trackers: names of trackers that show the metrics, such as ``["wandb"]``; see `Trackers`.

        Raises:
            JobSpecError: the description cannot work; lists all its faults.
            PlacementError: the cluster cannot hold the job.
            UsageError: called inside a running event loop, which it would block.
            JobFailed: the job failed; holds the first causes.
        """
        called_at = clock.epoch()
        if _inside_loop():
            raise UsageError(
                "submit() was called inside a running event loop, which it would block: use "
                "'async with job.start(...) as handle: await handle' there"
            )
        if not blocking:
            return self.start(job_name, view=view, run_dir=run_dir, trackers=trackers)
        problems = [*self.problems(), *job_name_problems(job_name)]
        if problems := problems or driver_problems(self.workloads):
            raise JobSpecError(problems)
        from rlmesh.driver.driver import run_job

        return run_job(self, job_name, self._launch_options(view, run_dir, called_at, trackers))

    def start(
        self,
        job_name: str | None = None,
        *,
        view: View | None = None,
        run_dir: str | Path | None = None,
        trackers: Sequence[str] = (),
    ) -> JobHandle:
        """Start the job and return at once; for event loops, which it never blocks, and for programs that call
        its roles themselves::

            async with job.start("demo") as handle:
                result = await handle

            with job.start("serving") as handle, handle.join() as runtime:
                RoleGroup("ECHO", runtime=runtime).call("say", "hello").result()

        A job in which no role has a ``run()`` is driven by the caller: it lives until ``handle.stop()``, or until the
        end of the block.

        Raises as ``submit`` does, except that ``JobFailed`` comes from the handle.
        """
        called_at = clock.epoch()
        from rlmesh.driver.driver import Driver
        from rlmesh.driver.handle import JobHandle

        if problems := [*self.problems(), *job_name_problems(job_name)]:
            raise JobSpecError(problems)
        return JobHandle(Driver(self, job_name, self._launch_options(view, run_dir, called_at, trackers), serves=True))

    def _launch_options(
        self, view: View | None, run_dir: str | Path | None, called_at: float, trackers: Sequence[str] = ()
    ) -> LaunchOptions:
        from rlmesh.driver.driver import LaunchOptions

        if view is not None and view not in get_args(View):
            raise UsageError(f"view: there is no view {view!r}.{did_you_mean(str(view), get_args(View))}")
        if not isinstance(run_dir, str | os.PathLike | None):
            raise UsageError(f"run_dir: {run_dir!r} ({type(run_dir).__name__}) is not a path: give text or a Path")
        folder = Path(run_dir) if run_dir is not None else None
        if trackers:
            from rlmesh.observe.trackers.trackers import Trackers

            Trackers(trackers)  # refuses names that cannot be used
        return LaunchOptions(view=view, run_dir=folder, submitted_at=called_at, trackers=tuple(trackers) or None)


def _inside_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


DLJob = DLConfig
"""The class that builders return."""
