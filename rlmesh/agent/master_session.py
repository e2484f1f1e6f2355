"""An agent's session with its master: registration, detection of the master's death, and the lease.

The master's endpoint never changes. While there is no master, the members run on and call each other, and reports wait
in the outbox. If several nodes share a job, the members may run only as long as the agent's lease lasts: without an
answer from the master, the agent ends them when the lease ends, because the master may start them elsewhere from then
on. If the lease ended in a standstill (this process did not run, for example because the machine was suspended), the
agent does not end the members at once: it stops them until the master says whether they may go on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlmesh.agent.node_lease import Lease, Standstills, renew_s, suspend_aware_clock
from rlmesh.agent.processes import ownership
from rlmesh.agent.protocol import MASTER, AgentConfig, Grant, MemberProcess, NodeInfo
from rlmesh.errors import CallError, CallTimeout
from rlmesh.runtime.future import Future
from rlmesh.runtime.handle import MemberHandle
from rlmesh.runtime.process import clock
from rlmesh.runtime.runtime import Runtime

__all__ = ["AgentCallbacks", "Freezer", "MasterSession"]

logger = logging.getLogger(__name__)

REGISTER_WAIT_S = 60.0
ATTEND_S = 60.0
"""Seconds for which the master holds the call ``attend``, which only the end of the job answers."""
RETRY_S = 0.05
REFUSED_S = 0.5
FENCE_GRACE_S = 1.0
"""Grace of the members when the lease has ended: the master waits some seconds more."""
MASTER_GONE_S = 120.0
"""An agent that has found no master for this many seconds ends."""
LEASE_TICK_S = 0.25
WAKING_S = 5.0
"""Seconds, or the length of a lease if that is more, that the master gets after a standstill to say whether members may
go on: it may begin to run later than its agents."""
ASK_AGAIN_S = 0.05
GUARDIAN_FD = 1
"""Descriptor of the pipe to the guardian."""


class Freezer:
    """Stops processes and resumes them.

    Args:
        roots: returns the numbers of the processes to stop, with all processes below them.

    Attributes:
        active: True while the processes are stopped.
    """

    def __init__(self, roots: Callable[[], Iterable[int]]) -> None:
        self._roots = roots
        self._frozen: dict[ownership.Process, None] = {}
        self.active = False

    def freeze(self) -> None:
        """Stop the processes. Call repeatedly: whoever stopped all processes from outside may resume them one by one,
        and they may have started others."""
        self.active = True
        self._frozen |= dict.fromkeys(ownership.stop_all(set(self._roots())))

    def thaw(self) -> None:
        """Resume the processes that were stopped here."""
        self.active, frozen, self._frozen = False, self._frozen, {}
        for process in frozen:
            ownership.send_signal(process, signal.SIGCONT)


@dataclass(frozen=True, slots=True)
class AgentCallbacks:
    """Functions of the agent that its session calls.

    Attributes:
        members: process numbers of the members.
        running: members that run here or whose end the master has not confirmed.
        fence: ends all members within the given seconds; returns when they are gone.
        freezer: stops the members while it is unknown whether they may run.
        give_up: ends the node, with the reason.
        over: ends the node because the job has ended.
    """

    members: Callable[[], list[int]]
    running: Callable[[], tuple[MemberProcess, ...]]
    fence: Callable[[float], Awaitable[None]]
    freezer: Freezer
    give_up: Callable[[str], None]
    over: Callable[[], None]


class MasterSession:
    """Keeps one agent registered with the job's master.

    Args:
        sender: identity of this agent's process in its outbox and towards the master.
        info: the node's description, sent with each registration.
    """

    def __init__(
        self, config: AgentConfig, runtime: Runtime, sender: str, info: NodeInfo, callbacks: AgentCallbacks, *,
        lease_clock: Callable[[], float] = suspend_aware_clock,
    ) -> None:  # fmt: skip
        self._config, self._sender, self._info, self._agent, self._clock = config, sender, info, callbacks, lease_clock
        self._master: MemberHandle = runtime.peer(MASTER, config.master_endpoint).options(idempotent=True)
        self._lease = Lease()
        self._leased = config.lease_s > 0
        self._tasks: list[asyncio.Task[None]] = []
        self._standstills = Standstills(lease_clock())
        self._met_at: float | None = None
        self._fenced = False
        self._refused = False
        self._term = 0
        self._anew = asyncio.Event()

    def start(self) -> None:
        """Start the tasks; `close` ends them."""
        loop = asyncio.get_running_loop()
        self._tasks.append(loop.create_task(self._stay_registered(), name="rlmesh-master-session"))
        if self._leased:
            self._tasks.append(loop.create_task(self._renew(), name="rlmesh-renew"))
            self._tasks.append(loop.create_task(self._watch_lease(), name="rlmesh-lease"))
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the task %s failed", task.get_name(), exc_info=error)
            self._agent.give_up(f"its session with the master failed: {type(error).__name__}: {error}")

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self._tell_guardian(None)

    def may_start(self, term: int | None = None) -> bool:
        """True if a member that the master ordered in ``term`` may be started now."""
        return not self._leased or (self._lease.held(self._clock()) and term in (None, self._term))

    def must_not_run(self) -> bool:
        """True if a member whose start is under way must be ended. False while the master is asked whether running
        members may go on."""
        return self._leased and not self._lease.held(self._clock()) and not self._agent.freezer.active

    # Registering

    async def _stay_registered(self) -> None:
        while True:
            asked_at = self._clock()
            try:
                known = self._leased and self._met_at is not None
                call = self._master.options(timeout_s=self._config.lease_s if known else REGISTER_WAIT_S)
                grant = await call.call("register_agent", self._info, self._sender, self._agent.running())
                self._take(asked_at, grant)
                if self._refused and self._fenced:  # the members have ended, but the master does not know it yet
                    await asyncio.sleep(REFUSED_S)
                elif await self._attend():
                    self._agent.over()
                    return
            except CallTimeout as error:
                self._absent(f"it did not answer: {error}")
            except CallError as error:
                self._absent(str(error))
                await asyncio.sleep(RETRY_S)

    async def _attend(self) -> bool:
        """Wait until the job is over (True), the master is gone, or this node must register again."""
        self._anew.clear()
        fenced = asyncio.ensure_future(self._anew.wait())
        # Not retried at the next master, which does not know this node before it registers.
        call = self._master.options(timeout_s=2 * ATTEND_S, idempotent=False).call("attend", self._sender, ATTEND_S)
        over = asyncio.ensure_future(_awaited(call))
        try:
            await asyncio.wait([over, fenced], return_when=asyncio.FIRST_COMPLETED)
            return over.result() if over.done() else False
        finally:
            for task in (over, fenced):
                task.cancel()

    def _absent(self, why: str) -> None:
        now = clock.now()
        if self._met_at is None:
            self._agent.give_up(f"the master did not take this node: {why}")
        elif now - self._met_at > MASTER_GONE_S:
            self._agent.give_up(f"there has been no master for {now - self._met_at:.0f} s: {why}")
        else:
            logger.info("the master is away: %s", why.partition("\n")[0])

    def _take(self, asked_at: float, grant: Grant) -> None:
        self._met_at = clock.now()
        if not self._leased:
            return
        self._refused = grant.lease_s <= 0
        if not self._refused:
            self._lease.granted(asked_at, grant.lease_s)
            self._term = grant.term
            self._fenced = self._fenced and not self._lease.held(self._clock())
            self._tell_guardian(self._lease.left_s(self._clock()))
        else:
            self._lease.end()

    # The lease

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(renew_s(self._config.lease_s))
            asked_at = self._clock()
            with suppress(CallError):
                call = self._master.options(timeout_s=self._config.lease_s)
                self._take(asked_at, await call.call("renew", self._info.node_rank, self._sender))

    async def _watch_lease(self) -> None:
        """Fence the members when the lease ends. Polls often, since timers do not count a suspended machine's sleep."""
        while True:
            await asyncio.sleep(LEASE_TICK_S)
            self._standstills.look(now := self._clock())
            if self._met_at is None or self._fenced or self._lease.held(now):
                continue
            # After a standstill within the last lease period, renewals may be missing only because of it: ask first.
            asked = self._standstills.lately(now, self._config.lease_s)
            if asked and await self._may_go_on():
                continue
            self._fenced = True
            late_s = -self._lease.left_s(self._clock())
            away = f"{late_s:.1f} s ago" if late_s < 1e6 else "by the master's word"
            why = f"the lease of node {self._config.node_name} ended {away}: its members may run elsewhere now"
            logger.error("%s; they are ended here", why)
            await self._agent.fence(0.0 if self._agent.freezer.active else FENCE_GRACE_S)
            self._agent.freezer.thaw()
            self._tell_guardian(None)
            self._anew.set()

    async def _may_go_on(self) -> bool:
        """Ask the master with all members stopped; let them run and return True if the lease is held again."""
        logger.warning("the lease of node %s ran out in a standstill; the master is asked", self._config.node_name)
        wait_s = max(self._config.lease_s, WAKING_S)
        deadline = self._clock() + wait_s
        self._agent.freezer.freeze()
        self._tell_guardian(wait_s, frozen=True)
        while not self._refused and (asked_at := self._clock()) < deadline:
            with suppress(CallError):
                call = self._master.options(timeout_s=min(1.0, self._config.lease_s))
                self._take(asked_at, await call.call("renew", self._info.node_rank, self._sender))
            now = self._clock()
            if self._lease.held(now):
                self._agent.freezer.thaw()
                self._tell_guardian(self._lease.left_s(now))
                logger.warning("the master has renewed the lease: the members go on")
                return True
            if self._standstills.look(now):
                deadline = now + wait_s
            self._agent.freezer.freeze()
            await asyncio.sleep(ASK_AGAIN_S)
        return False

    def _tell_guardian(self, left_s: float | None, *, frozen: bool = False) -> None:
        """Tell the guardian for how many seconds this agent may live without another message; None: without limit,
        because no member runs. The deadline is on the clock that both share, since the guardian may read it later."""
        until = None if left_s is None else suspend_aware_clock() + left_s
        message = {"lease_until": until, "members": self._agent.members(), "frozen": frozen}
        with suppress(OSError):
            os.write(GUARDIAN_FD, json.dumps(message).encode() + b"\n")


async def _awaited(call: Future[Any]) -> bool:
    return bool(await call)
