"""Carries out trials: one after the other in this process, or several at once in an rlmesh job."""

from __future__ import annotations

import itertools
import queue
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from rlmesh import DLJobBuilder, RoleGroup, rpc
from rlmesh.envs import Algorithm
from rlmesh.envs.runners.jobs import outside_of_loops

__all__ = ["Answer", "LocalSlot", "RemoteSlot", "TrialRunner", "remote_slots"]

ROLE = "TRIAL"
TRAIN_TIMEOUT_S = 7 * 86400.0
"""Longest iteration."""
MAX_RESTARTS = 100
"""Restarts of a process within ten minutes."""
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of a step of a trial.

    Attributes:
        slot: the slot of the trial.
        value: the result of the step.
        error: traceback or message; None if the step succeeded.
    """

    slot: TrialSlot
    value: Any = None
    error: str | None = None


class TrialSession:
    """An algorithm that is made, trained, saved and stopped step by step."""

    def __init__(self) -> None:
        self._algorithm: Algorithm | None = None

    @rpc
    def begin(self, given: Any, restore: str | None, threads: int = 0) -> None:
        """Make the algorithm.

        Args:
            given: class and settings of the algorithm, as a tuple or pickled.
            restore: go on from this checkpoint.
            threads: threads of torch; 0 leaves the number as it is.
        """
        import cloudpickle

        self.end()
        algorithm_class, config = cloudpickle.loads(given) if isinstance(given, bytes) else given
        if threads:
            import torch

            torch.set_num_threads(threads)
        self._algorithm = algorithm_class(config)
        if restore is not None:
            self._algorithm.restore(restore)

    @rpc
    def train(self) -> Any:
        """One iteration."""
        assert self._algorithm is not None
        return self._algorithm.train()

    @rpc
    def save(self, folder: str) -> str:
        """Write a checkpoint."""
        assert self._algorithm is not None
        return self._algorithm.save(folder)

    @rpc
    def end(self) -> None:
        """Stop the algorithm."""
        algorithm, self._algorithm = self._algorithm, None
        if algorithm is not None:
            algorithm.stop()


class TrialSlot(Protocol):
    """A place where one trial runs at a time."""

    def submit(self, method: str, *args: Any) -> None: ...


class LocalSlot:
    """Runs the steps of a trial in this process, at once.

    Args:
        answers: gets an `Answer` for each step.
        raises: raise errors of the steps instead of queueing them.
    """

    def __init__(self, answers: queue.SimpleQueue[Answer], *, raises: bool = False) -> None:
        self._answers, self._raises, self.session = answers, raises, TrialSession()

    def submit(self, method: str, *args: Any) -> None:
        """Run a step and queue its answer."""
        try:
            value = getattr(self.session, method)(*args)
        except Exception:
            if self._raises:
                raise
            self._answers.put(Answer(self, error=traceback.format_exc()))
        else:
            self._answers.put(Answer(self, value))


class RemoteSlot:
    """Sends the steps of a trial to a member of the job."""

    def __init__(self, answers: queue.SimpleQueue[Answer], member: Any) -> None:
        self._answers, self._member = answers, member

    def submit(self, method: str, *args: Any) -> None:
        """Call the step; its answer is queued when it arrives."""
        repeatable = method in ("begin", "end")  # repeated at a member that restarts meanwhile
        member = self._member.options(timeout_s=TRAIN_TIMEOUT_S, idempotent=repeatable)
        member.call(method, *args).add_done_callback(self._ended)

    def _ended(self, future: Any) -> None:
        error = future.exception()
        if error is None:
            self._answers.put(Answer(self, future.result()))
            return
        text = getattr(error, "remote_traceback", None) or f"{type(error).__name__}: {error}"
        self._answers.put(Answer(self, error=str(text)))


class TrialRunner(TrialSession):
    """The role of processes that carry out trials, one at a time."""

    def teardown(self) -> None:
        self.end()


@contextmanager
def remote_slots(number: int, run_dir: str | None) -> Iterator[list[Any]]:
    """Handles of ``number`` processes that carry out trials, in a job that ends with the block."""
    role = DLJobBuilder().config({}).role(ROLE).run(TrialRunner).total(number)
    job = role.restart("member", max_restarts=MAX_RESTARTS, delay_s=0.05, max_delay_s=1.0).build()
    stack: list[Any] = []

    def enter() -> list[Any]:
        handle = job.start(f"trials-{next(_numbers)}", view="none", run_dir=run_dir)
        stack.append(handle.__enter__())
        joined = handle.join()
        runtime = joined.__enter__()
        stack.append(joined)
        return list(RoleGroup(ROLE, runtime=runtime))

    def leave() -> None:
        while stack:
            stack.pop().__exit__(None, None, None)

    try:
        entered: list[Any] = []
        outside_of_loops(lambda: entered.extend(enter()))
        yield entered
    finally:
        outside_of_loops(leave)
