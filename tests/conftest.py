"""Every test runs under the leak guard: what it leaves behind fails it."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import uvloop
import zmq
from hypothesis import settings

from tests.leaks import LASTING, MARKER, LeakCheck, own_shared_memory, zmq_threads
from tests.own_time import HANG_S, OwnTime, Sampler

# How long one example takes says more about the machine than about the code.
settings.register_profile("rlmesh", deadline=None)
settings.load_profile("rlmesh")

COLLECTOR_THREADS = 2


def open_what_lasts() -> None:
    """What libraries open once per process and keep: libuv's signal pipe, pyzmq's collector of sent frames."""
    uvloop.new_event_loop().close()
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket, context.socket(zmq.PULL) as other:
        other.bind("inproc://open-what-lasts")
        socket.connect("inproc://open-what-lasts")
        socket.send(bytes(zmq.COPY_THRESHOLD), copy=False)
        other.recv()
    # The collector's threads give themselves their names, by which the guard knows them: late on a busy machine.
    deadline = time.monotonic() + HANG_S
    while len(zmq_threads()) < COLLECTOR_THREADS and time.monotonic() < deadline:
        time.sleep(0.005)


# The imports and the tests themselves are no garbage, and the collector would look at all of them 28 times: a third of
# the time in which the tests are collected.
gc.disable()


def pytest_collection_finish() -> None:
    keep_objects()
    gc.enable()
    share_the_cores()


def share_the_cores() -> None:
    """Give torch as many threads as this process has cores beside the others that run tests.

    Threads without a core of their own wait for each other at each kernel: tests of small networks take two to nine
    times as long. Processes that a test starts are not changed.
    """
    torch = sys.modules.get("torch")  # imported by the modules of the tests, if by any
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if torch is not None and workers > 1:
        torch.set_num_threads(max(1, min(torch.get_num_threads(), len(os.sched_getaffinity(0)) // workers)))


def keep_objects() -> None:
    """Leave what lives now out of garbage collections: over all that was imported, each takes 0.2 to 0.5 s."""
    gc.collect()
    gc.freeze()
    unfrozen.clear()


# To ask `gc.get_freeze_count()` after each test would take as long as all objects take to be counted.
unfrozen = threading.Event()
unfreeze = gc.unfreeze


def note_and_unfreeze() -> None:
    unfrozen.set()
    unfreeze()


gc.unfreeze = note_and_unfreeze


@pytest.fixture(scope="module", autouse=True)
def what_modules_import() -> None:
    """What the tests of the module before imported while they ran: transformers' models, torch's compiler."""
    keep_objects()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("leak_grace_s", "Seconds in which what a test started must be gone.", default="2")


@pytest.fixture(scope="session")
def leak_check(pytestconfig: pytest.Config) -> Iterator[LeakCheck]:
    """The session's marker in the environment, and a runtime directory of its own for socket directories."""
    own_segments = own_shared_memory()  # First: threads that libraries start stay where they are.
    open_what_lasts()
    session = "/".join(filter(None, (os.environ.get(MARKER), uuid.uuid4().hex)))
    # Short, since the path of a socket holds at most 107 bytes.
    runtime_dir = Path(tempfile.mkdtemp(prefix="rt-", dir="/tmp"))
    state_dir = Path(tempfile.mkdtemp(prefix="rt-state-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARKER, session)
        patch.setenv("XDG_RUNTIME_DIR", str(runtime_dir))
        patch.setenv("XDG_STATE_HOME", str(state_dir))
        # Jobs of this session are found, and no others that this user runs on the machine.
        patch.setattr("rlmesh.run_directory.discovery.socket_bases", lambda: (str(runtime_dir),))
        grace_s = float(pytestconfig.getini("leak_grace_s"))
        yield LeakCheck(session, runtime_dir, grace_s, own_segments=own_segments)
    shutil.rmtree(runtime_dir, ignore_errors=True)
    shutil.rmtree(state_dir, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def session_leak_guard(leak_check: LeakCheck) -> Iterator[None]:
    """Fixtures that live longer than a test must leave no process, socket or segment either."""
    before = leak_check.snapshot()
    yield
    leaks = leak_check.since(before, LASTING)
    leak_check.kill(leaks)
    if leaks:
        pytest.fail(f"the session left something behind, {leak_check.report(leaks)}", pytrace=False)


@pytest.fixture(autouse=True)
def leak_guard(request: pytest.FixtureRequest, leak_check: LeakCheck, session_leak_guard: None) -> Iterator[None]:
    """Fails a test that leaves threads, processes, descriptors, segments, socket directories or tasks."""
    before = leak_check.snapshot()
    yield
    if unfrozen.is_set():  # A run in this process unfreezes everything at its end.
        keep_objects()
    leaks = leak_check.since(before)
    leak_check.kill(leaks)
    if leaks:
        pytest.fail(f"{request.node.nodeid} left something behind, {leak_check.report(leaks)}", pytrace=False)


@pytest.fixture(scope="session")
def sampler(tmp_path_factory: pytest.TempPathFactory, session_leak_guard: None) -> Iterator[Sampler]:
    sampler = Sampler(tmp_path_factory.mktemp("samples"), f"{MARKER}={os.environ[MARKER]}")
    yield sampler
    sampler.close()


@pytest.fixture
def own_time(sampler: Sampler) -> Iterator[OwnTime]:
    """A clock for bounds on durations: it leaves out the time in which the processes under test waited for a core."""
    sampler.start()
    yield OwnTime(sampler)
    sampler.stop()


@pytest_asyncio.fixture
async def task_guard(leak_check: LeakCheck) -> AsyncIterator[None]:
    """Fails an async test that leaves tasks on its loop; given to each of them below."""
    before = asyncio.all_tasks()
    yield
    deadline = asyncio.get_running_loop().time() + leak_check.grace_s
    while left := asyncio.all_tasks() - before - {asyncio.current_task()}:
        if asyncio.get_running_loop().time() >= deadline:
            lines = "\n".join(f"  {task!r}" for task in left)
            pytest.fail(f"tasks run after {leak_check.grace_s:g} s of grace:\n{lines}", pytrace=False)
        await asyncio.sleep(0.005)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and pytest_asyncio.is_async_test(item):
            # Before the test's own fixtures, so that what they started has ended when it looks, and after
            # leak_guard, which looks when the loop is closed.
            item.fixturenames.insert(item.fixturenames.index("leak_guard") + 1, "task_guard")
