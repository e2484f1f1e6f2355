"""Requests for a replacement of a lost machine, by a command of the user's."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rlmesh import private_files

__all__ = ["RELAUNCH_LOG", "Relaunch"]

logger = logging.getLogger(__name__)

RELAUNCH_LOG = "relaunch.log"
_END_S = 2.0


class Relaunch:
    """Runs the command once for each lost node; its output goes to ``relaunch.log`` in the run directory.

    Args:
        command: words, as a shell would split them; no shell runs it.
        run_dir: the job's run directory.
        env: environment variables of the command, besides the driver's own.
    """

    def __init__(self, command: str, run_dir: Path, env: Mapping[str, str]) -> None:
        self._words, self._log, self._env = shlex.split(command), run_dir / RELAUNCH_LOG, dict(env)
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._asked: set[int] = set()

    def look(self, wanted: set[int], names: Mapping[int, str]) -> None:
        """Ask for machines for the ``wanted`` nodes, once per node until it is not wanted any more."""
        self._asked &= wanted
        for node_rank in sorted(wanted - self._asked):
            self._asked.add(node_rank)
            self._ask(node_rank, names.get(node_rank, str(node_rank)))
        for node_rank, process in list(self._running.items()):
            if (code := process.poll()) is not None:
                del self._running[node_rank]
                if code:
                    logger.warning(
                        "the command that was to bring another machine for node %s ended with code %s; see %s",
                        node_rank, code, self._log,
                    )  # fmt: skip

    def _ask(self, node_rank: int, name: str) -> None:
        env = {**os.environ, **self._env, "RLMESH_NODE_RANK": str(node_rank), "RLMESH_LOST_NODE": name}
        try:
            with os.fdopen(private_files.append_to(self._log), "ab") as log:
                self._running[node_rank] = subprocess.Popen(
                    self._words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
                )
        except OSError as error:
            logger.error("the command %r, which was to bring another machine, cannot be run: %s", self._words, error)

    def close(self) -> None:
        """End the commands that still run, with their children. Machines that joined end by themselves."""
        for process in self._running.values():
            _signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + _END_S
        for process in self._running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            _signal_group(process, signal.SIGKILL)
            process.wait()
        self._running.clear()


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)  # the process leads its own session and group
