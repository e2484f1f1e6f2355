"""Clocks without standstills and without jumps."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from rlmesh.runtime.calling.pending import DeadlineEntry, Deadlines
from rlmesh.runtime.process import clock
from tests.own_time import HANG_S

STILL_S = clock.STILL_S + 0.5


@pytest.fixture
def own_clock() -> Iterator[None]:
    """What a test does to this process's clock is undone."""
    before = clock.now, clock._lost_s
    yield
    clock.now, clock._lost_s = before


@pytest.mark.case("b20")
def test_running_time_leaves_standstills_out() -> None:
    source = [100.0]
    told: list[tuple[float, float]] = []
    running = clock.RunningTime(
        lambda: source[0], still_s=2.0, on_suspended=lambda at, seconds: told.append((at, seconds))
    )
    for step in (0.5, 1.9, 30.0, 0.5, 3600.0, 0.1):
        source[0] += step
        running()
    assert running() == pytest.approx(100.0 + 0.5 + 1.9 + 0.5 + 0.1)
    assert [each for pair in told for each in pair] == pytest.approx([102.4, 30.0, 102.9, 3600.0])
    assert clock.RunningTime(lambda: source[0], lost_s=3630.0)() == running(), "the next one goes on from there"


def stand_still() -> None:
    """No loop of this process turns meanwhile."""
    time.sleep(STILL_S)


class Entry:
    def __init__(self, seconds: float) -> None:
        self.deadline, self.call_id = clock.now() + seconds, 1
        self.bucket: dict[int, DeadlineEntry] | None = None


@pytest.mark.case("b20")
@pytest.mark.parametrize("seconds", [0.5, 20.0])
def test_a_deadline_does_not_pass_in_a_standstill(own_clock: None, seconds: float) -> None:
    expired: list[float] = []

    async def main() -> float:
        passed = asyncio.Event()

        def note(entry: object) -> None:
            expired.append(clock.now())
            passed.set()

        deadlines = Deadlines(asyncio.get_running_loop(), threading.Lock(), note)
        await asyncio.sleep(0.2)
        began, entry = clock.now(), Entry(seconds)
        deadlines.add(entry, seconds)
        await asyncio.sleep(0.1)
        stand_still()
        await asyncio.sleep(0.15)
        assert not expired, "it has had a fraction of its time"
        if seconds < 1.0:
            await asyncio.wait_for(passed.wait(), 10.0)
            assert expired[0] - began >= seconds
        deadlines.close()
        return clock.now() - began

    real = time.monotonic()
    ran = asyncio.run(main())
    assert time.monotonic() - real - ran > clock.STILL_S, "the standstill is left out"


@pytest.mark.case("b20")
def test_a_timer_does_not_fire_for_a_standstill(own_clock: None) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        deadlines = Deadlines(loop, threading.Lock(), lambda entry: None)
        fired = asyncio.Event()
        timer = clock.Timer(loop, 0.9, fired.set)
        other = clock.Timer(loop, 0.05, fired.set)
        other.cancel()
        await asyncio.sleep(0.1)
        stand_still()
        await asyncio.sleep(0.1)
        assert not fired.is_set()
        await asyncio.wait_for(fired.wait(), 10.0)
        timer.cancel()
        deadlines.close()

    asyncio.run(main())


@pytest.mark.case("a05")
def test_the_time_of_a_job_is_the_same_in_all_of_its_processes_and_never_jumps() -> None:
    env = dict(os.environ)
    clock.share_epoch(env)
    # A process below a driver whose wall clock was set an hour back meanwhile.
    code = (
        "import time; real = time.time; time.time = lambda: real() - 3600\n"
        "from rlmesh.runtime.process import clock; print(repr(clock.epoch()))"
    )
    before = clock.epoch()
    seen = float(subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True).stdout)
    assert before < seen < clock.epoch()
    assert before < clock.epoch_of(clock.epoch_here()) <= clock.epoch()


@pytest.mark.case("a05")
def test_the_time_of_another_start_of_the_machine_is_not_used() -> None:
    boot, _, offset = clock.epoch_here().partition(":")
    assert clock._inherited(f"{boot}:{offset}") == float(offset)
    for text in (f"another-boot:{offset}", "", ":", f"{boot}:x", offset):
        assert clock._inherited(text) is None


@pytest.mark.case("b20")
def test_waits_of_tasks_leave_standstills_out(own_clock: None) -> None:
    async def main() -> float:
        deadlines = Deadlines(asyncio.get_running_loop(), threading.Lock(), lambda entry: None)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            async with clock.timeout(1.2):
                await asyncio.sleep(0.1)
                stand_still()
                await asyncio.sleep(60.0)
        deadlines.close()
        return time.monotonic() - began

    assert asyncio.run(main()) > 1.2 + clock.STILL_S


@pytest.mark.case("b20")
def test_waits_of_threads_leave_standstills_out() -> None:
    code = (
        "import threading, time\n"
        "from rlmesh.runtime.process import clock\n"
        "condition = threading.Condition()\n"
        "print('begins', flush=True)\n"
        "began = time.monotonic()\n"
        "with condition:\n"
        "    came = clock.wait_for(condition, lambda: False, 1.5)\n"
        "print(came, time.monotonic() - began)\n"
    )
    deadline, took_s = time.monotonic() + HANG_S, 0.0
    while took_s < 3.0:  # on a busy machine it may be stopped before it waits, or afterwards
        assert time.monotonic() < deadline
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as waiting:
            assert waiting.stdout is not None and waiting.stdout.readline() == "begins\n"
            time.sleep(0.2)
            waiting.send_signal(signal.SIGSTOP)
            time.sleep(3.0)
            waiting.send_signal(signal.SIGCONT)
            came, took = waiting.stdout.readline().split()
            took_s = float(took)
            assert came == "False"
    assert took_s > 3.0 + 1.5 - clock.STILL_S


@pytest.fixture
def left_behind(own_clock: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A runtime whose loop no longer runs and that nobody closed; its last beat is an hour old."""
    loop = asyncio.new_event_loop()
    clock.begin(loop)
    monkeypatch.setattr(clock, "_beat_at", time.monotonic() - 3600)
    yield
    clock.end(loop)
    loop.close()


def test_waits_end_in_time_although_a_runtime_was_left_behind(left_behind: None) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with clock.timeout(0.05):
                await asyncio.sleep(2 * HANG_S)

    began = time.monotonic()
    asyncio.run(main())
    condition = threading.Condition()
    with condition:
        assert not clock.wait_for(condition, lambda: False, 0.05)
    assert time.monotonic() - began < HANG_S


def test_a_deadline_passes_in_time_although_a_runtime_was_left_behind(left_behind: None) -> None:
    async def main() -> None:
        passed = asyncio.Event()
        deadlines = Deadlines(asyncio.get_running_loop(), threading.Lock(), lambda entry: passed.set())
        deadlines.add(Entry(0.5), 0.5)
        await asyncio.wait_for(passed.wait(), HANG_S)
        deadlines.close()

    asyncio.run(main())


def test_without_a_standstill_waits_end_in_time() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with clock.timeout(0.05):
                await asyncio.sleep(60.0)
        async with clock.timeout(60.0):
            await asyncio.sleep(0)

    asyncio.run(main())
    condition = threading.Condition()
    with condition:
        assert clock.wait_for(condition, lambda: True, 60.0)
        assert not clock.wait_for(condition, lambda: False, 0.01)
