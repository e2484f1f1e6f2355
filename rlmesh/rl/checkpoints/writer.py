"""`CheckpointWriter`: the trainer's side of writing a checkpoint of all roles while training continues."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Any

from rlmesh import WorkerContext
from rlmesh.rl.checkpoints.state import EncodedState, encoded
from rlmesh.rl.checkpoints.store import CheckpointStore

__all__ = ["CheckpointWriter"]

ANSWER_S = 5.0
"""Seconds that one call of a role waits for its part to be written."""
PART_S = 3600.0
"""Seconds after which a part that is not written counts as failed."""
NEXT_S = 600.0
"""Seconds that a checkpoint waits for the one before it; then it is left out, and training continues."""


class CheckpointWriter:
    """Begins a checkpoint on the step path, and completes it on a thread of its own.

    The roles copy their state (`begin`); training pauses for this time only. Then they write the copies, with fsync,
    and the writer's thread waits for them. The checkpoint counts only when all copies are written. If a part fails (the
    disk may be full), the checkpoint is dropped, the failure is reported once, and earlier checkpoints stay.

    Args:
        store: the checkpoints of the run.
        roles: function that returns section and members of each model in training.
        worker: the trainer's context, for alarms.
        tell: prints a text for people.

    Attributes:
        begun: the step whose checkpoint has begun, and for which `complete` was not called yet; None: there is none.
        failures: number of checkpoints that failed.
        pause_s: seconds for which the last `begin` paused training.
    """

    def __init__(
        self,
        store: CheckpointStore,
        roles: Callable[[], Sequence[tuple[str, Any]]],
        worker: WorkerContext,
        tell: Callable[[str], None],
    ) -> None:
        self.store, self.failures, self.pause_s = store, 0, 0.0
        self._roles, self._worker, self._tell = roles, worker, tell
        self.begun: int | None = None
        self._thread: threading.Thread | None = None
        self._failing = False
        self._closed = threading.Event()

    def begin(self, step: int) -> bool:
        """Let all roles copy the state of a finished step, and begin to write it; False if a role cannot.

        Waits for the checkpoint before, if that is still being written.
        """
        began = time.perf_counter()
        try:
            self.begun = None
            if not self.wait(NEXT_S):
                self._failed(step, f"the checkpoint before it is still being written after {NEXT_S:g} s")
                return False
            calls = [role.call("save", step) for _, role in self._roles()]
            if faults := [fault for call in calls for fault in call.result() if fault]:
                self.store.remove_incomplete(but=step)  # this may make room on a full disk
                self._failed(step, faults[0])
                return False
            self.begun = step
            return True
        finally:
            self.pause_s = time.perf_counter() - began

    def complete(
        self, step: int, state: Mapping[str, Any], about: Mapping[str, Any], records: Sequence[Future[None]] = ()
    ) -> None:
        """Complete the checkpoint that `begin` began for this step, in the background; does nothing without one.

        Args:
            step: the step.
            state: the states of the trainer's objects after the step.
            about: metrics, settings and position, see `RunCheckpoint`.
            records: futures of objects, such as the ledger, that make their records durable. The checkpoint counts only
                when all are done. If one fails, its object reports the error, and the checkpoint counts too: it has
                everything that the run needs.
        """
        if self.begun != step:
            return
        self.begun = None
        given = encoded(state), dict(about), records
        self._thread = threading.Thread(
            target=self._complete, args=(step, *given), name="rlmesh-checkpoints", daemon=True
        )
        self._thread.start()

    def wait(self, timeout_s: float = PART_S) -> bool:
        """Wait for the checkpoint that is being written; False if it takes longer than ``timeout_s``."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
            if thread.is_alive():
                return False
            self._thread = None
        return True

    def stop(self) -> None:
        """Stop waiting for roles, which may have ended."""
        self._closed.set()
        self.wait(2 * ANSWER_S)

    def _complete(
        self, step: int, state: EncodedState, about: Mapping[str, Any], records: Sequence[Future[None]]
    ) -> None:
        try:
            # Not earlier: a role that restarts reads the latest checkpoint, and has done so when it copies its state.
            self.store.prune()
            self.store.remove_incomplete(but=step)  # parts of failed checkpoints would fill the disk
            roles = self._roles()
            for name, role in roles:
                self._await_part(step, name, role)
            futures.wait(records, NEXT_S)
            self.store.commit(step, [name for name, _ in roles], state, about)
        except Exception as error:  # nothing else reports errors of this thread
            self._failed(step, str(error) or repr(error))
        else:
            if self._failing:
                self._failing = False
                self._tell(f"checkpoints are written again: step {step}")

    def _await_part(self, step: int, name: str, role: Any) -> None:
        until = time.monotonic() + PART_S
        while None in (answers := role.call("saved", step, ANSWER_S).result()):
            if self._closed.is_set():
                raise OSError("the run ended before it was written")
            if time.monotonic() > until:
                raise OSError(f"{name} has not written its part after {PART_S:g} s")
        if faults := [fault for fault in answers if fault]:
            raise OSError(faults[0])

    def _failed(self, step: int, why: str) -> None:
        """Report a failure; of several in a row only the first one."""
        self.failures += 1
        if self._failing:
            return
        self._failing = True
        latest = self.store.latest_step
        there = f"the checkpoint of step {latest} is the latest" if latest else "there is no checkpoint yet"
        text = f"the checkpoint of step {step} failed, and training goes on; {there}: {why}"
        self._tell(text)
        self._worker.alarm(text)
