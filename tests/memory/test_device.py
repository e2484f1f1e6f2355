"""Tensors on a device: who may free what, and when. The device is `fake_device`'s; the real one is in tests/gpu."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmesh.errors import DeviceUnreachable, MalformedFrame
from rlmesh.memory import device
from rlmesh.memory.attach import writable
from rlmesh.memory.device import Closer
from rlmesh.memory.exchange import MemoryExchange
from rlmesh.memory.layout import Descriptor
from rlmesh.wire import codec
from rlmesh.wire.envelope import Frames
from tests.memory import fake_device
from tests.memory.fake_device import FakeBackend, on_device, values_of
from tests.own_time import HANG_S

VALUES = torch.arange(100_000, dtype=torch.float32)


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[FakeBackend]:
    backend = fake_device.install(tmp_path)
    yield backend
    device.register(fake_device.KIND, None)
    assert backend.faults == []


class Later:
    """The receiver's thread that closes, run by the test."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def __call__(self, work: Callable[[], None]) -> None:
        self.work.append(work)

    def run(self) -> None:
        while self.work:
            self.work.pop()()


class Forgetful(dict[int, Any]):
    """In the place of the tickets that this process made: it knows none of them."""

    def __setitem__(self, number: int, exported: Any) -> None: ...


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Later:
    """This process receives as if another had sent, and closes when the test says so."""
    later = Later()
    monkeypatch.setattr(device, "_exported", Forgetful())
    monkeypatch.setattr(device, "_closer", Closer(later))
    monkeypatch.setattr(device, "_IDLE_S", 0.0)
    return later


def sent(exchange: MemoryExchange, value: Any, *receivers: Hashable) -> tuple[Frames, list[Descriptor]]:
    """As the runtime sends: captured, lent, the frames dropped."""
    frames = codec.encode(value, lambda buffers, rest: exchange.capture(buffers))
    loans = [exchange.add_ref(frames[1], receiver) for receiver in receivers]
    assert all(loans)
    return frames[:1], [loan for loan in loans if loan is not None]


def received(exchange: MemoryExchange, head: Frames, loan: Descriptor, lender: Hashable) -> Any:
    return codec.decode([*head, *map(writable, exchange.borrow([loan], lender))])


@pytest.fixture
def other(job_id: str) -> Iterator[MemoryExchange]:
    """The receiver's half, which the sender's pool knows nothing of."""
    exchange = MemoryExchange(job_id, "other", wake=lambda: None)
    yield exchange
    exchange.close(0)


def test_the_sender_frees_when_the_receiver_has_closed_and_not_before(
    gpu: FakeBackend, exchange: MemoryExchange, other: MemoryExchange, receiver: Later
) -> None:
    tensor = on_device(VALUES)
    head, (loan,) = sent(exchange, {"x": tensor}, "R")
    tensor.data_of_test = b"changed after the call"  # type: ignore[attr-defined]
    assert len(gpu.allocated()) == 1 and gpu.opened() == []
    value = received(other, head, loan, "S")["x"]
    assert len(gpu.opened()) == 1
    assert other.take_releases() == {}, "not before it has been copied"
    exchange.trim(0)
    assert len(gpu.allocated()) == 1
    receiver.run()
    assert gpu.opened() == [] and len(gpu.allocated()) == 1, "closed; the sender does not know yet"
    assert torch.equal(values_of(value), VALUES)
    exchange.release(other.take_releases()["S"], "R")
    assert gpu.allocated() == []
    assert torch.equal(values_of(value), VALUES), "the receiver's own"


def test_each_receiver_of_a_group_must_have_closed(
    gpu: FakeBackend, exchange: MemoryExchange, other: MemoryExchange, receiver: Later
) -> None:
    head, loans = sent(exchange, on_device(VALUES), "R0", "R1")
    first = received(other, head, loans[0], "S0")
    receiver.run()
    exchange.release(other.take_releases()["S0"], "R0")
    assert len(gpu.allocated()) == 1
    second = received(other, head, loans[1], "S1")
    receiver.run()
    exchange.release(other.take_releases()["S1"], "R1")
    assert gpu.allocated() == []
    assert torch.equal(values_of(first), VALUES) and torch.equal(values_of(second), VALUES)


def test_a_receiver_that_never_looks_or_is_lost_gives_back_too(
    gpu: FakeBackend, exchange: MemoryExchange, other: MemoryExchange, receiver: Later
) -> None:
    _, (loan,) = sent(exchange, on_device(VALUES), "R")
    view = other.borrow([loan], "S")
    del view  # the call was cancelled before its arguments were decoded
    exchange.release(other.take_releases()["S"], "R")
    assert gpu.allocated() == []
    head, (loan,) = sent(exchange, on_device(VALUES), "R")
    value = received(other, head, loan, "S")
    exchange.peer_lost("R")  # its link broke, but it lives and still copies
    assert len(gpu.allocated()) == 1 and exchange.pool.stats().lingering_slots == 1
    receiver.run()
    other.take_releases()
    exchange.trim(0)
    assert gpu.allocated() == [] and torch.equal(values_of(value), VALUES)


