"""`Trackers`: starts the processes of a run's trackers, and ends them."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlmesh import private_files
from rlmesh.errors import UsageError
from rlmesh.observe.trackers.process import TrackerState, state_file
from rlmesh.observe.trackers.protocol import ALWAYS, tracker_faults

__all__ = ["Trackers"]

logger = logging.getLogger(__name__)

FINISH_S, MARGIN_S = 30.0, 5.0
QUEUE = 10_000


class Trackers:
    """Shows the metrics of a run in W&B, MLflow, trackio or a tracker of the user's.

    Each has a process of its own, which reads the run's ``metrics.jsonl``. It has a queue of 10,000 reports, and drops
    the oldest if the tracker is slower than that. A tracker that raises is logged once and tried again. Output of
    trackers is in ``logs/tracker-NAME.log`` of the run directory.

    Args:
        names: ``wandb``, ``mlflow``, ``trackio``, each also with a project (``wandb:PROJECT``), or ``module:Class`` for
            a class with the methods ``open(run)``, ``log(record)`` and ``close()``. ``tensorboard`` is always written.
        finish_s: seconds that a tracker has after the end of the run.
        queue: reports that wait for a tracker.

    Raises:
        UsageError: a tracker cannot be used; says what to install.
    """

    def __init__(self, names: Sequence[str], *, finish_s: float = FINISH_S, queue: int = QUEUE) -> None:
        if faults := [*self.faults(names)]:
            raise UsageError("trackers: " + "\n  ".join(faults))
        self._names = [name for name in dict.fromkeys(names) if name != ALWAYS]
        self._finish_s, self._queue = finish_s, queue
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @staticmethod
    def faults(names: Sequence[str]) -> Iterator[str]:
        """One sentence per tracker that cannot be used; starts and imports nothing."""
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            return iter([f"expected a list of names, such as ['wandb'], got {names!r}"])
        return tracker_faults(names)

    @contextmanager
    def following(self, run_dir: Path, job: str) -> Iterator[None]:
        """Show the run in this directory until the end of the block, and then what is left of its reports.

        Args:
            run_dir: of the run.
            job: the name of the run.
        """
        for name in self._names:
            self._start(run_dir, job, name)
        try:
            yield
        finally:
            self._end(run_dir, job)

    def _start(self, run_dir: Path, job: str, name: str) -> None:
        command = [sys.executable, "-m", "rlmesh.observe.trackers.process", str(run_dir.absolute()), job, name]
        path = os.pathsep.join(one or os.getcwd() for one in sys.path)
        try:
            log = private_files.log_to(run_dir / "logs" / f"tracker-{state_file(run_dir, name).stem}.log")
            try:
                self._processes[name] = subprocess.Popen(
                    [*command, str(self._finish_s), str(self._queue)], stdin=subprocess.PIPE, stdout=log, stderr=log,
                    # Ctrl-C is for the job, whose last reports the tracker still has to show.
                    start_new_session=True, env={**os.environ, "PYTHONPATH": path},
                )  # fmt: skip
            finally:
                os.close(log)
        except OSError as error:
            logger.warning("tracker %s could not be started, the run goes on without it: %s", name, error)

    def _end(self, run_dir: Path, job: str) -> None:
        for name, process in list(self._processes.items()):
            if process.poll() is not None:
                self._start_again(run_dir, job, name)
        for process in self._processes.values():
            _close(process)
        deadline = time.monotonic() + self._finish_s + MARGIN_S
        for name in list(self._processes):
            if self._has_died(run_dir, name, deadline):  # with reports that it has not shown
                self._start_again(run_dir, job, name)
                _close(self._processes[name])
                if self._has_died(run_dir, name, deadline):
                    code = self._processes[name].returncode
                    logger.warning("the process of tracker %s died again (%s): its last reports are lost", name, code)
            state = TrackerState.read(state_file(run_dir, name))
            if state.lost or state.failure:
                logger.warning(
                    "tracker %s: %d reports were not shown%s; see %s", name, state.lost,
                    f", it fails: {state.failure}" if state.failure else "", run_dir / "logs",
                )  # fmt: skip
        self._processes.clear()

    def _start_again(self, run_dir: Path, job: str, name: str) -> None:
        died = self._processes[name]
        logger.warning("the process of tracker %s died (%s); it is started again", name, died.returncode)
        _close(died)
        self._start(run_dir, job, name)

    def _has_died(self, run_dir: Path, name: str, deadline: float) -> bool:
        """Wait until a tracker has ended; True if its process died without a note of what it has not shown."""
        process = self._processes[name]
        try:
            code = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            logger.warning("tracker %s does not end, and is killed", name)
            code = 0
        finally:
            _kill(process)
        state = TrackerState.read(state_file(run_dir, name))
        return code != 0 and not state.lost and not state.failure


def _close(process: subprocess.Popen[bytes]) -> None:
    """Tell a tracker that the run has ended."""
    if process.stdin is not None and not process.stdin.closed:
        process.stdin.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a tracker with all its processes: W&B has one of its own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
