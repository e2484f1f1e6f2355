"""How a job is launched, as far as its description does not say it: view, folder, cluster.

``rlmesh launch`` and ``LocalCluster`` set options around the user's script; ``submit`` reads them. What was
set around the script wins over what the script says, since whoever starts a script knows where it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

from rlmesh.master.jobspec import ObserveOptions, TimeLimits

if TYPE_CHECKING:
    from rlmesh.job.description.config import DLConfig
    from rlmesh.observe.views.live import ViewMode
    from rlmesh.rendezvous.server import Head


@dataclass(frozen=True, slots=True)
class Cluster:
    """The nodes of a job. Without ``devices_per_node`` each has the accelerators of its machine; with it,
    so many virtual slots. ``names`` are the nodes' names; the first one's agent starts the master.

    ``ranks`` are the nodes' ranks, 0, 1, … if not given; ``hosts`` their addresses, given where they are on several
    machines; those with the same of ``groups`` are one machine. ``nvml`` names a library in place of pynvml.
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
    """``None`` leaves an option to others, and at last to the default that its comment names."""

    view: ViewMode | None = None
    """auto"""
    restart: str | None = None
    """the job's own policy"""
    max_restarts: int | None = None
    """no such limit; restarts in all, for roles for which the job names no number"""
    run_dir: Path | None = None
    """a new folder under ``run_root``"""
    run_root: Path | None = None
    """``runs``"""
    cluster: Cluster | None = None
    """this machine as one node"""
    head: Head | None = field(default=None, repr=False)
    """no other machines; else where they come together"""
    report: bool | None = None
    """draw the report"""
    observe: ObserveOptions | None = None
    """nothing besides what is always seen"""
    key: bytes | None = field(default=None, repr=False)
    """a new one for each job"""
    submitted_at: float | None = None
    """now; seconds since the epoch, when ``submit`` was called"""
    grace_s: float | None = None
    """2.5; seconds between SIGTERM and SIGKILL when the job is stopped"""
    stop_within_s: float | None = None
    """600; seconds that all ranks have to come to the step at which they stop together"""
    restarts: int | None = None
    """0; how often a scheduler has started the job before"""
    preview: Callable[[DLConfig, str], NoReturn] | None = field(default=None, repr=False)
    """the job is run; else this is called with its description and name, and ends the script"""
    limits: TimeLimits = field(default_factory=TimeLimits)

    def over(self, other: LaunchOptions) -> LaunchOptions:
        """These options, with what they leave open taken from ``other``."""
        given = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}
        if self.limits == TimeLimits():
            del given["limits"]
        return replace(other, **given)


class JobControl(Protocol):
    """A job as whoever set its options sees it."""

    def stop(self, reason: str) -> None:
        """End it, if it still runs. Returns at once."""

    def notice(self, reason: str) -> None:
        """Let all its ranks stop at the same step, save what must survive, and end. Returns at once."""

    def wait_ended(self, timeout_s: float) -> bool:
        """Whether it ended within the time, with all its processes."""


@dataclass(eq=False, slots=True)
class Ambient:
    """One block of options, and the jobs that were submitted in it. ``yields``: what a call to ``submit`` itself says
    wins over it."""

    options: LaunchOptions
    yields: bool = False
    jobs: list[JobControl] = field(default_factory=list)


_ambient: list[Ambient] = []


@contextmanager
def ambient(options: LaunchOptions, *, yields: bool = False) -> Iterator[Ambient]:
    """Options for every job that is submitted in this block, from any thread. An outer block's win: it was
    set by whoever is nearer to the machine. One that ``yields``, of the program itself, gives defaults."""
    block = Ambient(options, yields)
    _ambient.append(block)
    try:
        yield block
    finally:
        _ambient.remove(block)


def effective(options: LaunchOptions | None) -> LaunchOptions:
    """``options`` under what was set around the script."""
    result = options or LaunchOptions()
    for block in reversed(_ambient):
        result = result.over(block.options) if block.yields else block.options.over(result)
    return result


def enlist(job: JobControl) -> None:
    """Tell the blocks around about a job that is being submitted."""
    for block in _ambient:
        block.jobs.append(job)
