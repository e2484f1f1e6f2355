"""Control of a worker by the master and by signals, and the worker's reports."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Literal

from rlmesh.agent.processes import ownership
from rlmesh.agent.protocol import CONTROL
from rlmesh.agent.reliable_outbox import Outbox
from rlmesh.agent.worker.call_reporter import CallReporter
from rlmesh.agent.worker.chaos_hooks import ChaosHooks
from rlmesh.agent.worker.stacks import own_stacks
from rlmesh.agent.worker.stopping import Stopping
from rlmesh.job.context import RestartEvent, StopRequest
from rlmesh.job.status import Alarm, CallStats, ExitInfo, MemberProgress, MetricRecord
from rlmesh.runtime.calling.peer_status import Serving, Waiting
from rlmesh.runtime.connections.address_book import AddressBook
from rlmesh.runtime.handle import MemberHandle
from rlmesh.runtime.process.forked import handle
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime

if TYPE_CHECKING:
    from rlmesh.runtime.serving.wait_report import CallKey

__all__ = ["Control", "MasterLink", "Orders", "Phase", "Terminated"]

Phase = Literal["starting", "serving", "running", "ending"]
Order = Literal["run", "end"]

NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
TERM_PATIENCE = 0.6
"""Share of the grace that ``run()`` has, after SIGTERM, to reach a step boundary."""

STACKS_TEXT_AFTER_S = 0.01
"""A death makes the master ask all members for stacks, and tell them about it; the waiting calls end first."""


class Terminated(BaseException):
    """SIGTERM came, and the main thread must not go on."""


class Orders:
    """Orders to the main thread; shared by the control object, signal handlers and the main thread.

    On SIGTERM a member that serves ends after the running method; ``run()`` gets a stop request, which
    ``step_boundary()`` returns, and is interrupted by a second SIGTERM, or when most of the grace is over;
    anything else is interrupted at once. Only the agent's SIGKILL interrupts ``teardown()``.
    """

    def __init__(self, runtime: Runtime, grace_s: float) -> None:
        self.phase: Phase = "starting"
        self.runs = ""
        """Name of the member whose ``run()`` the main thread runs; empty if none has one."""
        self.terminated = False
        self.stopping = Stopping()
        self.last_stop: StopRequest | None = None
        self.book_arrived = threading.Event()
        self._runtime = runtime
        self._grace_s = grace_s
        self._queue: deque[Order] = deque()
        self._lock = threading.RLock()
        """Protects the order queue and the phase. Reentrant, since a signal handler may interrupt its own thread."""
        self._begun = False
        self._exit: tuple[object] | None = None
        self._end_announced = self._early_sigterm = False
        self._noted: set[RestartEvent] = set()
        self._passed_on: set[str] = set()
        self._events: deque[RestartEvent] = deque()
        self._undelivered: deque[RestartEvent] = deque()
        self.run_began_at: float | None = None
        """Start of ``run()`` by `time.monotonic`, while it runs."""
        self._listeners: list[Callable[[RestartEvent], object]] = []
        self._event_added = threading.Condition()

    # Restarts of others

    def note_restart(self, event: RestartEvent) -> None:
        """Queue an event for `take_events` and for listeners, once: a restarted master may tell it again. Can be called
        from any thread."""
        with self._event_added:
            if event in self._noted:
                return
            self._noted.add(event)
            self._events.append(event)
            if self._listeners:
                self._undelivered.append(event)
            self._event_added.notify_all()
        if self._undelivered and self.phase == "serving":
            self._runtime.submit_main(self.tell_listeners)

    def take_events(self, wait_s: float) -> tuple[RestartEvent, ...]:
        """Events since the last call; if there are none, waits ``wait_s`` seconds for one. From any thread."""
        with self._event_added:
            self._event_added.wait_for(lambda: self._events, wait_s)
            taken = tuple(self._events)
            self._events.clear()
        return taken

    def listen(self, listener: Callable[[RestartEvent], object]) -> None:
        with self._event_added:
            self._listeners.append(listener)

    def tell_listeners(self) -> None:
        """Call the listeners; runs on the member's main thread, between methods or at a step boundary."""
        while True:
            with self._event_added:
                if not self._undelivered:
                    return
                event = self._undelivered.popleft()
                listeners = list(self._listeners)
            for listener in listeners:
                listener(event)

    # Orders

    def give(self, order: Order, *, now: bool = False) -> None:
        """Queue an order; ``now``: queued methods are not run before it."""
        with self._lock:
            self._queue.append(order)
            if self.phase == "serving":
                self._runtime.stop_main(now=now)

    def take(self) -> Order:
        """Serve calls on the calling thread until there is an order.

        Raises:
            SystemExit: a served method called ``sys.exit``.
        """
        while True:
            if self._exit is not None:
                raise SystemExit(*self._exit)
            if (order := self._next()) is not None:
                return order
            self.tell_listeners()
            self._runtime.run_main()

    def _next(self) -> Order | None:
        """Take the next order and set the phase that begins with it.

        Both happen under the lock that `give` takes too. So `give` finds the phase "serving" while its order waits, and
        ends `run_main`, or finds "running", and does not end the thread that serves calls during ``run()``.
        """
        with self._lock:
            if not self._queue:
                self.phase = "serving"
                return None
            self.phase = "running" if self._queue[0] == "run" else "serving"
            return self._queue.popleft()

    def begin_run(self, member: str) -> bool:
        """Order ``run()`` of a member once, if it has one: a restarted master may order it again."""
        has_run = bool(self.runs) and member in ("", self.runs)
        if has_run and not self._begun:
            self._begun = True
            self.give("run")
        return has_run

    def ask_to_stop(self, reason: str) -> None:
        """Stop at the next boundary, whatever step the other ranks are at."""
        self.stopping.ask(StopRequest(reason, None, self._grace_s))

    def exit(self, code: object) -> None:
        """End the process with this code: a served method called ``sys.exit``. Can be called from any thread."""
        self._exit = (code,)
        if self.phase == "serving":
            self._runtime.stop_main(now=True)
        else:
            _interrupt_main()

    def handle_signals(self) -> None:
        """Install the signal handlers. Main thread only."""
        for number in NOTICES:  # ignored until now; programs that this process starts must not ignore them
            signal.signal(number, signal.SIG_DFL)
            handle(number, _leave_to_launcher)
        handle(signal.SIGTERM, self._on_sigterm)
        handle(ownership.REMINDER, self._on_reminder)

    @property
    def ending(self) -> bool:
        """True if the job is ending: failures may follow from that."""
        return self._end_announced or self.terminated or self.phase == "ending"

    def end_after_run(self) -> None:
        """Prepare for the end: SIGTERM follows, or already came from elsewhere."""
        self._end_announced = True
        if self._early_sigterm:
            _interrupt_main()
        if self.phase == "running":
            self.give("end")

    def pass_on(self, name: str) -> None:
        """Call the member's own handler of the signal by which the job got notice that it must end; once, although a
        restarted master may ask again. Where signals are shared, the member got the signal already."""
        if name in self._passed_on:
            return
        self._passed_on.add(name)
        number = signal.Signals.__members__.get(name)
        if number in NOTICES and not ownership.signals_are_shared():
            handler = signal.getsignal(number)
            if callable(handler) and handler is not _leave_to_launcher:
                _signal_main(number)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if ownership.signals_are_shared() and not self._end_announced and self._exit is None:
            self._early_sigterm = True  # sent to every process of the task; the launcher decides what follows
            return
        if self._exit is not None:
            raise SystemExit(*self._exit)
        again, self.terminated = self.terminated, True
        if self.phase == "ending":
            return
        if again or self.phase == "starting":
            raise Terminated
        self.ask_to_stop("SIGTERM")
        self._runtime.post(self._remind)
        self.give("end", now=True)  # if run() is running, the main thread takes this order when run() has returned

    def _remind(self) -> None:
        asyncio.get_running_loop().call_later(self._grace_s * TERM_PATIENCE, _signal_main, ownership.REMINDER)

    def _on_reminder(self, number: int, frame: FrameType | None) -> None:
        """Interrupt the main thread, unless the user's code now handles SIGTERM itself and uses the grace."""
        if self.phase != "ending" and signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            raise Terminated


