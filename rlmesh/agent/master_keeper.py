"""Keeps the master of a job running: the agent of the first node restarts it when it dies.

The new master reads the store and listens at the same address, so that its peers go on. A master that dies again and
again ends the job, with the first of the deaths as the cause.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from rlmesh.agent.boot import start_master
from rlmesh.agent.monitoring.logs import last_lines
from rlmesh.agent.node_start import encode_config
from rlmesh.agent.processes.process import Ended
from rlmesh.agent.protocol import STATE_REFUSED, AgentConfig

__all__ = ["GiveUp", "MasterBudget", "MasterKeeper", "Verdict"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The master is not restarted; the reason."""

    why: str


@dataclass(frozen=True, slots=True)
class RestartMaster:
    """The master is restarted after ``after_s`` seconds."""

    after_s: float


Verdict = GiveUp | RestartMaster


@dataclass(frozen=True, slots=True)
class MasterBudget:
    """The number of deaths that a master may have. No I/O.

    Attributes:
        deaths: more deaths within ``window_s`` seconds end the job.
        first_pause_s: seconds before the second restart in a row; doubles each time. The first restart does not wait.
    """

    deaths: int = 5
    window_s: float = 60.0
    first_pause_s: float = 0.2
    most_pause_s: float = 3.0

    def judge(self, ended: tuple[tuple[float, str], ...], now: float) -> Verdict:
        """Decide what follows from the last death. ``ended``: time (seconds, monotonic) and description of each."""
        recent = [(at, how) for at, how in ended if now - at < self.window_s]
        if len(recent) > self.deaths:
            at, how = recent[0]
            return GiveUp(f"the master died {len(recent)} times within {now - at:.0f} s; first it {how}")
        before = len(recent) - 1
        return RestartMaster(0.0 if before <= 0 else min(self.most_pause_s, self.first_pause_s * 2.0 ** (before - 1)))


class _Starter(Protocol):
    def __call__(self, config: AgentConfig, line: bytes) -> int: ...


class MasterKeeper:
    """The processes that were and are the master of the job, on the node that runs it.

    Args:
        config: the agent's configuration.
        start: starts a master.
    """

    def __init__(
        self, config: AgentConfig, *, start: _Starter = start_master, clock: Callable[[], float] = time.monotonic,
        budget: MasterBudget | None = None,
    ) -> None:  # fmt: skip
        self._config, self._start, self._clock = config, start, clock
        self._budget = budget or MasterBudget()
        self._deaths: list[tuple[float, str]] = []

    def ended(self, ended: Ended) -> Verdict:
        """Decide what follows after the master ended before the job did."""
        lines = last_lines(f"{self._config.run_dir}/logs/master.log")
        tail = "".join(f"\n    {line}" for line in lines)
        if ended.exit_code == STATE_REFUSED:
            return GiveUp(f"the master refused the job's state{': ' if lines else ''}{lines[-1] if lines else ''}")
        self._deaths.append((self._clock(), f"{ended.describe()} (pid {ended.pid}); its last lines:{tail}"))
        return self._budget.judge(tuple(self._deaths), self._clock())

    def start(self) -> int:
        """Start the master again and return its process number.

        Raises:
            LaunchError: the master could not be started.
        """
        config = replace(self._config, start_master=True)
        pid = self._start(config, encode_config(config))
        logger.info("the master is started again as pid %d", pid)
        return pid
