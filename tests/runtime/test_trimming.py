"""Shared memory that nobody uses goes back to the system while the runtime lives on."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from rlmesh.runtime.connections import shm_transfer
from rlmesh.runtime.connections.shm_transfer import EVERY_S, IDLE_S, PoolTrimmer
from rlmesh.runtime.process.loops import Posts
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime
from rlmesh.testing.clock import VirtualLoop


class _Held:
    """Memory that is idle or not, by a flag; says on which threads it was given back."""

    def __init__(self) -> None:
        self.nbytes, self.idle, self.looks = 1 << 20, False, 0
        self.threads: list[str] = []

    def is_empty(self) -> bool:
        return self.nbytes == 0

    def has_idle(self, idle_s: float) -> bool:
        assert idle_s == IDLE_S
        self.looks += 1
        return self.idle and self.nbytes > 0

    def trim(self, idle_s: float) -> int:
        self.threads.append(threading.current_thread().name)
        given, self.nbytes = self.nbytes, 0
        return given


def test_the_timer_runs_while_there_is_memory_and_gives_idle_memory_back() -> None:
    held = _Held()
    with VirtualLoop() as loop:
        trimmer = PoolTrimmer(held, loop, Posts(loop).put)
        for _ in range(3):
            trimmer.start()
        loop.advance(5 * EVERY_S + 1)
        assert held.looks == 5 and held.threads == [], "in use: looked at, nothing else"
        held.idle = True
        loop.advance(EVERY_S)
        while "rlmesh-trim" in [thread.name for thread in threading.enumerate()]:
            loop.advance(0.001)  # The thread lives in real time.
        assert held.threads == ["rlmesh-trim"]
        loop.advance(3 * EVERY_S)
        assert held.looks == 6, "nobody looks without memory"
        held.nbytes, held.idle = 1, False
        trimmer.start()
        loop.advance(EVERY_S + 1)
        assert held.looks == 7
        trimmer.close()
        held.idle = True
        loop.advance(2 * EVERY_S)
        assert held.looks == 7 and len(held.threads) == 1, "nothing happens after the end"


def maps(name: str) -> bool:
    """True if this process maps a file whose name contains ``name``."""
    return name in Path("/proc/self/maps").read_text()


class _Taker:
    @rpc
    def take(self, array: np.ndarray) -> int:
        return int(array[-1])


def test_a_job_that_lives_on_gives_its_segments_back(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, until: object
) -> None:
    """Between two processes' worth of runtimes: the sender's segment goes, the receiver's mapping of it too."""
    monkeypatch.setattr(shm_transfer, "EVERY_S", 0.05)
    with (
        Runtime.start(name="S:0", job_id="trims") as server,
        Runtime.start(name="client", key=server.key, bind=False, job_id="trims") as client,
    ):
        assert server.endpoint is not None
        server.serve("S:0", _Taker())
        member = client.peer("S:0", server.endpoint)

        def segments() -> list[str]:
            return [path.name for path in Path("/dev/shm").glob("rlmesh-trims-*")]

        for _ in range(2):
            monkeypatch.setattr(shm_transfer, "IDLE_S", 60.0)
            data = np.arange(1 << 20)
            assert member.call("take", data).result() == (1 << 20) - 1
            assert len(segments()) == 1
            monkeypatch.setattr(shm_transfer, "IDLE_S", 0.1)
            assert callable(until)
            until(lambda: segments() == [] and not maps("rlmesh-trims"))


def test_who_does_not_know_the_jobs_name_gets_bytes() -> None:
    """A tool that has only the key cannot open the job's segments: large values travel in the packets."""
    with (
        Runtime.start(name="S:0", job_id="named") as server,
        Runtime.start(name="tool", key=server.key, bind=False) as tool,
    ):
        assert server.endpoint is not None
        server.serve("S:0", _Giver())
        array = tool.peer("S:0", server.endpoint).call("give", 1 << 20).result()
        assert array.shape == (1 << 20,) and not array.any()
        assert tool._shm.exchange.attachments.is_empty


class _Giver:
    @rpc
    def give(self, items: int) -> np.ndarray:
        return np.zeros(items)
