from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from rlmesh.rl.rewards.process_pool import ScoringPool
from rlmesh.rl.types import Abstain, Failed, Outcome, Score
from tests.own_time import HANG_S, OwnTime


def scorer(kind: str) -> float | None:
    if kind == "loop":
        while True:
            pass
    if kind == "native":
        return float(10 ** (10**8))
    if kind == "memory":
        return float(len(bytearray(4 * 2**30)))
    if kind == "dies":
        os._exit(3)
    if kind == "raises":
        raise ValueError("odd answer")
    return None if kind == "abstains" else len(kind)


@pytest.fixture
def pool() -> Iterator[ScoringPool]:
    with ScoringPool({"f": scorer}, workers=2, timeout_s=2, memory_bytes=512 * 2**20) as made:
        yield made


def workers() -> list[int]:
    """The processes of pools."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "spawn_main" in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child.pid)
    return found


def reason(outcome: Outcome) -> str:
    assert isinstance(outcome, Failed)
    return outcome.reason


def test_outcomes_are_kept_apart(pool: ScoringPool) -> None:
    outcomes = [pool.submit("f", kind=kind).result(20) for kind in ("ok", "abstains", "raises", "dies", "ok")]
    assert outcomes[0] == outcomes[4] == Score(2.0) and outcomes[1] == Abstain()
    assert reason(outcomes[2]) == "ValueError: odd answer"
    assert reason(outcomes[3]) == "the scorer's process ended with exit code 3"
    with pytest.raises(KeyError, match="no reward function is named 'g': there are f"):
        pool.submit("g")


@pytest.mark.case("O25")
def test_a_scorer_that_hangs_or_eats_memory_fails_alone(pool: ScoringPool, own_time: OwnTime) -> None:
    kinds = ["ok", "ok", "ok", "loop", "ok", "native", "memory", "ok"]
    longest_block = [0.0]
    found: list[Outcome] = []

    async def score() -> None:
        running = [asyncio.wrap_future(pool.submit("f", kind=kind)) for kind in kinds]
        watching = asyncio.create_task(watch())
        found.extend(await asyncio.gather(*running))
        watching.cancel()

    async def watch() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            longest_block[0] = max(longest_block[0], time.monotonic() - began - 0.01)

    pool.submit("f", kind="ok").result(20)  # the processes are up
    began = time.monotonic()
    thread = threading.Thread(target=lambda: asyncio.run(score()))
    thread.start()
    thread.join(HANG_S)
    assert not thread.is_alive() and own_time.since(began) < 10
    failed = {place: reason(outcome) for place, outcome in enumerate(found) if not isinstance(outcome, Score)}
    assert sorted(failed) == [3, 5, 6]
    assert failed[3].startswith("timeout") and failed[5].startswith("timeout") and failed[6].startswith("memory")
    assert all(outcome == Score(2.0) for place, outcome in enumerate(found) if place not in failed)
    assert own_time.of(longest_block[0]) < 0.1
    # Both processes are there again, and as fast as before.
    while len(workers()) < 2:
        assert time.monotonic() - began < HANG_S
        time.sleep(0.05)
    began = time.monotonic()
    again = [pool.submit("f", kind="ok") for _ in range(20)]
    assert [future.result(20) for future in again] == [Score(2.0)] * 20
    assert own_time.since(began) < 3 and len(workers()) == 2


def test_functions_that_cannot_be_sent_are_named() -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match="the reward function 'locked' cannot be sent"):
        ScoringPool({"locked": lambda kind: float(lock.locked())})
    with pytest.raises(ValueError, match="workers must be"):
        ScoringPool({"f": scorer}, workers=0)


def test_closures_and_functions_that_do_not_load() -> None:
    factor = 3

    class Unloadable:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return __import__, ("no_such_module",)

    unloadable = Unloadable()
    with ScoringPool({"f": lambda kind: factor * len(kind)}, workers=1) as pool:
        assert pool.submit("f", kind="ab").result(20) == Score(6.0)
    with ScoringPool({"f": lambda kind: unloadable}, workers=1) as pool:
        assert "no_such_module" in reason(pool.submit("f", kind="ab").result(20))


def test_a_closed_pool_fails_what_still_runs() -> None:
    pool = ScoringPool({"f": scorer}, workers=1, timeout_s=60)
    pool.submit("f", kind="ok").result(20)
    running = pool.submit("f", kind="loop")
    pool.close()
    pool.close()
    assert reason(running.result(5)) == "the pool was closed"
