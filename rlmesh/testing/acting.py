"""Members without processes: the ``current_worker()`` of a role's object that a test serves itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlmesh.agent.worker.entrypoint import call_plainly
from rlmesh.agent.worker.fused import acting_for
from rlmesh.job.context import JobInfo, StopRequest, WorkerContext, acting_as
from rlmesh.job.restarts import RestartEvent
from rlmesh.job.status import Alarm, CallStats, MetricRecord
from rlmesh.runtime.rpc import exported

__all__ = ["ActingMember", "RecordingLink"]


class RecordingLink:
    """A link to a job that does not exist: records reports and alarms, has no restarts, and never stops a member."""

    def __init__(self, reports: list[MetricRecord], alarms: list[Alarm]) -> None:
        self._reports, self._alarms = reports, alarms

    def report(self, record: MetricRecord) -> None:
        self._reports.append(record)

    def alarm(self, alarm: Alarm) -> None:
        self._alarms.append(alarm)

    def boundary(self, step: int) -> StopRequest | None:
        return None

    def stopping(self, step: int) -> None:
        pass

    def take_events(self, wait_s: float) -> tuple[RestartEvent, ...]:
        return ()

    def listen(self, listener: Callable[[RestartEvent], object]) -> None:
        pass

    def tell_listeners(self) -> None:
        pass

    def take_call_stats(self) -> tuple[CallStats, ...]:
        return ()


class ActingMember:
    """A member of a role, made as in a worker: the class is called without arguments, then ``setup()``; in this code
    ``current_worker()`` is this member."""

    def __init__(
        self, kind: Callable[[], Any], role: str, rank: int, world_size: int, *, job: JobInfo, run_dir: Path,
        reports: list[MetricRecord], alarms: list[Alarm], group: str = "",
    ) -> None:  # fmt: skip
        self.context = WorkerContext(
            job, role, rank, world_size, RecordingLink(reports, alarms), local_rank=rank, local_world_size=world_size,
            node_name=os.uname().nodename, run_dir=run_dir, group=group,
        )  # fmt: skip
        with acting_as(self.context):
            self.object = kind()
        self.hook("setup")

    def hook(self, name: str) -> None:
        """Call a hook of the object, if it exists."""
        hook = getattr(self.object, name, None)
        if callable(hook):
            with acting_as(self.context):
                call_plainly(f"{type(self.object).__name__}.{name}()", hook)

    def functions(self) -> Mapping[str, Callable[..., Any]]:
        """The object's ``@rpc`` methods, by name; within each, ``current_worker()`` is this member."""
        return {name: acting_for(self.context, method) for name, method in exported(self.object).items()}
