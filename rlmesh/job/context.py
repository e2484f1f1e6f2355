"""The interface of a worker's code to its own process and job: ``current_worker()``.

The worker's bootstrap makes one ``WorkerContext`` and sets it before any code of the role runs. The context
reaches the rest of the job only through a ``ControlLink``, so this module does no I/O.
"""

from __future__ import annotations

import os
from collections.abc import Callable
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
    from rlmesh.job.device_lease import DeviceLease, Hook, LeaseLink, SharedLease

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
"""Environment variable with the roles that share this member's device, separated by commas; unset without sharing."""


@dataclass(frozen=True, slots=True)
class StopRequest:
    """A request to stop at a step boundary: save what must survive, then return from ``run()``.

    Attributes:
        reason: who or what asked, for the log.
        step: the step after which all ranks stop; ``None``: at the next boundary.
        grace_s: time between the notice and the forced stop of the job.
    """

    reason: str
    step: int | None = None
    grace_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Resume:
    """An earlier start of the job in this run directory that did not get to its end.

    Attributes:
        count: number of earlier starts.
        step: the step after which all ranks stopped the last time; None if they did not stop together (a crash, a lost
            node): then resume from the last checkpoint.
        samples_trained: the last reported count, see ``report``. After resuming from an older checkpoint, continue with
            the checkpoint's own count.
    """

    count: int
    step: int | None = None
    samples_trained: int = 0


class ControlLink(Protocol):
    """A worker context's connection to its job; the worker's bootstrap supplies it.

    Every method may be called from any thread and, except ``boundary``, ``take_events`` and ``tell_listeners``, returns
    at
    once.
    """

    def report(self, record: MetricRecord) -> None:
        """Send a record to the master, without waiting for it."""

    def alarm(self, alarm: Alarm) -> None:
        """Send an alarm to the master, without waiting for it."""

    def boundary(self, step: int) -> StopRequest | None:
        """Report the end of a step and return the requested stop, if any.

        Waits a moment while the job determines at which step all ranks stop.
        """

    def stopping(self, step: int) -> None:
        """Report that this member stops at a step as requested."""

    def take_events(self, wait_s: float) -> tuple[RestartEvent, ...]:
        """Return the restarts since the last call; if there are none, wait up to ``wait_s`` seconds for one."""

    def listen(self, listener: Callable[[RestartEvent], object]) -> None:
        """Call ``listener`` for each restart from now on."""

    def tell_listeners(self) -> None:
        """Call the listeners for new restarts, on the calling thread.

        On the main thread, also run the methods that wait for it.
        """

    def take_call_stats(self) -> tuple[CallStats, ...]:
        """Return statistics of the remote calls that ended since the last call."""


@dataclass(frozen=True, slots=True)
class JobInfo:
    """The job that this worker belongs to. ``user_config`` is the argument of ``.config(...)``."""

    name: str
    job_id: str
    user_config: Any = None
    accelerator: str = "GPU"
    resume: Resume | None = None


