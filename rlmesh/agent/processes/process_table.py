"""The processes of a node, watched on the agent's loop through their process descriptors."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from rlmesh.agent.processes import ownership
from rlmesh.agent.processes.process import Ended, Process, collect, start_process
from rlmesh.runtime.process import clock

__all__ = ["Child", "ProcessTable", "stop", "wait_processes"]

logger = logging.getLogger(__name__)

REMIND = 0.6
"""Share of the grace after which a worker's ``run()`` is interrupted if it has not reached a step boundary."""
ORPHAN_GRACE_S = 0.5
"""Seconds between SIGTERM and SIGKILL for processes that a dead process left behind."""
ORPHAN_WAIT_S = 5.0


@dataclass(eq=False, slots=True)
class Child:
    """A known child of the agent. ``ended`` is set within one loop turn of its death."""

    pid: int
    name: str
    ended: asyncio.Future[Ended]
    _pidfd: int = field(default=-1, repr=False)


class ProcessTable:
    """All children of this process, which must be a subreaper. Not thread-safe: belongs to one loop.

    A child that is not in the table is an orphan of a child that died, since every worker adopts
    its own orphans while it lives.
    """

    def __init__(self, on_exit: Callable[[Child, Ended], None] = lambda child, ended: None) -> None:
        self.started = 0
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._children: dict[int, Child] = {}
        self._forks_in_flight = 0
        self._no_fork = asyncio.Event()
        self._no_fork.set()
        self._sweeping = asyncio.Lock()

    def __iter__(self) -> Iterator[Child]:
        return iter(list(self._children.values()))

    def __contains__(self, child: Child) -> bool:
        return self._children.get(child.pid) is child

    def start(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        log_path: str | None = None,
        inherit: Mapping[int, int] | None = None,
    ) -> Child:
        """Start a program (see :func:`rlmesh.agent.processes.process.start_process`) and watch it.

        Raises:
            LaunchError: the program could not be started.
        """
        return self.adopt(name, start_process(argv, env, log_path=log_path, inherit=inherit))

    def adopt(self, name: str, pid: int) -> Child:
        """Watch a process that is a child of this one, or is about to become one."""
        child = Child(pid, name, self._loop.create_future(), os.pidfd_open(pid))
        self._children[pid] = child
        self.started += 1
        self._loop.add_reader(child._pidfd, self._exited, child)
        return child

    @contextmanager
    def fork_in_flight(self) -> Iterator[None]:
        """Treat no unknown child as an orphan while a fork is requested and its process number is not known yet."""
        self._forks_in_flight += 1
        self._no_fork.clear()
        try:
            yield
        finally:
            self._forks_in_flight -= 1
            if self._forks_in_flight == 0:
                self._no_fork.set()

    def _exited(self, child: Child) -> None:
        try:
            ended = collect(child.pid)
        except ChildProcessError:
            ended = Ended(child.pid, None, None, 0, clock.epoch())
        if ended is None:
            return
        self._loop.remove_reader(child._pidfd)
        os.close(child._pidfd)
        del self._children[child.pid]
        if not child.ended.done():
            child.ended.set_result(ended)
        self._on_exit(child, ended)

    def signal(self, child: Child, number: int) -> bool:
        """Send a signal; False if the child is gone."""
        if child not in self:
            return False
        try:
            signal.pidfd_send_signal(child._pidfd, number)
        except ProcessLookupError:
            return False
        return True

    async def stop(self, child: Child, grace_s: float) -> Ended:
        """Send SIGTERM; after the share ``REMIND`` of the grace the signal `ownership.REMINDER`, if the child handles
        it; after the grace SIGKILL (without grace: at once). ``end_orphans`` ends the processes that the child leaves
        behind.

        Raises:
            TimeoutError: SIGKILL did not end the child within 5 s (it waits in the kernel).
        """
        if grace_s <= 0:
            return await self.kill(child)
        for number, share in ((signal.SIGTERM, REMIND), (ownership.REMINDER, 1 - REMIND)):
            if number == signal.SIGTERM or ownership.handles(child.pid, number):
                self.signal(child, number)
            with suppress(TimeoutError):
                async with clock.timeout(grace_s * share):
                    return await asyncio.shield(child.ended)
        logger.warning("%s (pid %d) did not end within %g s of SIGTERM: SIGKILL", child.name, child.pid, grace_s)
        return await self.kill(child)

    async def kill(self, child: Child) -> Ended:
        """Send SIGKILL and wait for the end.

        Raises:
            TimeoutError: the child did not end within 5 s.
        """
        self.signal(child, signal.SIGKILL)
        return await asyncio.wait_for(asyncio.shield(child.ended), 5.0)

    async def end_orphans(self, left_by: str) -> dict[Process, str]:
        """End the processes that dead children left behind, by SIGTERM, then SIGKILL; return them with their owners.

        ``left_by`` is the process that has just ended; the mark in a process's environment takes precedence.
        """
        async with self._sweeping:
            found: dict[Process, str] = {}
            deadline = time.monotonic() + ORPHAN_WAIT_S
            number, patience_s = signal.SIGTERM, ORPHAN_GRACE_S
            while True:
                await self._no_fork.wait()
                orphans = self._orphans()
                if not orphans:
                    break
                for process in orphans:
                    if process not in found:
                        found[process] = ownership.read_mark(process.pid, ownership.MEMBER_MARK) or left_by
                        logger.warning("%s left %s behind; it is ended", found[process], process)
                if time.monotonic() > deadline:
                    logger.error("could not be ended: %s", orphans)
                    break
                for process in orphans:
                    ownership.send_signal(process, number)
                await wait_processes(orphans, patience_s)
                number = signal.SIGKILL
            return found

    def _orphans(self) -> list[Process]:
        """Running processes below unknown children; dead ones among these children are reaped.

        Every process that the table starts leads a session of its own, and neither it nor its descendants can return to
        this process's session. A child in this process's session was therefore started by a library here, such as
        multiprocessing's resource tracker.
        """
        own, session = os.getpid(), os.getsid(0)
        pids: set[int] = set()
        running = []
        for process in ownership.descendants(own):
            if process.parent not in pids and (
                process.parent != own or process.pid in self._children or process.session == session
            ):
                continue
            pids.add(process.pid)
            if process.running:
                running.append(process)
            elif process.parent == own:
                os.waitpid(process.pid, os.WNOHANG)
        return running

    def close(self) -> None:
        """Stop watching; the processes stay as they are."""
        for child in self:
            self._loop.remove_reader(child._pidfd)
            os.close(child._pidfd)
            child.ended.cancel()
        self._children.clear()


