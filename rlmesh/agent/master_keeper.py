"""Keeps the master of a job running: the agent of the first node starts it again when it died.

The new one reads the store and listens at the same address, so that whoever talked to the old one goes on. A master
that dies again and again, because of a fault of its own or of what it finds in its store, ends the job with the first
of the deaths as its cause.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from rlmesh.agent.boot import MasterStart, start_master
from rlmesh.agent.monitoring.logs import last_lines
from rlmesh.agent.node_start import encode_config
from rlmesh.agent.processes.process import Ended
from rlmesh.agent.protocol import STATE_REFUSED, AgentConfig

__all__ = ["GiveUp", "MasterBudget", "MasterKeeper", "Verdict"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The master is not started again; why."""

    why: str


@dataclass(frozen=True, slots=True)
class Again:
    """The master is started again after so many seconds."""

    after_s: float


Verdict = GiveUp | Again


@dataclass(frozen=True, slots=True)
class MasterBudget:
    """How often a master may die. Pure.

    Attributes:
        deaths: more than so many within ``window_s`` end the job.
        first_pause_s: before the second start in a row; it doubles each time. The first restart waits for nothing.
    """

    deaths: int = 5
    window_s: float = 60.0
    first_pause_s: float = 0.2
    most_pause_s: float = 3.0

    def judge(self, ended: tuple[tuple[float, str], ...], now: float) -> Verdict:
        """What to do about the last of the deaths, given as times (seconds, monotonic) and how each came about."""
        recent = [(at, how) for at, how in ended if now - at < self.window_s]
        if len(recent) > self.deaths:
            at, how = recent[0]
            return GiveUp(f"the master died {len(recent)} times within {now - at:.0f} s; first it {how}")
        before = len(recent) - 1
        return Again(0.0 if before <= 0 else min(self.most_pause_s, self.first_pause_s * 2.0 ** (before - 1)))


class _Starter(Protocol):
    def __call__(self, config: AgentConfig, line: bytes) -> MasterStart: ...


class MasterKeeper:
    """The master's process of one node, and the ones before it.

    Args:
        config: of this agent.
        started: the first master's process; None where the master is on another node.
        start: starts another.
    """

    def __init__(
        self, config: AgentConfig, started: MasterStart | None, *, start: _Starter = start_master,
        clock: Callable[[], float] = time.monotonic, budget: MasterBudget | None = None,
    ) -> None:  # fmt: skip
        self._config, self._start, self._clock = config, start, clock
        self._budget = budget or MasterBudget()
        self._deaths: list[tuple[float, str]] = []
        self._lifeline = started.lifeline if started else None

    def ended(self, ended: Ended) -> Verdict:
        """The master ended although the job has not: whether it is started again, or how the job ends."""
        self.let_go()
        lines = last_lines(f"{self._config.run_dir}/logs/master.log")
        tail = "".join(f"\n    {line}" for line in lines)
        if ended.exit_code == STATE_REFUSED:
            return GiveUp(f"the master refused the job's state{': ' if lines else ''}{lines[-1] if lines else ''}")
        self._deaths.append((self._clock(), f"{ended.describe()} (pid {ended.pid}); its last lines:{tail}"))
        return self._budget.judge(tuple(self._deaths), self._clock())

    def start(self) -> int:
        """Start it again; its process number.

        Raises:
            LaunchError: it could not be started.
        """
        config = replace(self._config, start_master=True)
        started = self._start(config, encode_config(config))
        self._lifeline = started.lifeline
        logger.info("the master is started again as pid %d", started.pid)
        return started.pid

    def let_go(self) -> None:
        """Tell the master, if it still runs, that its agent is done."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None


def failed_start(error: Exception) -> GiveUp:
    """What follows from a start that failed."""
    return GiveUp(f"the master could not be started again: {error}")
