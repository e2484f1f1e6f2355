"""What code that runs inside a worker can ask about itself: ``current_worker()``.

The worker's bootstrap makes one ``WorkerContext`` and sets it before any code of the role runs. The context
reaches the rest of the job through a ``ControlLink`` alone, so that this module stays free of I/O.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rlmesh.errors import UsageError
from rlmesh.job.reported_metrics import as_number, as_step
from rlmesh.job.restarts import RestartEvent
from rlmesh.job.status import Alarm, CallStats, MetricRecord
from rlmesh.runtime.process.clock import epoch
from rlmesh.runtime.process.forked import refusal

if TYPE_CHECKING:
    from rlmesh.job.device_lease import DeviceLease, Hook, LeaseDesk, LeaseLink

__all__ = [
    "COLLOCATION_ENV",
    "ControlLink",
    "JobInfo",
    "RestartEvent",
    "Resume",
    "StopRequest",
    "WorkerContext",
    "acting_as",
    "current_worker",
    "set_current_worker",
]

COLLOCATION_ENV = "RLMESH_COLLOCATION"
"""Variable that names the roles which share this member's device, separated by commas; unset if none do."""


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Asks the member to stop at a step boundary: save what must survive, then return from ``run()``.

    Attributes:
        reason: who or what asked, for the log.
        step: the step after which all ranks stop; ``None``: at the next boundary.
        grace_s: how long the job has, from the notice on, before it is stopped wherever it is.
    """

    reason: str
    step: int | None = None
    grace_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Resume:
    """The job was started before in this run directory, and did not get to its end.

    Attributes:
        count: how often it was started before.
        step: the step after which all ranks stopped the last time; None if they did not stop together (a crash, a lost
            node): then the last checkpoint is what there is.
        samples_trained: the last count that was reported, see ``report``. Who resumes from an older checkpoint counts
            on from what that says.
    """

    count: int
    step: int | None = None
    samples_trained: int = 0


class ControlLink(Protocol):
    """How a worker context reaches its job; the worker's bootstrap supplies it. Every method may be called
    from any thread and, but for ``boundary``, ``take_events`` and ``tell_listeners``, returns at once."""

    def report(self, record: MetricRecord) -> None:
        """Send a record to the master, without waiting for it."""

    def alarm(self, alarm: Alarm) -> None:
        """Send it to the master, without waiting for it."""

    def boundary(self, step: int) -> StopRequest | None:
        """Say that a step ended; gives the stop that was asked for, if any. Waits a moment while the job finds out at
        which step all ranks stop."""

    def stopping(self, step: int) -> None:
        """Say that this member stops at a step, as it was asked to."""

    def take_events(self, wait_s: float) -> tuple[RestartEvent, ...]:
        """Restarts since the last take; if there is none, what comes within ``wait_s`` seconds."""

    def listen(self, listener: Callable[[RestartEvent], object]) -> None:
        """Call ``listener`` for each restart from now on."""

    def tell_listeners(self) -> None:
        """Call the listeners for what they were not told yet, on the calling thread; run the methods that wait for the
        main thread, if it is that one."""

    def take_call_stats(self) -> tuple[CallStats, ...]:
        """Statistics of the remote calls that ended since the last take."""


@dataclass(frozen=True, slots=True)
class JobInfo:
    """The job that this worker belongs to. ``user_config`` is what ``.config(...)`` was given."""

    name: str
    job_id: str
    user_config: Any = None
    accelerator: str = "GPU"
    resume: Resume | None = None


@dataclass(slots=True)
class WorkerContext:
    """Who this worker is, and its way to report.

    ``rank``, ``world_size``, ``local_rank`` and ``local_world_size`` count the members of this worker's role,
    as torchrun does; ``node_rank`` is the node's number in the job;
    ``group`` the name of the member's group, in roles that have groups; ``devices`` the UUIDs of its devices;
    ``restored`` the version that ``send_weights(restored=…)`` was told last; ``objects`` what was built in this
    process, by role: see ``fused``.
    """

    job_info: JobInfo
    role: str
    rank: int
    world_size: int
    link: ControlLink
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    node_name: str = ""
    incarnation: int = 0
    pid: int = field(default_factory=os.getpid)
    run_dir: Path = field(default_factory=Path)
    group: str = ""
    devices: tuple[str, ...] = ()
    lessor: LeaseLink | None = None
    lease_timeout_s: float = 1800.0
    restored: int | None = None
    objects: dict[str, object] = field(default_factory=dict, repr=False)
    clock: Callable[[], float] = epoch
    _step: int | None = field(default=None, init=False, repr=False)
    _boundary: int | None = field(default=None, init=False, repr=False)
    _desk: LeaseDesk | None = field(default=None, init=False, repr=False)

    @property
    def name(self) -> str:
        """``ROLE:rank``, as this member is called in logs and errors."""
        return f"{self.role}:{self.rank}"

    @property
    def actor_info(self) -> WorkerContext:
        """The same object, by the name that DLRover gives to what a worker knows about itself."""
        return self

    @property
    def step(self) -> int | None:
        """The last step given to ``report`` or ``step_boundary``."""
        return self._step

    @property
    def resume(self) -> Resume | None:
        """What to resume if this is not the first start of the job in its run directory, else None."""
        return self.job_info.resume

    @property
    def collocated_roles(self) -> frozenset[str]:
        """The roles that share this member's device, its own among them; empty if it shares with none."""
        return frozenset(filter(None, os.environ.get(COLLOCATION_ENV, "").split(",")))

    @property
    def fused_roles(self) -> frozenset[str]:
        """The roles that share this process, its own among them; empty if it is alone."""
        return frozenset(self.objects) if len(self.objects) > 1 else frozenset()

    def fused(self, role: str | Enum) -> Any:
        """The object of another role in this same process, for what calls cannot do: to share its parameters.

        The objects are built in the order in which the roles were declared, all before the first ``setup()``.

        Raises:
            UsageError: the role is not fused with this one.
        """
        name = role.name if isinstance(role, Enum) else str(role)
        if self.objects.get(name) is None:
            here = ", ".join(key for key, made in self.objects.items() if made is not None) or "nothing"
            raise UsageError(
                f"{self.name} (pid {self.pid}): there is no object of role {name!r} in this process, but of {here}. "
                "Fuse the roles with .with_fusion(...), and ask after __init__()"
            )
        return self.objects[name]

    def device_lease(
        self, timeout_s: float | None = None, *, wake: Hook | None = None, sleep: Hook | None = None
    ) -> DeviceLease:
        """A block in which no member of another role is awake on this member's devices::

            with current_worker().device_lease(wake=self.engine.wake_up, sleep=self.engine.sleep):
                return self.engine.generate(prompts)

        Use ``async with`` in ``async def`` methods. Roles that share a device take turns, in the order in which they
        ask; the local members of an elastic role have their turn together. The lease of a member that dies is free.

        Args:
            timeout_s: how long to wait for the devices; without it, as long as a call may take.
            wake: called when the devices are there: load weights, put state back onto the device.
            sleep: called before they are given back: free the device's memory. If it raises, they are not.

        Raises:
            LeaseTimeout: another role kept them; says which member, and since when.
        """
        self._refuse_child("device_lease()")
        from rlmesh.job.device_lease import DeviceLease, LeaseDesk

        if self._desk is None:
            if self.lessor is None:
                raise UsageError(f"{self.name}: device_lease() needs an agent that grants it, and there is none here")
            self._desk = LeaseDesk(self.name, self.lessor)
        return DeviceLease(self._desk, self.lease_timeout_s if timeout_s is None else timeout_s, wake, sleep)

    def report(self, step: int | None = None, **metrics: Any) -> None:
        """Report metrics of a step: numbers, or what ``float()`` accepts, such as tensors with one item.

        Every digit is kept: floats are written in full, ints of any size as ints, True as 1. They go to
        ``metrics.jsonl``, TensorBoard (whose scalars have 32 bits) and the live view, and count as a sign of life.
        Without ``step`` they belong to the last step that was named here (0 before any). Never waits and never fails
        because of the job's state.

        ``samples_trained=n``, the number of samples that the job was trained with so far, is part of the job's state as
        well: it is saved, shown by ``rlmesh status``, and found in ``current_worker().resume``.

        Raises:
            UsageError: a value is no number, or the step no whole one; the message names it.
        """
        self._refuse_child("report()")
        self._step = as_step(self.name, step) if step is not None else (self._step or 0)
        values = {key: as_number(self.name, key, value) for key, value in metrics.items()}
        self.link.report(
            MetricRecord(
                at=self.clock(),
                role=self.role,
                rank=self.rank,
                step=self._step,
                metrics=values,
                calls=self.link.take_call_stats(),
            )
        )

    def alarm(self, text: str) -> None:
        """Say that something is wrong which people should look at, though the job goes on.

        It goes to ``events.jsonl``, and ``rlmesh status`` shows it. Never waits. Whoever raises it says it once, not
        at every step: only the last ones are shown.
        """
        self._refuse_child("alarm()")
        self.link.alarm(Alarm(self.clock(), self.role, self.rank, self._step, text))

    def events(self, wait_s: float = 0.0) -> tuple[RestartEvent, ...]:
        """Restarts of other members since this was asked before, oldest first.

        A call that failed because of a restart may fail a few milliseconds before the news of the restart: then
        ``wait_s`` is how long to wait, in seconds, for news if there are none.
        """
        self._refuse_child("events()")
        return self.link.take_events(wait_s)

    def on_event(self, listener: Callable[[RestartEvent], object]) -> Callable[[RestartEvent], object]:
        """Call ``listener`` with each restart of other members from now on; usable as a decorator.

        It is called on this member's main thread: between two methods, or, while ``run()`` runs, at
        ``step_boundary()``.
        """
        self._refuse_child("on_event()")
        self.link.listen(listener)
        return listener

    def step_boundary(self, step: int | None = None) -> StopRequest | None:
        """Say that a step ended; returns the request to stop if this is where to stop, else ``None``.

        Without ``step`` the steps are counted from 0. All ranks of the roles that drive the job get the request at
        the same step; while the job finds out at which, a boundary waits for some milliseconds. Listeners of
        ``on_event`` are called here, if ``run()`` runs, and methods with ``@rpc(main_thread=True)`` run here.

        Raises:
            UsageError: the member was to stop at an earlier step and went on, or the step is no whole number.
        """
        self._refuse_child("step_boundary()")
        self.link.tell_listeners()
        if step is None:
            step = 0 if self._step is None else self._step + 1
        before, self._boundary = self._boundary, as_step(self.name, step)
        self._step = self._boundary
        request = self.link.boundary(self._step)
        if request is None or (request.step is not None and self._step < request.step):
            return None
        if request.step is not None and before is not None and request.step <= before < self._step:
            raise UsageError(
                f"{self.name} (pid {self.pid}) went on to step {self._step} although all ranks stop at step "
                f"{request.step} ({request.reason}): when step_boundary() returns a request, save what must survive "
                "and return from run()"
            )
        self.link.stopping(self._step)
        return request

    def _refuse_child(self, what: str) -> None:
        if self.pid != os.getpid():
            raise UsageError(f"{what} was called in a child of {self.name}: {refusal(self.name)}")


_current: WorkerContext | None = None
_acting: ContextVar[WorkerContext | None] = ContextVar("rlmesh_acting_worker", default=None)


def set_current_worker(context: WorkerContext | None) -> None:
    """Set what ``current_worker()`` returns in this process; for the worker's bootstrap and for tests."""
    global _current
    _current = context


@contextmanager
def acting_as(context: WorkerContext) -> Iterator[None]:
    """What ``current_worker()`` returns within the block, in a process that serves several roles."""
    token = _acting.set(context)
    try:
        yield
    finally:
        _acting.reset(token)


def current_worker() -> WorkerContext:
    """The worker that this process is. Where roles are fused, it is the one whose method, hook or ``run()`` calls;
    in threads that user code started, the one of the role that was declared first.

    Raises:
        UsageError: this process is no worker.
    """
    if (acting := _acting.get()) is not None:
        return acting
    if _current is None:
        raise UsageError(
            f"current_worker() was called in process {os.getpid()}, which is not a worker of a job. Only "
            "the code of a role has one: its class, the functions that it calls, its entry script. The "
            "submitting script has its arguments instead; pass them on with .config(...)."
        )
    return _current
