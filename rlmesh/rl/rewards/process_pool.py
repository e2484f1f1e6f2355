"""`ScoringPool`: reward functions in separate processes, with a deadline and a memory limit for each call.

If a function loops, hangs in C code or uses too much memory, only its process is killed: its sample is `Failed`, and a
new process takes its place. Deadlines by signals cannot do this: they work only on main threads, and not in C code. The
pool is pebble's (``pip install rlmesh[rewards]``).
"""

from __future__ import annotations

import ctypes
import multiprocessing
import resource
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import BrokenExecutor, CancelledError, Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import cloudpickle
from pebble import ProcessExpired, ProcessPool

from rlmesh.rl.rewards.outcomes import to_outcome, to_outcomes
from rlmesh.rl.types import Failed, Outcome

__all__ = ["PROCESS_DIED", "ScoringPool"]

PROCESS_DIED = "the scorer's process ended"
"""Beginning of the reason of a `Failed` whose cause is the death of the scoring process."""
GUARD = 'begin a run below `if __name__ == "__main__":`, since the processes that score import the script too'
"""The advice for scripts that begin a run at their top level."""
_PR_SET_PDEATHSIG = 1

_functions: dict[str, Callable[..., Any]] = {}
_broken: str | None = None


class ScoringPool(AbstractContextManager["ScoringPool"]):
    """A pool of processes that score.

    ::

        with ScoringPool({"gsm8k": gsm8k.compute_score}, workers=4, timeout_s=5) as pool:
            outcome = pool.submit("gsm8k", solution_str="#### 4", ground_truth="4").result()

    Its methods may be called from any thread; `submit` never blocks.

    Args:
        functions: the functions by name. They are sent once to each process, by cloudpickle.
        workers: number of processes.
        timeout_s: time limit of a call, from its start.
        memory_bytes: memory that a process may allocate after the functions are loaded.

    Raises:
        ValueError: a setting is out of range.
        TypeError: a function cannot be sent to another process; the message names it.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        *,
        workers: int = 2,
        timeout_s: float = 10.0,
        memory_bytes: int = 2 * 2**30,
    ) -> None:
        if workers < 1 or timeout_s <= 0 or memory_bytes < 2**20:
            raise ValueError(
                f"workers must be ≥ 1, timeout_s > 0 and memory_bytes ≥ 1 MiB, got {workers}, {timeout_s} and "
                f"{memory_bytes}"
            )
        self.timeout_s, self.memory_bytes = timeout_s, memory_bytes
        self._names = frozenset(functions)
        self._waiting: dict[Future[Any], Callable[[Failed], Any]] = {}
        self._lock = threading.Lock()
        self._pool = ProcessPool(
            workers,
            initializer=_begin,
            initargs=(_pickled(functions), memory_bytes),
            # Forked children would inherit locks that other threads of this process hold.
            context=multiprocessing.get_context("spawn"),
        )

    def submit(self, name: str, /, **arguments: Any) -> Future[Outcome]:
        """Call the function of this name for one response.

        Args:
            name: name of the function.
            arguments: keyword arguments of the call; they must be picklable.

        Returns:
            a future that never raises: every error is a `Failed`.

        Raises:
            KeyError: no function has that name.
        """
        return self._schedule(name, None, arguments, lambda failed: failed)

    def submit_batch(self, name: str, size: int, /, **arguments: Any) -> Future[list[Outcome]]:
        """Call the function of this name once for a batch of responses; it returns a list.

        Args:
            name: name of the function.
            size: number of responses, and length of the list.
            arguments: see `submit`.

        Returns:
            a future that never raises: an error of the call is a `Failed` of each response.
        """
        return self._schedule(name, size, arguments, lambda failed: [failed] * size)

    def _schedule(
        self, name: str, size: int | None, arguments: dict[str, Any], whole: Callable[[Failed], Any]
    ) -> Future[Any]:
        if name not in self._names:
            raise KeyError(f"no reward function is named {name!r}: there are {', '.join(sorted(self._names))}")
        outcome: Future[Any] = Future()
        outcome.set_running_or_notify_cancel()
        with self._lock:
            self._waiting[outcome] = whole
        running = self._pool.schedule(_score, args=(name, size, arguments), timeout=self.timeout_s)
        running.add_done_callback(lambda done: self._finish(outcome, self._outcome(done)))
        return outcome

    def _finish(self, outcome: Future[Any], result: Any) -> None:
        with self._lock:
            whole = self._waiting.pop(outcome, None)
        if whole is not None:
            outcome.set_result(whole(result) if isinstance(result, Failed) else result)

    def _outcome(self, done: Future[Any]) -> Any:
        try:
            return done.result()
        except TimeoutError:
            return Failed(f"timeout: the scorer ran longer than {self.timeout_s:g} s")
        except MemoryError:
            return Failed(f"memory: the scorer wanted more than {self.memory_bytes / 2**20:.0f} MiB")
        except CancelledError:
            return Failed("the pool was closed")
        except ProcessExpired as error:
            return Failed(f"{PROCESS_DIED} with exit code {error.exitcode}")
        except BrokenExecutor:
            return Failed(f"the processes that score end before they can begin. In a script, {GUARD}")
        except BaseException as error:
            return Failed(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """End all processes; running calls become `Failed`. May be called twice."""
        self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool.join()
        # pebble leaves the futures of calls pending that ran when the pool was stopped.
        for outcome in list(self._waiting):
            self._finish(outcome, Failed("the pool was closed"))

    def __exit__(self, *_: object) -> None:
        self.close()


def _pickled(functions: Mapping[str, Callable[..., Any]]) -> bytes:
    for name, function in functions.items():
        try:
            cloudpickle.dumps(function)
        except Exception as error:
            raise TypeError(
                f"the reward function {name!r} cannot be sent to another process: {error}. Define it in a module, and "
                "load what it needs inside of it"
            ) from error
    return bytes(cloudpickle.dumps(dict(functions)))


def _begin(functions: bytes, memory_bytes: int) -> None:
    """Prepare a process of the pool."""
    global _broken
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        _functions.update(cloudpickle.loads(functions))
    except BaseException as error:  # reported with each sample, since an error of an initializer only breaks the pool
        _broken = f"the reward functions cannot be loaded in the scorer's process: {type(error).__name__}: {error}"
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + memory_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _score(name: str, size: int | None, arguments: dict[str, Any]) -> Outcome | list[Outcome]:
    """Run in a process of the pool."""
    if _broken is not None:
        return Failed(_broken)
    try:
        value = _functions[name](**arguments)
        return to_outcome(value) if size is None else to_outcomes(value, size)
    except MemoryError:
        raise
    except Exception as error:
        return Failed(f"{type(error).__name__}: {error}")
