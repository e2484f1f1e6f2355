"""A job that runs while its submitter does something else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Generator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rlmesh.errors import JobFailed, RLMeshError, UsageError
from rlmesh.job.status import JobStatus
from rlmesh.runtime.forked import forget_in_children, refusal

if TYPE_CHECKING:
    from rlmesh.master.driver import Driver, JobResult
    from rlmesh.runtime.runtime import Runtime

__all__ = ["JobHandle"]

JOIN_POLL_S = 0.05
END_S = 15.0
"""How long a job that was told to stop may take; its processes are killed well before."""


class JobHandle:
    """A submitted job, from ``submit(blocking=False)`` or ``start()``. Made by them only.

    Usable from threads (``result()``) and from event loops (``await handle``, ``async with job.start() as
    handle``). The job is driven by a thread of its own, and lives no longer than this process.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._future: Future[JobResult] = Future()
        self._future.set_running_or_notify_cancel()
        self._thread = threading.Thread(target=self._run, name=f"rlmesh-driver-{driver.job_name}")
        self._thread.start()
        forget_in_children(self)

    def forked(self) -> None:
        """In a forked child: the job's end is told to the parent."""
        self._future = Future()
        self._future.set_exception(UsageError(refusal("the process that started the job")))

    def _run(self) -> None:
        try:
            result = self._driver.run()
        except KeyboardInterrupt as stopped:
            self._future.set_exception(self._stopped(str(stopped)))
        except BaseException as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(result)

    def _stopped(self, text: str) -> JobFailed:
        error = JobFailed(text, [RLMeshError(text)])
        error.run_dir = self._driver.status.run_dir
        return error

    @property
    def job_name(self) -> str:
        return self._driver.job_name

    @property
    def status(self) -> JobStatus:
        """The last snapshot of the job: its stage, its members, what failed."""
        return self._driver.status

    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> JobResult:
        """Wait for the job's end. Ctrl-C while waiting stops the job.

        Raises:
            JobFailed: it failed or was stopped; holds the first causes.
            JobStopped: it had notice, and stopped where it can be resumed.
            TimeoutError: it has not ended within ``timeout_s``; it goes on.
        """
        try:
            return self._future.result(timeout_s)
        except KeyboardInterrupt:
            self.stop("Ctrl-C")
            self._thread.join(END_S)
            raise

    def stop(self, reason: str = "stop() was called") -> None:
        """Ask the job to end: with grace, or at once if called again. Returns immediately."""
        if not self.done():
            self._driver.stop(reason)

    def notice(self, reason: str = "notice() was called") -> None:
        """Let all ranks stop at the same step, save what must survive, and end. Returns immediately."""
        if not self.done():
            self._driver.notice(reason)

    @asynccontextmanager
    async def join(self, *, name: str = "service", timeout_s: float = 120.0) -> AsyncIterator[Runtime]:
        """Call the job's roles from this process, on the running loop, as `Runtime.join` does::

            async with job.start("demo") as handle, handle.join() as runtime:
                text = await RoleGroup("ROLLOUT", runtime=runtime).call_any("generate", prompt)

        Args:
            name: what members and logs call this process.
            timeout_s: how long to wait until the job has members.

        Raises:
            JobFailed, LaunchError, …: the job ended before; what ``result()`` raises.
            TimeoutError: it had no members in time.
        """
        from rlmesh.runtime.runtime import Runtime

        async with asyncio.timeout(timeout_s):
            # The way in outlives the job for a moment.
            while self.done() or (way_in := self._driver.way_in) is None:
                if self.done():
                    await self
                    raise UsageError(f"job {self.job_name} has ended, and cannot be joined")
                await asyncio.sleep(JOIN_POLL_S)
        address, key = way_in
        async with Runtime.join(address, key=key, name=name) as runtime:
            yield runtime

    def __await__(self) -> Generator[Any, None, JobResult]:
        return asyncio.shield(asyncio.wrap_future(self._future)).__await__()

    async def __aenter__(self) -> JobHandle:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the job if it has not ended; an error of it is raised unless the block raised already."""
        self.stop("the block of start() was left")
        stopped = not self.done()
        end = asyncio.wrap_future(self._future)
        await asyncio.wait({end}, timeout=END_S)
        failure = end.exception() if end.done() else None
        if failure is not None and error is None and not stopped:
            raise failure