def test_what_cannot_be_closed_is_never_freed(
    gpu: FakeBackend, exchange: MemoryExchange, other: MemoryExchange, receiver: Later,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    never: list[object] = []
    monkeypatch.setattr(device, "_never_closed", never)

    def fail(self: fake_device.FakeCopy) -> None:
        self._file.close()
        raise RuntimeError("the driver says no")

    with monkeypatch.context() as patch:
        patch.setattr(fake_device.FakeCopy, "close", fail)
        head, (loan,) = sent(exchange, on_device(VALUES), "R")
        received(other, head, loan, "S")
        receiver.run()
    assert "could not be closed" in caplog.text
    assert other.take_releases() == {} and len(gpu.allocated()) == 1
    never.clear()
    exchange.release(other.take_releases()["S"], "R")
    assert gpu.allocated() == []


def test_without_loans_the_ticket_frees_with_its_frames(gpu: FakeBackend, exchange: MemoryExchange) -> None:
    frames = codec.encode(on_device(VALUES), lambda buffers, rest: exchange.capture(buffers))
    assert codec.size_bytes(frames) == 400_000 + len(frames[0])
    assert torch.equal(values_of(codec.decode([frames[0], bytearray(frames[1])])), VALUES), "in the same process"
    del frames
    exchange.trim(0)
    assert gpu.allocated() == []


@pytest.mark.parametrize("way", ["other node", "no capture", "pool full", "not shareable"])
def test_bytes_go_through_the_host_where_nobody_can_open(
    gpu: FakeBackend, job_id: str, tmp_path: Path, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    if way == "not shareable":
        fake_device.install(tmp_path, shareable=False)
    exchange = MemoryExchange(job_id, "full", wake=lambda: None, limit_bytes=1 if way == "pool full" else None)
    capture = None if way == "no capture" else lambda buffers, rest: exchange.capture(buffers)
    frames = codec.encode((on_device(VALUES), 7), capture)
    if way == "other node":
        frames = device.contents(frames)
    assert len(frames[1]) == 400_000
    tensor, seven = codec.decode([frames[0], bytearray(frames[1])])
    assert torch.equal(values_of(tensor), VALUES) and seven == 7
    assert ("many times slower" in caplog.text) == (way == "not shareable")
    del frames
    exchange.trim(0)
    assert gpu.allocated() == []
    exchange.close(0)


def test_small_empty_and_strange_tensors_arrive_as_they_are(gpu: FakeBackend, exchange: MemoryExchange) -> None:
    def through(tensor: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = codec.decode(codec.encode(tensor, lambda buffers, rest: exchange.capture(buffers)))
        return result

    small = through(on_device(torch.arange(5, dtype=torch.bfloat16)))
    assert values_of(small).tolist() == [0, 1, 2, 3, 4] and small.dtype is torch.bfloat16
    assert through(on_device(torch.zeros(0, 3))).shape == (0, 3)
    assert gpu.allocated() == [], "nothing was exported for them"
    leaf = on_device(VALUES.reshape(100, 1000)).requires_grad_()
    leaf.data_of_test = VALUES.numpy().tobytes()  # type: ignore[attr-defined]
    again = through(leaf)
    assert again.requires_grad and again.shape == (100, 1000)
    exchange.trim(0)


def test_a_device_that_is_hidden_and_bytes_that_are_no_ticket(
    gpu: FakeBackend, exchange: MemoryExchange, other: MemoryExchange, receiver: Later, tmp_path: Path
) -> None:
    head, (loan,) = sent(exchange, on_device(VALUES), "R")
    fake_device.install(tmp_path, "FAKE-1")
    with pytest.raises(DeviceUnreachable, match="FAKE-0, which this process cannot see"):
        received(other, head, loan, "S")
    exchange.release(other.take_releases()["S"], "R")
    assert gpu.allocated() == [], "a receiver that cannot open it gives it back as well"
    for wrong in (b"", b"x" * 4096, b"{}".ljust(4096), b"x" * 100):
        with pytest.raises(MalformedFrame):
            device.receive(wrong, fake_device.KIND, "FAKE-1", 400_000, torch.float32, (100_000,))


def test_the_closing_thread_ends_and_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_IDLE_S", 0.01)
    threads: list[threading.Thread] = []

    def start(work: Callable[[], None]) -> None:
        threads.append(threading.Thread(target=work))
        threads[-1].start()

    class Nothing:
        value = None

        def __init__(self) -> None:
            self.closed = threading.Event()

        def wait(self) -> None: ...

        def close(self) -> None:
            self.closed.set()

    closer = Closer(start)
    for _ in range(3):
        copy = Nothing()
        closer.put(copy, None)
        assert copy.closed.wait(HANG_S)
        threads[-1].join(HANG_S)
        assert not threads[-1].is_alive()
    assert len(threads) == 3
