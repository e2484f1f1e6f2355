"""Options of a job's launch that its description does not have: view, folder, cluster.

``rlmesh launch`` and ``LocalCluster`` set options around the user's script; ``submit`` reads them. Options set around
the script win over the script's own, because the caller of the script knows where it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

from rlmesh.master.jobspec import ObserveOptions, TimeLimits

if TYPE_CHECKING:
    from rlmesh.job.description.config import JobDescription
    from rlmesh.observe.views.live import ViewMode
    from rlmesh.rendezvous.server import RendezvousServer


@dataclass(frozen=True, slots=True)
class Cluster:
    """The nodes of a job.

    Attributes:
        names: names of the nodes; the first one's agent starts the master.
        devices_per_node: number of virtual devices of each node; None: the accelerators of its machine.
        ranks: ranks of the nodes; 0, 1, … if empty.
        hosts: addresses of the nodes, if they are on several machines.
        nvml: a library that replaces pynvml.
        groups: group of each node; nodes of the same group are one machine.
    """

    names: tuple[str, ...]
    devices_per_node: int | None = None
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    nvml: str = ""
    groups: tuple[str, ...] = ()

    def node_ranks(self) -> tuple[int, ...]:
        return self.ranks or tuple(range(len(self.names)))


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """Launch options. ``None`` leaves an option open; the comment below each option names its default."""

    view: ViewMode | None = None
    """auto"""
    restart: str | None = None
    """the job's own policy"""
    max_restarts: int | None = None
    """no such limit; otherwise restarts in total, of roles for which the job names no number"""
    run_dir: Path | None = None
    """a new folder under ``run_root``"""
    run_root: Path | None = None
    """``runs``"""
    cluster: Cluster | None = None
    """this machine as one node"""
    head: RendezvousServer | None = field(default=None, repr=False)
    """no other machines; otherwise the rendezvous server"""
    report: bool | None = None
    """draw the report"""
    observe: ObserveOptions | None = None
    """only the standard observation"""
    trackers: tuple[str, ...] | None = None
    """none; names of trackers (``rlmesh.observe.trackers``)"""
    key: bytes | None = field(default=None, repr=False)
    """a new one for each job"""
    submitted_at: float | None = None
    """now; seconds since the epoch, when ``submit`` was called"""
    grace_s: float | None = None
    """2.5; seconds between SIGTERM and SIGKILL when the job is stopped"""
    stop_within_s: float | None = None
    """600; seconds in which all ranks must reach the step at which they stop together"""
    restarts: int | None = None
    """0; number of earlier starts by a scheduler"""
    preview: Callable[[JobDescription, str], NoReturn] | None = field(default=None, repr=False)
    """the job is run; otherwise this is called with its description and name, and ends the script"""
    limits: TimeLimits = field(default_factory=TimeLimits)

    def over(self, other: LaunchOptions) -> LaunchOptions:
        """Return these options, with open ones taken from ``other``."""
        given = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}
        if self.limits == TimeLimits():
            del given["limits"]
        return replace(other, **given)


class JobControl(Protocol):
    """Interface of a submitted job for the code that set its options."""

    def stop(self, reason: str) -> None:
        """End the job, if it still runs. Returns at once."""

    def notice(self, reason: str) -> None:
        """Let all ranks stop at the same step, save what must survive, and end. Returns at once."""

    def wait_ended(self, timeout_s: float) -> bool:
        """True if the job, with all its processes, ended within the time."""


@dataclass(eq=False, slots=True)
class Ambient:
    """One block of options, and the jobs that were submitted in it. ``yields``: the options of ``submit`` win over
    the block's."""

    options: LaunchOptions
    yields: bool = False
    jobs: list[JobControl] = field(default_factory=list)


_ambient: list[Ambient] = []


@contextmanager
def ambient(options: LaunchOptions, *, yields: bool = False) -> Iterator[Ambient]:
    """Set options for every job that is submitted in this block, from any thread.

    Options of an outer block win, because it is nearer to the machine. A block that ``yields`` gives defaults only.
    """
    block = Ambient(options, yields)
    _ambient.append(block)
    try:
        yield block
    finally:
        _ambient.remove(block)


def effective(options: LaunchOptions | None) -> LaunchOptions:
    """Return ``options`` combined with those set around the script."""
    result = options or LaunchOptions()
    for block in reversed(_ambient):
        result = result.over(block.options) if block.yields else block.options.over(result)
    return result


def register_job(job: JobControl) -> None:
    """Register a submitted job with the surrounding blocks."""
    for block in _ambient:
        block.jobs.append(job)
