"""Calls with tensors of the fake device between two processes, one of which may die."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rlmesh.errors import CallError, PeerLost
from rlmesh.memory import device
from rlmesh.runtime.connections.network import NetworkOptions
from rlmesh.runtime.runtime import Runtime
from tests.memory import fake_device
from tests.memory.fake_device import FakeBackend, on_device, values_of
from tests.own_time import HANG_S

KEY = b"device-tests-0123456789abcdef-32"
ROOT = Path(__file__).resolve().parents[2]
VALUES = torch.arange(100_000, dtype=torch.float32) % 100  # whose sum is exact in any order


def until(condition: Callable[[], bool], wait_s: float = HANG_S) -> None:
    deadline = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < deadline, "it did not become so in time"
        time.sleep(0.002)


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[FakeBackend]:
    backend = fake_device.install(tmp_path)
    yield backend
    device.register(fake_device.KIND, None)
    assert backend.faults == []


class Peer:
    def __init__(self, process: subprocess.Popen[str], endpoint: str) -> None:
        self.process, self.endpoint = process, endpoint
        self.faultless = True

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(HANG_S)
        self.faultless = False


@contextmanager
def peer_of(folder: Path, sockets: str, *names: str) -> Iterator[Peer]:
    command = [sys.executable, "-m", "tests.memory.device_peer", KEY.hex(), sockets, str(folder), *names]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        peer = Peer(process, process.stdout.readline().strip())
        try:
            yield peer
            process.stdin.close()
            assert process.wait(HANG_S) == 0 or not peer.faultless
        finally:
            process.kill()


def caller(network: NetworkOptions | None = None) -> Runtime:
    return Runtime.start(name="caller", key=KEY, bind=False, job_id="device", network=network)


@pytest.fixture
def sockets() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="rlm-") as directory:
        yield directory


def test_there_and_back_and_nothing_stays_on_the_device(gpu: FakeBackend, tmp_path: Path, sockets: str) -> None:
    with (
        peer_of(tmp_path, sockets) as peer,
        caller() as runtime,
    ):
        member = runtime.peer("M:0", peer.endpoint)
        for _ in range(3):
            assert member.call("take", on_device(VALUES)).result() == float(VALUES.sum())
        back = member.call("give", 50_000).result()
        until(lambda: bool(back.data_of_test))
        assert torch.equal(values_of(back), torch.arange(50_000, dtype=torch.float32))
        until(lambda: gpu.allocated() == [] and gpu.opened() == [])


def test_a_peer_without_shared_memory_gets_the_bytes(gpu: FakeBackend, tmp_path: Path, sockets: str) -> None:
    with peer_of(tmp_path, sockets) as peer, caller(NetworkOptions(share_memory=False)) as runtime:
        member = runtime.peer("M:0", peer.endpoint)
        assert member.call("take", on_device(VALUES)).result() == float(VALUES.sum())
        assert torch.equal(values_of(member.call("give", 50_000).result()), torch.arange(50_000, dtype=torch.float32))
        assert runtime._shm.exchange.pool.stats().slots == 0
        member.call("pid").result()  # what the member shares is known by now, and not used
        assert member.call("take", on_device(VALUES)).result() == float(VALUES.sum())
        assert not any(peer.channel.make_ref for peer in runtime.outbound.peers.by_endpoint.values())
        until(lambda: gpu.allocated() == [] and gpu.opened() == [])


def test_a_mask_that_hides_the_device_is_told_and_frees(gpu: FakeBackend, tmp_path: Path, sockets: str) -> None:
    with (
        peer_of(tmp_path, sockets, "FAKE-7") as peer,
        caller() as runtime,
    ):
        member = runtime.peer("M:0", peer.endpoint)
        member.call("pid").result()  # from now on each knows that the other shares its memory
        with pytest.raises(CallError, match=r"M:0.take\(\) cannot be decoded.*FAKE-0, which this process cannot see"):
            member.call("take", on_device(VALUES)).result()
        until(lambda: gpu.allocated() == [])


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("as soon as it was sent", marks=pytest.mark.slow), "after it opened",
        pytest.param("while it answers", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_receiver_is_killed(gpu: FakeBackend, tmp_path: Path, sockets: str, moment: str) -> None:
    """The sender frees its copy when the receiver is really gone."""
    with (
        peer_of(tmp_path, sockets) as peer,
        caller() as runtime,
    ):
        member = runtime.peer("M:0", peer.endpoint)
        member.call("pid").result()
        calls = [member.call("take", on_device(VALUES)) for _ in range(5)]
        if moment == "after it opened":
            until(lambda: bool(gpu.opened()) or calls[-1].done())
        elif moment == "while it answers":
            calls[0].result()
        peer.kill()
        for call in calls:
            assert call.exception() is None or isinstance(call.exception(), PeerLost)
        pool = runtime._shm.exchange.pool
        until(lambda: (pool.trim(1e9), gpu.allocated() == [])[1])


def test_a_sender_is_killed(gpu: FakeBackend, tmp_path: Path, sockets: str) -> None:
    """What has arrived is the receiver's own."""
    with (
        peer_of(tmp_path, sockets) as peer,
        caller() as runtime,
    ):
        member = runtime.peer("M:0", peer.endpoint)
        back = member.call("give", 50_000).result()
        peer.kill()
        until(lambda: bool(back.data_of_test))
        assert torch.equal(values_of(back), torch.arange(50_000, dtype=torch.float32))
        until(lambda: gpu.opened() == [])
    for name in Path("/dev/shm").glob(f"rlmesh-device-*-{peer.process.pid}-*"):
        name.unlink()  # which the member's agent would do