@dataclass(slots=True)
class WorkerContext:
    """The identity of this worker, and its methods to report.

    Attributes:
        rank, world_size, local_rank, local_world_size: position among the members of this worker's role, as in
            torchrun.
        node_rank: number of the node in the job.
        group: name of the member's group, in roles that have groups.
        devices: UUIDs of the member's devices.
        restored: the version last passed to ``send_weights(restored=…)``.
        objects: the role objects of this process, by role: see ``fused``.
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
    lease_link: LeaseLink | None = None
    lease_timeout_s: float = 1800.0
    restored: int | None = None
    objects: dict[str, object] = field(default_factory=dict, repr=False)
    clock: Callable[[], float] = epoch
    _step: int | None = field(default=None, init=False, repr=False)
    _boundary: int | None = field(default=None, init=False, repr=False)
    _lease: SharedLease | None = field(default=None, init=False, repr=False)

    @property
    def name(self) -> str:
        """``ROLE:rank``, the member's name in logs and errors."""
        return f"{self.role}:{self.rank}"

    @property
    def actor_info(self) -> WorkerContext:
        """The same object, under DLRover's name."""
        return self

    @property
    def step(self) -> int | None:
        """The last step given to ``report`` or ``step_boundary``."""
        return self._step

    @property
    def resume(self) -> Resume | None:
        """The earlier start to resume; None at the first start of the job in its run directory."""
        return self.job_info.resume

    @property
    def collocated_roles(self) -> frozenset[str]:
        """The roles that share this member's device, including its own; empty without sharing."""
        return frozenset(filter(None, os.environ.get(COLLOCATION_ENV, "").split(",")))

    @property
    def fused_roles(self) -> frozenset[str]:
        """The roles that share this process, including its own; empty if there are no others."""
        return frozenset(self.objects) if len(self.objects) > 1 else frozenset()

    def fused(self, role: str | Enum) -> Any:
        """Return the object of another role in this process, for uses beyond calls, such as shared parameters.

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
        """Return a block in which no member of another role is awake on this member's devices::

            with current_worker().device_lease(wake=self.engine.wake_up, sleep=self.engine.sleep):
                return self.engine.generate(prompts)

        Use ``async with`` in ``async def`` methods. Roles that share a device take turns, in the order of their
        requests; the local members of an elastic role have their turn together. The lease of a member that dies is
        free.

        Args:
            timeout_s: maximum wait for the devices; by default as long as a call may take.
            wake: called when the devices are available: load weights, put state back onto the device.
            sleep: called before they are returned: free the device's memory. If it raises, the lease stays.

        Raises:
            LeaseTimeout: another role held the devices; says which member, and since when.
        """
        self._refuse_child("device_lease()")
        from rlmesh.job.device_lease import DeviceLease, SharedLease

        if self._lease is None:
            if self.lease_link is None:
                raise UsageError(f"{self.name}: device_lease() needs an agent that grants it, and there is none here")
            self._lease = SharedLease(self.name, self.lease_link)
        return DeviceLease(self._lease, self.lease_timeout_s if timeout_s is None else timeout_s, wake, sleep)

    def report(self, step: int | None = None, **metrics: Any) -> None:
        """Report metrics of a step: numbers, or what ``float()`` accepts, such as tensors with one item.

        Every digit is kept: floats are written in full, ints of any size as ints, True as 1. The metrics go to
        ``metrics.jsonl``, TensorBoard (whose scalars have 32 bits) and the live view, and count as a sign of life.
        Without ``step`` they belong to the last named step (0 before any). Never waits and never fails because of the
        job's
        state.

        ``samples_trained=n``, the number of samples trained on so far, is also part of the job's state: it is saved,
        shown by
        ``rlmesh status``, and available in ``current_worker().resume``.

        Raises:
            UsageError: a value is not a number, or the step is not a whole number; the message names it.
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
        """Report that something is wrong which people should look at, though the job goes on.

        The alarm goes to ``events.jsonl``, and ``rlmesh status`` shows it. Never waits. Raise an alarm once, not at
        every step:
        only the last alarms are shown.
        """
        self._refuse_child("alarm()")
        self.link.alarm(Alarm(self.clock(), self.role, self.rank, self._step, text))

    def events(self, wait_s: float = 0.0) -> tuple[RestartEvent, ...]:
        """Return the restarts of other members since the last call, oldest first.

        A call that failed because of a restart may fail a few milliseconds before the report of the restart arrives:
        ``wait_s`` is the maximum wait in seconds for a report if there is none.
        """
        self._refuse_child("events()")
        return self.link.take_events(wait_s)

    def on_event(self, listener: Callable[[RestartEvent], object]) -> Callable[[RestartEvent], object]:
        """Call ``listener`` with each restart of other members from now on; usable as a decorator.

        The listener runs on this member's main thread: between two methods, or, during ``run()``, at
        ``step_boundary()``.
        """
        self._refuse_child("on_event()")
        self.link.listen(listener)
        return listener

    def step_boundary(self, step: int | None = None) -> StopRequest | None:
        """Report the end of a step; returns the request to stop if this is the step to stop at, else ``None``.

        Without ``step`` the steps are counted from 0. All ranks of the roles that drive the job get the request at
        the same step; while the job determines that step, a boundary waits for some milliseconds. During ``run()``,
        listeners
        of ``on_event`` and methods with ``@rpc(main_thread=True)`` run here.

        Raises:
            UsageError: the member went on after the step at which it was to stop, or the step is not a whole number.
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
    """Set the result of ``current_worker()`` in this process; for the worker's bootstrap and for tests."""
    global _current
    _current = context


class acting_as:
    """Sets the result of ``current_worker()`` within a ``with`` block, in a process that serves several roles."""

    __slots__ = ("_context", "_token")

    def __init__(self, context: WorkerContext) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._token = _acting.set(self._context)

    def __exit__(self, *_: object) -> None:
        _acting.reset(self._token)


def current_worker() -> WorkerContext:
    """Return the worker that this process is.

    In a process with fused roles it is the worker whose method, hook or ``run()`` calls; in threads that user code
    started,
    the worker of the role that was declared first.

    Raises:
        UsageError: this process is not a worker.
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
