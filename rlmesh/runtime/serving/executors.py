"""Threads for ``def`` methods: `SerialExecutor` runs them one after the other, `ThreadPool` several at once."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from rlmesh.runtime.process import forked

logger = logging.getLogger(__name__)

HAND_OVER_S = 5.0
"""The longest wait of the main thread, at a boundary, for the method on the second thread, which may itself wait for
something that happens after the boundary."""

Job = Callable[[], None]


class SerialExecutor:
    """Runs jobs in the order in which they are submitted, one at a time.

    If a thread called `run` (a worker's main thread), jobs run there; while user code occupies that thread (`busy`),
    and where no thread called `run`, they run on the executor's own thread. Jobs for the ``main`` thread wait for
    `run` or `run_waiting`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._owned = False
        self._helper: threading.Thread | None = None
        self._closed = False
        self._stopped = False
        self._for_main: deque[Job] = deque()
        self._busy_in = 0
        self._turn = threading.Lock()
        self._gate = threading.Event()
        self._gate.set()
        self.free_since_ns = 0
        """The time when the last method ended."""

    @property
    def owned(self) -> bool:
        """True if jobs run, or will run, on the thread that calls `run`."""
        return self._owned

    def hold(self) -> None:
        """Make jobs wait for `run` instead of starting a thread for them."""
        with self._lock:
            self._owned = True

    def submit(self, job: Job, *, main: bool = False) -> None:
        if main:
            with self._lock:
                if not self._owned:
                    self._for_main.append(job)
                    return
        self._jobs.put(job)
        if not self._owned and self._helper is None:
            self._start_helper()

    def run(self, idle: Callable[[], Any] | None = None) -> None:
        """Run jobs on the calling thread until `stop`. ``idle`` is called before each wait for a job."""
        with self._lock:
            self._owned = True
            waiting, self._for_main = self._for_main, deque()
        self._stop_helper()
        for job in waiting:
            self._jobs.put(job)
        try:
            self._consume(idle)
        finally:
            with self._lock:
                self._owned = False

    def run_waiting(self) -> None:
        """Run the jobs that wait for the main thread, if the calling thread is `busy`; no other job runs meanwhile."""
        if not self._for_main or self._busy_in != threading.get_ident():
            return
        self._gate.clear()  # the second thread begins no new job
        try:
            if self._turn.acquire(timeout=HAND_OVER_S):
                try:
                    self._run_for_main()
                finally:
                    self._turn.release()
        finally:
            self._gate.set()

    def _run_for_main(self) -> None:
        for _ in range(len(self._for_main)):  # jobs that are submitted meanwhile run at the next boundary
            if not self._stopped:
                self._for_main.popleft()()

    def stop(self, *, now: bool = False) -> None:
        """Make `run` return: after the jobs that are queued already, or (``now``) after the job that runs."""
        self._stopped = self._stopped or now
        self._jobs.put(None)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Run jobs on a second thread within the block, in which user code occupies the thread that calls `run`."""
        with self._lock:
            self._owned = False
            self._busy_in = threading.get_ident()
        self._start_helper()
        try:
            yield
        finally:
            self._stop_helper()
            with self._lock:
                self._owned = True
                self._busy_in = 0
        self._run_for_main()

    def close(self, timeout_s: float = 2.0) -> None:
        """Stop. A method that still runs on the executor's own thread after ``timeout_s`` is abandoned and logged."""
        self._closed = self._stopped = True
        self._stop_helper(timeout_s)

    def _consume(self, idle: Callable[[], Any] | None = None) -> None:
        while True:
            if idle is not None:
                idle()
            job = self._jobs.get()
            if job is None or self._stopped:
                return
            job()

    def _help(self) -> None:
        """Run jobs on the second thread."""
        while (job := self._jobs.get()) is not None and not self._stopped:
            self._gate.wait()
            with self._turn:
                job()

    def _start_helper(self) -> None:
        with self._lock:
            if self._helper is not None or self._owned or self._closed:
                return
            self._helper = threading.Thread(target=self._help, name=f"rlmesh-calls-{self._name}", daemon=True)
            self._helper.start()

    def _stop_helper(self, timeout_s: float | None = None) -> None:
        with self._lock:
            helper, self._helper = self._helper, None
        if helper is None:
            return
        self._jobs.put(None)
        if helper is not threading.current_thread():
            helper.join(timeout_s)
            if helper.is_alive():
                logger.warning("a method of %s still runs after %s s; it is abandoned", self._name, timeout_s)


_pools: WeakSet[ThreadPool] = WeakSet()
forked.reset_in_children(_pools.clear)


@atexit.register
def _join_pools() -> None:
    """Let the interpreter end only after the methods that run."""
    for pool in list(_pools):
        pool.close()
        pool.join()


class ThreadPool:
    """Runs jobs on up to ``size`` threads, which start when they are needed and stay until `close`.

    A job costs two steps of a queue; with a future, as in `concurrent.futures.ThreadPoolExecutor`, it would cost as
    much as the rest of a call.
    """

    def __init__(self, size: int, name: str) -> None:
        self._size, self._name = size, name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = allocate_lock()
        self._threads: list[threading.Thread] = []
        self.idle = 0
        """The number of threads that have no job and for which none is queued."""
        self._closed = False
        _pools.add(self)

    def submit(self, job: Job) -> None:
        with self._lock:
            if self._closed:
                return
            self._jobs.put(job)
            if self.idle:
                self.idle -= 1
            elif len(self._threads) < self._size:
                name = f"{self._name}_{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
                self._threads[-1].start()

    def close(self) -> None:
        """Drop the jobs that have not begun; threads end after the job that they run."""
        with self._lock:
            self._closed = True
            while not self._jobs.empty():
                self._jobs.get_nowait()
            for _ in self._threads:
                self._jobs.put(None)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException:  # a thread that ends would be missing from then on
                logger.exception("%s failed", self._name)
            del job  # Else an idle thread keeps the last call's arguments.
            with self._lock:
                self.idle += 1