async def stop(table: ProcessTable, children: Sequence[Child], grace_s: float) -> None:
    """Stop several children at once, as `ProcessTable.stop` does; log the ones that survive SIGKILL."""
    ends = await asyncio.gather(*(table.stop(child, grace_s) for child in children), return_exceptions=True)
    for child, end in zip(children, ends, strict=True):
        if isinstance(end, TimeoutError):
            logger.error("%s (pid %d) survived SIGKILL: it waits in the kernel", child.name, child.pid)


async def wait_processes(processes: Iterable[Process], timeout_s: float) -> None:
    """Wait until none of the processes runs, or the time is over."""
    loop = asyncio.get_running_loop()
    opened: list[int] = []
    pending: set[int] = set()
    empty = loop.create_future()

    def gone(fd: int) -> None:
        loop.remove_reader(fd)
        pending.discard(fd)
        if not pending and not empty.done():
            empty.set_result(None)

    for process in processes:
        fd = ownership.open_process(process)
        if fd is not None:
            opened.append(fd)
            pending.add(fd)
            loop.add_reader(fd, gone, fd)
    try:
        if pending:
            await asyncio.wait_for(empty, timeout_s)
    except TimeoutError:
        pass
    finally:
        for fd in opened:
            loop.remove_reader(fd)
            os.close(fd)
