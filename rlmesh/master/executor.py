"""Carries out the actions of ``JobManager``: calls agents and workers, and posts the results as events.

Starts and stops on one node run one after the other; every wait has a limit.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmesh import private_files
from rlmesh.agent.node_description import machine_id
from rlmesh.agent.protocol import AGENT, CONTROL, MemberProcess, WorkerSpec
from rlmesh.errors import CallError, PeerLost, ShuttingDown
from rlmesh.job.context import StopRequest
from rlmesh.job.status import ExitInfo, MemberWaits
from rlmesh.master import events as ev
from rlmesh.master.context import Member, MemberId
from rlmesh.master.decisions.scheduler import Scheduler
from rlmesh.master.job_manager import JobManager
from rlmesh.runtime.calling.peer_status import process_state
from rlmesh.runtime.connections.address_book import AddressBook
from rlmesh.runtime.handle import MemberHandle
from rlmesh.runtime.process.clock import epoch
from rlmesh.runtime.runtime import Runtime

if TYPE_CHECKING:
    from rlmesh.master.monitoring.wait_circles import Circle
    from rlmesh.runtime.serving.wait_report import CallKey

logger = logging.getLogger(__name__)

AGENT_TIMEOUT_S = 20.0
AGENT_RETRY_S = 0.2
"""Seconds before an agent is asked again whose connection was lost; it returns, or its node is given up soon."""
BEGIN_TIMEOUT_S = 30.0
END_NEWS_S, END_POLL_S = 5.0, 0.02
"""Seconds that the report of a death may take after a connection was lost, and seconds between checks."""
PENDING_TIMEOUT_S = 2.0
HOLD_TIMEOUT_S = 5.0
"""Less than a held member waits for the answer."""
TEARDOWN_HEARD_S = 10.0
"""Seconds after which a member that has not confirmed the order to tear down cannot run ``teardown()``."""
BOOK_DELAY_S = 0.01
"""Delay within which address books are merged, so that n members cause about n messages, not n²."""


class Executor:
    """Carries out the actions of one job.

    Args:
        post: takes the events that follow from actions.
        carried_out: takes the numbers of actions that are done.
    """

    def __init__(
        self, runtime: Runtime, manager: JobManager, scheduler: Scheduler, post: Callable[[ev.Event], None],
        carried_out: Callable[[int], None] = lambda number: None,
    ) -> None:  # fmt: skip
        self._runtime = runtime
        self._manager = manager
        self._scheduler = scheduler
        self._post = post
        self._carried_out = carried_out
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns: dict[int, asyncio.Lock] = {}
        self._of_node: dict[int, set[asyncio.Task[None]]] = {}
        self._closing = False
        self.doing: Callable[[Member], str] = lambda member: ""
        """Returns what a member without an answer is doing, as seen from outside."""
        self._book: AddressBook | None = None
        self._book_timer: asyncio.TimerHandle | None = None
        self._has_book: dict[ev.ProcessKey, int] = {}

    def perform(self, orders: Iterable[tuple[int, ev.Action]]) -> None:
        """Start numbered actions in order. Call it on the runtime's loop."""
        for number, action in orders:
            task = self._begin(action)
            if task is None:
                self._carried_out(number)
            else:
                task.add_done_callback(partial(self._done, number))

    def _done(self, number: int, task: asyncio.Task[None]) -> None:
        if not (task.cancelled() and self._closing):
            self._carried_out(number)

    def _begin(self, action: ev.Action) -> asyncio.Task[None] | None:
        """Start one action; None if it is done already."""
        match action:
            case ev.ReservePort(role, node_rank, instead_of):
                return self._at_node(node_rank, self._reserve_port(role, node_rank, instead_of))
            case ev.ForgetNode(node_rank):
                for task in self._of_node.get(node_rank, ()):
                    task.cancel()
                return None
            case ev.Spawn(node_rank, members):
                keys = tuple(self._manager.context.members[member].key for member in members)
                return self._spawn_task(node_rank, self._start_members(node_rank, keys))
            case ev.StopMembers(node_rank, members, grace_s):
                return self._spawn_task(node_rank, self._stop_members(node_rank, members, grace_s))
            case ev.CheckMembers(node_rank, processes):
                return self._spawn_task(node_rank, self._check_members(node_rank, processes))
            case ev.EndProcesses(node_rank, keys, grace_s):
                return self._spawn_task(node_rank, self._end_processes(node_rank, keys, grace_s))
            case ev.HoldSteps(members, reason):
                found = [self._manager.context.members[member] for member in members]
                return self._add(self._hold_steps(found, reason))
            case ev.BeginRun(member):
                self._flush_book()
                begins = self._manager.context.members[member]
                return self._add(self._begin_run(begins, begins.incarnation))
            case ev.Teardown(member, stop):
                found_one = self._manager.context.members[member]
                there = found_one.endpoint and not found_one.gone
                return self._add(self._teardown(found_one, stop)) if there else None
            case ev.TakeStacks(keys):
                return self._add(self._take_stacks(keys))
            case ev.AskProgress(keys, wait_s):
                for key in keys:
                    self._add(self._ask_progress(key, wait_s))
                return None
            case _:
                self._notify_members(action)
                return None

    def _notify_members(self, action: ev.Action) -> None:
        match action:
            case ev.PublishBook(book):
                self._publish(book)
            case ev.TellRestart(event):
                self._flush_book()
                for living in self._processes():
                    self._notify(living.id, "restarted", event)
            case ev.SetStop(members, request):
                for member in members:
                    self._notify(member, "set_stop", request)
            case ev.AskToStop(members, reason, ends):
                for member in members:
                    self._notify(member, "stop", reason, ends)
            case ev.AnnounceLoss(exit):
                self._flush_book()
                self._runtime.member_lost(exit)
                for living in self._processes():
                    self._notify(living.id, "member_lost", exit)

    async def close(self) -> None:
        """Cancel the actions in progress."""
        self._closing = True
        if self._book_timer is not None:
            self._book_timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def agent(self, node_rank: int) -> MemberHandle:
        """Return the agent of a node; calls to it have a deadline."""
        node = self._manager.context.nodes[node_rank]
        return self._runtime.peer(AGENT, node.agent_endpoint).options(timeout_s=AGENT_TIMEOUT_S, idempotent=True)

    # Agents

    async def ask_pending(self) -> tuple[MemberWaits, ...]:
        """Return what each member waits for; a member that does not answer within ``PENDING_TIMEOUT_S`` has an
        error."""
        return tuple(await asyncio.gather(*(self._ask_pending(member) for member in self._bound())))

    async def ask_stacks(self) -> dict[str, str]:
        """Return the stacks of all members by name, or why there are none."""
        members = [member for member in self._manager.context.members.values() if not member.gone]
        from rlmesh.master.monitoring.member_stacks import examine, stack_text

        stacks = await examine(self._runtime, members, self.agent)
        return {stack.name: stack_text(stack) for stack in stacks}

    async def _ask_pending(self, member: Member) -> MemberWaits:
        known = MemberWaits(*member.id, member.pid, member.state, member.step)
        control = self._control(member).options(timeout_s=PENDING_TIMEOUT_S)
        try:
            waits, serves = await control.call("pending", member.name)
        except CallError as error:
            doing = self.doing(member)
            return replace(known, process=self._process_of(member), error=doing or _text(error), doing=doing)
        return replace(known, waits=waits, serves=serves, process=self._process_of(member))

    async def _ask_progress(self, key: ev.ProcessKey, wait_s: float) -> None:
        member = self._manager.context.members[key[:2]]
        if member.key != key or not member.endpoint:
            return
        try:
            progress = await self._control(member).options(timeout_s=wait_s).call("progress", member.name)
        except CallError:
            self._post(ev.ProgressSeen(key, None, self.doing(member)))
        else:
            self._post(ev.ProgressSeen(key, progress))

    async def _take_stacks(self, keys: tuple[ev.ProcessKey, ...]) -> None:
        context = self._manager.context
        members = (context.members[key[:2]] for key in keys)
        from rlmesh.master.monitoring.member_stacks import examine, stack_text

        stacks = await examine(self._runtime, [m for m in members if not m.gone], self.agent)
        path = Path(context.spec.run_dir) / f"stacks-{time.strftime('%H%M%S')}.txt"
        text = "\n".join(f"=== {stack_text(stack)}" for stack in stacks)
        try:
            await asyncio.to_thread(private_files.write_whole, path, text)
        except OSError as error:
            logger.warning("the members' stacks were not written: %s", error)
        self._post(ev.StacksTaken(stacks, str(path)))

    def _process_of(self, member: Member) -> str:
        node = self._manager.context.nodes.get(member.placement.node_rank)
        here = node is not None and node.machine == machine_id()
        return process_state(member.pid) if here else ""

    def _spawn_task(self, node_rank: int, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        turn = self._turns.setdefault(node_rank, asyncio.Lock())

        async def in_turn() -> None:
            async with turn:
                await work

        return self._at_node(node_rank, in_turn())

    def _at_node(self, node_rank: int, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._add(work)
        tasks = self._of_node.setdefault(node_rank, set())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    def _add(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _reserve_port(self, role: str, node_rank: int, instead_of: int | None) -> None:
        try:
            port = await self._ask_agent(node_rank, AGENT_TIMEOUT_S, "reserve_port", instead_of)
        except Exception as error:
            self._post(ev.ActionFailed(node_rank, f"reserving a port for {role}", _text(error)))
            return
        self._post(ev.PortReserved(role, port, node_rank))

    async def _ask_agent(self, node_rank: int, timeout_s: float, method: str, *args: object) -> Any:
        """Call an agent until it has answered or its node is given up; with one node, only once.

        An agent that has just registered may refuse the first call, because it does not know yet that it has a lease.
        """
        while True:
            try:
                return await self.agent(node_rank).options(timeout_s=timeout_s).call(method, *args)
            except (PeerLost, ShuttingDown):
                if len(self._manager.context.nodes) == 1:
                    raise
                await asyncio.sleep(AGENT_RETRY_S)

    async def _start_members(self, node_rank: int, keys: tuple[ev.ProcessKey, ...]) -> None:
        context = self._manager.context
        # While the order waited for its turn, another incarnation may have replaced the one it was for.
        for role, rank, incarnation in keys:
            if context.members[role, rank].incarnation != incarnation:
                never = ExitInfo(role, rank, incarnation, 0, None, None, epoch(), node_rank)
                self._post(ev.MemberExited(node_rank, never))
        members = tuple(key[:2] for key in keys if context.members[key[:2]].key == key)
        if not members:
            return
        node = context.nodes[node_rank]
        leaders = self._scheduler.group_leaders(context.plan) if context.plan is not None else {}
        hosts = {role: context.nodes[leader].host for role, leader in leaders.items()}
        of_process: dict[MemberId, list[WorkerSpec]] = {}
        for member in (context.members[member] for member in members):
            plan = context.plan
            spec = self._scheduler.worker_spec(
                member.placement, node, member.incarnation, self._manager.ports, member.restart, hosts,
                self._scheduler.lease_agents(member.placement, plan, context.nodes) if plan is not None else (),
            )  # fmt: skip
            of_process.setdefault(member.host, []).append(spec)
        specs = tuple(map(self._scheduler.process_spec, of_process.values()))
        try:
            term = context.terms.get(node_rank, 0)
            pids = await self._ask_agent(node_rank, context.spec.limits.start_s, "spawn", specs, term)
        except Exception as error:
            names = ", ".join(f"{role}:{rank}" for role, rank in members)
            self._post(ev.ActionFailed(node_rank, f"starting {names}", _text(error)))
            return
        of_spec = zip(specs, pids, strict=True)
        started = tuple((member.role, member.rank, pid) for spec, pid in of_spec for member in spec.members)
        self._post(ev.Spawned(node_rank, started))

    async def _stop_members(self, node_rank: int, members: tuple[MemberId, ...], grace_s: float) -> None:
        keys = tuple(self._manager.context.members[member].key for member in members)
        await self._end_processes(node_rank, keys, grace_s)

    async def _end_processes(self, node_rank: int, processes: tuple[ev.ProcessKey, ...], grace_s: float) -> None:
        agent = self.agent(node_rank).options(timeout_s=AGENT_TIMEOUT_S + grace_s)
        try:
            await agent.call("stop_members", processes, grace_s)
        except Exception as error:
            names = ", ".join(f"{role}:{rank}.{incarnation}" for role, rank, incarnation in processes)
            logger.warning("the agent of node %s did not end %s: %s", node_rank, names, _text(error))

    async def _check_members(self, node_rank: int, processes: tuple[MemberProcess, ...]) -> None:
        """Post an exit for each of these members that does not run. The agent's answer includes members whose exit the
        master has not confirmed, so no report can be on its way for a member that it lacks."""
        try:
            running = set(await self.agent(node_rank).call("running"))
        except Exception as error:
            logger.warning("the agent of node %s did not say what runs there: %s", node_rank, _text(error))
            return
        names = {(process.role, process.rank, process.incarnation) for process in running}
        for gone in processes:
            if (gone.role, gone.rank, gone.incarnation) not in names:
                exit = ExitInfo(
                    gone.role, gone.rank, gone.incarnation, gone.pid, None, None, epoch(), node_rank,
                    log_path=self._manager.context.members[gone.role, gone.rank].log_path,
                )  # fmt: skip
                self._post(ev.MemberExited(node_rank, exit))

    # Workers

    def break_circle(self, circle: Circle) -> None:
        """Refuse the queued calls of a circle, which can never begin, at the processes where they are queued."""
        of_process: dict[str, list[CallKey]] = {}
        for process, call in circle.calls:
            of_process.setdefault(process, []).append(call)
        for process, calls in of_process.items():
            role, _, rank = process.rpartition(":")
            self._notify((role, int(rank)), "refuse_queued", tuple(calls), circle.text)

    def _publish(self, book: AddressBook) -> None:
        self._book = book
        if all(member.endpoint for member in book.members):
            self._flush_book()
        elif self._book_timer is None:
            self._book_timer = asyncio.get_running_loop().call_later(BOOK_DELAY_S, self._flush_book)

    def _flush_book(self) -> None:
        if self._book_timer is not None:
            self._book_timer.cancel()
            self._book_timer = None
        book = self._book
        if book is None:
            return
        for member in self._processes():
            if self._has_book.get(member.key, 0) < book.version:
                self._has_book[member.key] = book.version
                self._notify(member.id, "update_book", book)

    async def _begin_run(self, member: Member, incarnation: int) -> None:
        role, rank = member.id
        if not _is_there(member, incarnation):
            return
        try:
            has_run = await self._control(member).options(timeout_s=BEGIN_TIMEOUT_S).call("begin_run", member.name)
        except Exception as error:
            if isinstance(error, PeerLost):
                await self._await_end_news(member, incarnation)
            if _is_there(member, incarnation):
                failed = f"it got the order to run and did not answer: {_text(error)}"
                self._post(ev.MemberFailed(role, rank, incarnation, failed))
            return
        self._post(ev.RunBegan(role, rank, incarnation, bool(has_run)))

    async def _teardown(self, member: Member, stop: StopRequest | None) -> None:
        """Tell a member to tear down and report if it cannot.

        A member confirms the order at once, whatever its methods do; a member that does not is out of memory or holds
        the interpreter lock.
        """
        incarnation = member.incarnation
        try:
            await self._control(member).options(timeout_s=TEARDOWN_HEARD_S, idempotent=True).call("teardown", stop)
        except CallError as error:
            if isinstance(error, PeerLost):
                await self._await_end_news(member, incarnation)
            if _is_there(member, incarnation):
                self._post(ev.TeardownUnheard(*member.id, incarnation, _text(error).partition("\n")[0]))

    async def _await_end_news(self, member: Member, incarnation: int) -> None:
        """Wait until the agent reports the exit of a member that seems to have died, for ``END_NEWS_S`` at most."""
        for _ in range(round(END_NEWS_S / END_POLL_S)):
            if not _is_there(member, incarnation):
                return
            await asyncio.sleep(END_POLL_S)

    async def _hold_steps(self, members: Iterable[Member], reason: str) -> None:
        await asyncio.gather(*(self._hold_step(member, reason) for member in members))

    async def _hold_step(self, member: Member, reason: str) -> None:
        incarnation = member.incarnation
        try:
            step = await self._control(member).options(timeout_s=HOLD_TIMEOUT_S).call("hold_step", reason)
        except CallError as error:
            logger.warning("%s did not say at which step it is: %s", member.name, _text(error))
            self._post(ev.StepHeld(*member.id, incarnation, None, answered=False))
            return
        self._post(ev.StepHeld(*member.id, incarnation, step))

    def _bound(self) -> list[Member]:
        members = self._manager.context.members.values()
        return [member for member in members if member.endpoint and not member.gone]

    def _processes(self) -> list[Member]:
        """Return one member of each process, for messages that concern the whole process."""
        return list({member.endpoint: member for member in self._bound()}.values())

    def _control(self, member: Member) -> MemberHandle:
        return self._runtime.peer(CONTROL, member.endpoint, incarnation=member.incarnation)

    def _notify(self, member: MemberId, method: str, *args: object) -> None:
        found = self._manager.context.members[member]
        if found.endpoint and not found.gone:
            self._control(found).notify(method, *args)


def _is_there(member: Member, incarnation: int) -> bool:
    """True if the member's end has not been reported."""
    return not member.gone and member.incarnation == incarnation


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
