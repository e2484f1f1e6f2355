"""Handle of a job that runs while its submitter continues."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rlmesh.driver.outcome import CTRL_C
from rlmesh.errors import JobFailed, PeerLost, RLMeshError, UsageError
from rlmesh.job.status import JobStatus, first_cause
from rlmesh.runtime.argument_types import refuse_inside_loop
from rlmesh.runtime.process import clock
from rlmesh.runtime.process.forked import forget_in_children, refusal

if TYPE_CHECKING:
    from rlmesh.driver.driver import Driver, JobResult
    from rlmesh.runtime.calling.peer_table import JobEnd
    from rlmesh.runtime.connections.joining import Joining
    from rlmesh.runtime.runtime import Runtime

__all__ = ["JobHandle", "JoinedJob"]

JOIN_POLL_S = 0.05
LAST_JOIN_S = 1.0
"""Shortest time that the job's master has to answer."""
END_S = 15.0
"""Seconds that a stopped job may take to end; its processes are killed well before."""


class JobHandle:
    """A submitted job; made by ``submit(blocking=False)`` and ``start()``.

    Usable from threads (``result()``, ``with job.start() as handle``) and from event loops (``await handle``, ``async
    with job.start() as handle``). The job is driven by a thread of its own, and ends with this process.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._asked = False
        self._future: Future[JobResult] = Future()
        self._future.set_running_or_notify_cancel()
        self._thread = threading.Thread(target=self._run, name=f"rlmesh-driver-{driver.job_name}")
        self._thread.start()
        forget_in_children(self)

    def forked(self) -> None:
        """In a forked child: raise from all waits, because the job's end is reported to the parent only."""
        self._future = Future()
        self._future.set_exception(UsageError(refusal("the process that started the job")))

    def _run(self) -> None:
        try:
            result = self._driver.run()
        except KeyboardInterrupt as stopped:
            self._future.set_exception(self._stopped(stopped))
        except BaseException as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(result)

    def _stopped(self, stopped: KeyboardInterrupt) -> JobFailed:
        text = str(stopped)
        error = JobFailed(text, [RLMeshError(text)])
        error.run_dir = self._driver.status.run_dir
        error.stop_signal = getattr(stopped, "stop_signal", 0)
        return error

    @property
    def job_name(self) -> str:
        return self._driver.job_name

    @property
    def status(self) -> JobStatus:
        """The last snapshot of the job: its stage, its members, its failures."""
        return self._driver.status

    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> JobResult:
        """Wait for the job's end. Ctrl-C while waiting stops the job.

        Raises:
            JobFailed: the job failed or was stopped; holds the first causes.
            JobStopped: the job stopped after a notice and can be resumed.
            TimeoutError: the job has not ended within ``timeout_s``; it goes on.
        """
        try:
            return self._future.result(timeout_s)
        except KeyboardInterrupt:
            self.stop(CTRL_C)
            self._thread.join(END_S)
            raise

    def stop(self, reason: str = "stop() was called") -> None:
        """Ask the job to end: with grace, or at once if called again. Returns immediately."""
        if not self.done():
            self._asked = True
            self._driver.stop(reason)

    def notice(self, reason: str = "notice() was called") -> None:
        """Let all ranks stop at the same step, save what must survive, and end. Returns immediately."""
        if not self.done():
            self._driver.notice(reason)

    def join(self, *, name: str = "service", timeout_s: float = 120.0) -> JoinedJob:
        """Call the job's roles from this process: on the running loop, or, in a program without one, from plain
        threads, as `Runtime.join` does::

            async with job.start("demo") as handle, handle.join() as runtime:
                text = await RoleGroup("ROLLOUT", runtime=runtime).call_any("generate", prompt)

            with job.start("demo") as handle, handle.join() as runtime:
                text = RoleGroup("ROLLOUT", runtime=runtime).call_any("generate", prompt).result()

        If the job fails while the block runs, its pending calls and later ones raise `PeerLost` that names the first
        cause, and the block raises the job's own error instead.

        Args:
            name: name of this process for members and logs.
            timeout_s: maximum wait until the job has members.

        Raises, when the block is entered:
            JobFailed, LaunchError, …: the job ended before; what ``result()`` raises.
            TimeoutError: the job had no members in time.
        """
        return JoinedJob(self, name, timeout_s)

    def address_and_key(self) -> tuple[str, bytes] | None:
        """Return the address of the job's master and the job's key; None before the job has members.

        Raises:
            JobFailed, …: the job has ended.
        """
        address_and_key = self._driver.address_and_key
        if self.done():  # The driver still knows the address for a moment.
            self._future.result()
            raise UsageError(f"job {self.job_name} has ended, and cannot be joined")
        return address_and_key

    def end_reason(self) -> JobEnd | None:
        """Return the reason why the job is ending, or has ended; None as long as it goes on."""
        from rlmesh.runtime.calling.peer_table import JobEnd

        if self._future.done():
            error = self._future.exception()
            return JobEnd(f"job {self.job_name} has ended" if error is None else str(error).splitlines()[0], error)
        status = self.status
        if status.failures and status.stage in ("stopping", "failed"):
            return JobEnd(first_cause(self.job_name, status.failures))
        return None

    def when_done(self, fn: Callable[[], object]) -> None:
        """Call ``fn`` once the job has ended, on any thread."""
        self._future.add_done_callback(lambda _: fn())

    def failure(self, timeout_s: float) -> BaseException | None:
        """Return the job's error; blocks for at most ``timeout_s`` if the job is ending. None if it has no error, goes
        on, or was ended by ``stop()``."""
        if self._asked:
            return None
        if self.end_reason() is not None:
            wait([self._future], timeout_s)
        return self._future.exception() if self._future.done() and not self._asked else None

    def __await__(self) -> Generator[Any, None, JobResult]:
        return asyncio.shield(asyncio.wrap_future(self._future)).__await__()

    async def __aenter__(self) -> JobHandle:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the job if it has not ended; raises the job's error unless the block raised already."""
        self.stop("the block of start() was left")
        stopped = not self.done()
        end = asyncio.wrap_future(self._future)
        await asyncio.wait({end}, timeout=END_S)
        failure = end.exception() if end.done() else None
        if failure is not None and error is None and not stopped:
            raise failure

    def __enter__(self) -> JobHandle:
        refuse_inside_loop("job.start()", "async with job.start()")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the job as ``async with`` does."""
        self.stop("the block of start() was left")
        stopped = self._asked
        wait([self._future], END_S)
        failure = self._future.exception() if self._future.done() else None
        if failure is not None and error is None and not stopped:
            raise failure


class JoinedJob:
    """A block in which this process can call a job's roles. Made by `JobHandle.join`."""

    def __init__(self, handle: JobHandle, name: str, timeout_s: float) -> None:
        self._handle, self._name, self._timeout_s = handle, name, timeout_s
        self._joining: Joining[Runtime] | None = None

    def _begin(self, address_and_key: tuple[str, bytes], deadline: float) -> Joining[Runtime]:
        from rlmesh.runtime.runtime import Runtime

        address, key = address_and_key
        timeout_s = max(LAST_JOIN_S, deadline - clock.now())
        self._joining = Runtime.join(address, key=key, name=self._name, timeout_s=timeout_s)
        return self._joining

    def _check_time(self, deadline: float) -> None:
        if clock.now() > deadline:
            raise TimeoutError(f"job {self._handle.job_name} had no members after {self._timeout_s:g} s")

    def _watch(self, runtime: Runtime) -> Runtime:
        """Let the runtime's calls end with the job, and name the reason."""
        handle = self._handle
        peers = runtime.outbound.peers
        known = peers.job_end
        peers.job_end = lambda: handle.end_reason() or known()
        ref = weakref.ref(runtime)

        def on_end() -> None:
            found, end = ref(), handle.end_reason()
            if found is not None and end is not None:
                found.end_calls(end.why)

        handle.when_done(on_end)
        return runtime

    def _raise_instead(self, error: BaseException | None, failure: BaseException | None) -> None:
        """Raise the job's own failure in place of a lost member's error."""
        if failure is not None and isinstance(error, PeerLost):
            raise failure from error

    async def __aenter__(self) -> Runtime:
        deadline = clock.now() + self._timeout_s
        while (address_and_key := self._handle.address_and_key()) is None:
            self._check_time(deadline)
            await asyncio.sleep(JOIN_POLL_S)
        try:
            return self._watch(await self._begin(address_and_key, deadline).__aenter__())
        except PeerLost as error:
            self._raise_instead(error, await asyncio.to_thread(self._handle.failure, END_S))
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._joining is not None
        await self._joining.__aexit__(kind, error, trace)
        if isinstance(error, PeerLost):
            self._raise_instead(error, await asyncio.to_thread(self._handle.failure, END_S))

    def __enter__(self) -> Runtime:
        refuse_inside_loop("handle.join()", "async with handle.join()")
        deadline = clock.now() + self._timeout_s
        while (address_and_key := self._handle.address_and_key()) is None:
            self._check_time(deadline)
            time.sleep(JOIN_POLL_S)
        try:
            return self._watch(self._begin(address_and_key, deadline).__enter__())
        except PeerLost as error:
            self._raise_instead(error, self._handle.failure(END_S))
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._joining is not None
        self._joining.__exit__(kind, error, trace)
        if isinstance(error, PeerLost):
            self._raise_instead(error, self._handle.failure(END_S))
