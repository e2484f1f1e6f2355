"""`ThreadPool`: threads start when they are needed, are used again, and end with the pool."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from rlmesh.runtime.serving.executors import ThreadPool
from tests.agent.processes import wait_until
from tests.own_time import HANG_S


@pytest.fixture
def pool() -> Iterator[ThreadPool]:
    made = ThreadPool(3, "pool")
    yield made
    made.close()
    made.join()


def test_as_many_jobs_run_at_once_as_the_pool_has_threads(pool: ThreadPool) -> None:
    together, ended = threading.Barrier(3), threading.Semaphore(0)

    def meet() -> None:
        together.wait(HANG_S)
        ended.release()

    for _ in range(9):
        pool.submit(meet)
    for _ in range(9):
        assert ended.acquire(timeout=HANG_S)


def test_an_idle_thread_takes_the_next_job(pool: ThreadPool) -> None:
    idents = set[int]()
    for _ in range(20):
        done = threading.Event()

        def job(done: threading.Event = done) -> None:
            idents.add(threading.get_ident())
            done.set()

        pool.submit(job)
        assert done.wait(HANG_S)
        wait_until(lambda: pool.idle == 1)  # a moment after its job has ended
    assert len(idents) == 1


def test_a_job_that_raises_ends_no_thread(pool: ThreadPool, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(5):
        pool.submit(lambda: 1 // 0)  # type: ignore[arg-type]
    done = threading.Event()
    pool.submit(done.set)
    assert done.wait(HANG_S)
    assert "ZeroDivisionError" in caplog.text


def test_jobs_that_have_not_begun_are_dropped_at_the_end() -> None:
    pool, begun, go, ran = ThreadPool(1, "pool"), threading.Event(), threading.Event(), list[int]()

    def hold() -> None:
        begun.set()
        go.wait(HANG_S)
        ran.append(0)

    pool.submit(hold)
    assert begun.wait(HANG_S)
    pool.submit(lambda: ran.append(1))
    pool.close()
    pool.submit(lambda: ran.append(2))
    go.set()
    pool.join()
    assert ran == [0], "the job that ran was finished"


def test_the_interpreter_ends_after_the_jobs_that_run() -> None:
    program = (
        "import threading, time\n"
        "from rlmesh.runtime.serving.executors import ThreadPool\n"
        "begun = threading.Event()\n"
        "ThreadPool(1, 'pool').submit(lambda: (begun.set(), time.sleep(0.5), print('ended', flush=True)))\n"
        "begun.wait()\n"
    )
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert made.stdout == "ended\n", made.stderr