def _interrupt_main() -> None:
    _signal_main(signal.SIGTERM)


def _signal_main(number: int) -> None:
    """Signal the main thread itself, so that a wait of that thread is interrupted too."""
    main = threading.main_thread().ident
    if main is not None:
        signal.pthread_kill(main, number)


def _leave_to_launcher(number: int, frame: FrameType | None) -> None:
    """Ignore the signal: the launcher gets it too, and lets all ranks stop together."""


class Control:
    """Served as ``@control``; called by the master. ``member`` selects one member of a process with fused roles."""

    def __init__(
        self, runtime: Runtime, orders: Orders, chaos_hooks: ChaosHooks, reporter: CallReporter, name: str
    ) -> None:
        self._runtime = runtime
        self._orders = orders
        self._chaos_hooks = chaos_hooks
        self._reporter = reporter
        self._name = name

    @rpc
    async def update_book(self, book: AddressBook) -> None:
        self._runtime.set_address_book(book)
        self._orders.book_arrived.set()

    @rpc
    async def begin_run(self, member: str = "") -> bool:
        """Start ``run()``; False if the role has none."""
        return self._orders.begin_run(member)

    @rpc
    async def teardown(self, stop: StopRequest | None = None) -> None:
        """Call ``teardown()`` when ``run()`` has returned and the queued methods are done, then end. If the job was
        stopped before its end, ``on_stop(stop)`` is called before ``teardown()``."""
        self._orders.last_stop = stop
        self._orders.give("end")

    @rpc
    async def stop(self, reason: str, ends: bool = False) -> None:
        """Let the next ``step_boundary()`` return a stop request. ``ends``: SIGTERM follows, which the member's own
        code may handle; the member ends when ``run()`` has returned, whether the code handles SIGTERM or not."""
        self._orders.ask_to_stop(reason)
        if ends:
            self._orders.end_after_run()

    @rpc
    async def hold_step(self, reason: str) -> int | None:
        """The step of the last boundary; the next boundary waits for ``set_stop``."""
        step = self._orders.stopping.hold()
        self._orders.pass_on(reason)
        return step

    @rpc
    async def set_stop(self, request: StopRequest) -> None:
        """Stop at the step that the request names."""
        self._orders.stopping.ask(request)

    @rpc
    async def member_lost(self, exit: ExitInfo) -> None:
        self._runtime.member_lost(exit)

    @rpc
    async def restarted(self, event: RestartEvent) -> None:
        """Handle a restart: other members are being replaced by new processes, or have been."""
        self._orders.note_restart(event)

    @rpc
    async def pending(self, member: str = "") -> tuple[tuple[Waiting, ...], tuple[Serving, ...]]:
        """The calls that this member waits for, and the calls that it has not answered. The waits of a process of
        several members are reported for the first member."""
        waits = self._runtime.activity.waiting() if member in ("", self._name) else ()
        return waits, tuple(self._calls_of(member))

    @rpc
    async def refuse_queued(self, calls: tuple[CallKey, ...], text: str) -> None:
        """Refuse calls that are queued here and would never begin, since they are part of a deadlock."""
        self._runtime.activity.refuse_queued(calls, text)

    @rpc
    async def stacks(self) -> str:
        """The stack of each thread at the moment of the request, innermost call first."""
        text = own_stacks()
        await asyncio.sleep(STACKS_TEXT_AFTER_S)
        return text()

    @rpc
    async def methods(self, member: str) -> tuple[str, ...]:
        """The methods that a member exports; empty before it is served."""
        return self._runtime.methods_of(member)

    @rpc
    async def note_calls(self) -> None:
        """Trace single calls from now on, for the job's timeline."""
        self._reporter.note_calls()

    @rpc
    async def arm(self, method: str, kill: str, member: str = "") -> None:
        """Report to the master when ``method`` is called next: a process is to be killed then."""
        self._chaos_hooks.arm(member or self._name, method, kill)

    @rpc
    async def progress(self, member: str = "") -> MemberProgress:
        """The activity of this member, and the seconds since its last sign of life."""
        began = self._orders.run_began_at if member in ("", self._orders.runs) else None
        return MemberProgress(
            run_s=None if began is None else time.monotonic() - began,
            calls=tuple(call for call in self._calls_of(member) if call.runs),
            quiet_s=self._runtime.activity.quiet_s(),
            waits=tuple(dict.fromkeys(waiting.name for waiting in self._runtime.activity.waiting())),
        )

    def _calls_of(self, member: str) -> Iterator[Serving]:
        for call in self._runtime.activity.serving():
            if call.method.startswith(f"{member}.") if member else not call.method.startswith(CONTROL):
                yield call


class MasterLink:
    """The ``ControlLink`` of a worker's context."""

    def __init__(
        self, runtime: Runtime, master: MemberHandle, outbox: Outbox, orders: Orders, who: tuple[str, int, int]
    ) -> None:
        self._runtime = runtime
        self._master = master
        self._outbox = outbox
        self._orders = orders
        self._who = who

    def report(self, record: MetricRecord) -> None:
        self._outbox.put(record)

    def alarm(self, alarm: Alarm) -> None:
        self._outbox.put(alarm)

    def boundary(self, step: int) -> StopRequest | None:
        return self._orders.stopping.boundary(step)

    def stopping(self, step: int) -> None:
        self._master.call("stopping_at", *self._who, step)

    def take_events(self, wait_s: float) -> tuple[RestartEvent, ...]:
        return self._orders.take_events(wait_s)

    def listen(self, listener: Callable[[RestartEvent], object]) -> None:
        self._orders.listen(listener)

    def tell_listeners(self) -> None:
        self._runtime.activity.note_activity()
        self._orders.tell_listeners()
        self._runtime.run_waiting_main()

    def take_call_stats(self) -> tuple[CallStats, ...]:
        return self._runtime.activity.call_stats.take_stats()
