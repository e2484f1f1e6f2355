"""numpy arrays and torch tensors in shared memory: made from views, captured from what is not plain bytes."""

from __future__ import annotations

import pickle
import random
from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest
import torch

from rlmesh.memory.attach import writable
from rlmesh.memory.exchange import MemoryExchange
from rlmesh.memory.layout import Descriptor, SlotRelease
from tests.memory.borrower import Borrower, borrower, digest


def raw(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def receive(exchange: MemoryExchange, source: Any) -> memoryview:
    """Through shared memory and back into the same process."""
    frame = exchange.capture([source])[0]
    descriptor = exchange.add_ref(frame, "self")
    assert descriptor is not None
    return exchange.borrow([descriptor], "self")[0]


def settle(exchange: MemoryExchange) -> dict[Hashable, list[SlotRelease]]:
    ended = exchange.take_releases()
    exchange.release(ended.get("self", []), "self")
    return ended


def test_a_tensor_is_a_view_that_may_be_written_to(exchange: MemoryExchange) -> None:
    source = torch.arange(100_000, dtype=torch.float32)
    tensor = torch.frombuffer(writable(receive(exchange, raw(source))), dtype=torch.uint8).view(torch.float32)
    assert torch.equal(tensor, source)
    tensor.mul_(2)
    part = tensor[5:10]
    del tensor
    assert len(settle(exchange)["self"]) == 1, "what comes home is given back at once"
    assert part.tolist() == [10, 12, 14, 16, 18] and exchange.pool.stats().slots == 1
    del part
    assert settle(exchange) == {}
    assert exchange.pool.stats().slots == 0
    again = receive(exchange, raw(source))
    assert again == raw(source)


def test_a_bfloat16_tensor_arrives_bit_for_bit(exchange: MemoryExchange) -> None:
    source = torch.randn(300, 200).to(torch.bfloat16)
    view = receive(exchange, raw(source))
    tensor = torch.frombuffer(writable(view), dtype=torch.uint8).view(torch.bfloat16).reshape(300, 200)
    assert torch.equal(tensor, source)


def test_a_numpy_array_is_read_only_and_survives_being_made_a_tensor(exchange: MemoryExchange) -> None:
    source = np.arange(50_000, dtype=np.int64)
    array = np.frombuffer(receive(exchange, source.data), dtype=np.int64)
    assert not array.flags.writeable
    with pytest.warns(UserWarning, match="not writable"):
        tensor = torch.from_numpy(array)
    tensor.zero_()  # torch writes to read-only arrays; nobody else sees it, nor the next one here
    assert array[5] == 0
    del array, tensor
    settle(exchange)
    assert np.frombuffer(receive(exchange, source.data), dtype=np.int64)[5] == 5


def test_pickled_arrays_take_views_as_their_buffers(exchange: MemoryExchange) -> None:
    value = {"obs": np.random.default_rng(0).normal(size=(100, 300)), "fortran": np.asfortranarray(np.eye(200))}
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    frames = exchange.capture([buffer.raw() for buffer in buffers])
    loans = [exchange.add_ref(frame, "self") for frame in frames]
    views = exchange.borrow([loan for loan in loans if loan is not None], "self")
    del frames
    loaded = pickle.loads(data, buffers=views)
    del views
    settle(exchange)
    assert all(np.array_equal(loaded[key], value[key]) for key in value)
    assert exchange.pool.stats().slots == 1, "two arrays below a MiB share a slot"
    del loaded
    settle(exchange)
    assert exchange.pool.stats().slots == 0


def test_a_filler_spares_the_copy_of_what_is_not_contiguous(exchange: MemoryExchange) -> None:
    source = torch.arange(200_000, dtype=torch.int32).reshape(400, 500).t()

    class Transposed:
        nbytes = source.numel() * source.element_size()

        def fill(self, into: memoryview) -> None:
            torch.frombuffer(into, dtype=torch.int32).view(source.shape).copy_(source)

    view = receive(exchange, Transposed())
    assert torch.equal(torch.frombuffer(writable(view), dtype=torch.int32).view(source.shape), source)
    assert bytes(exchange.capture([Transposed()] * 2)[1]) == bytes(view)


def test_non_contiguous_buffers_arrive_in_order_of_their_items(exchange: MemoryExchange) -> None:
    source = np.arange(200_000, dtype=np.int32).reshape(400, 500)
    for array in (source.T, source[::2, ::3], source[::-1]):
        assert receive(exchange, array.data) == memoryview(array.tobytes())


def test_small_empty_and_read_only_buffers(exchange: MemoryExchange) -> None:
    read_only = np.arange(100_000)
    read_only.flags.writeable = False
    frames = exchange.capture([b"", np.zeros((0, 5)).reshape(-1).data, b"x" * 100, read_only.data])
    assert [bytes(frame[:3]) for frame in frames[:3]] == [b"", b"", b"xxx"]
    assert [exchange.add_ref(frame, "self") is None for frame in frames] == [True, True, True, False]
    assert frames[3] == read_only.data.cast("B")


def test_what_is_captured_does_not_change_any_more(exchange: MemoryExchange) -> None:
    source = torch.ones(100_000)
    mine = torch.frombuffer(writable(receive(exchange, raw(source))), dtype=torch.float32)
    captured = exchange.capture([raw(mine), raw(source)])
    mine.zero_()
    source.zero_()
    assert [set(np.frombuffer(frame, dtype=np.float32)) for frame in captured] == [{1.0}, {1.0}]
    assert exchange.attachments.unchanged(raw(mine)) is None


def test_a_pool_that_is_full_captures_bytes_and_says_so_once(job_id: str, caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    exchange = MemoryExchange(job_id, "full", wake=lambda: None, limit_bytes=1 << 20, clock=lambda: now)
    for _ in range(3):
        frames = exchange.capture([b"a" * (2 << 20), b"b" * (100 << 10)])
        assert [type(frame) for frame in frames] == [bytes, memoryview]
    assert exchange.exhausted == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "limit of 1.0 MiB" in caplog.text
    now = 61.0
    exchange.capture([b"a" * (2 << 20)])
    assert len(caplog.records) == 2
    exchange.close()


def release_of(descriptor: Descriptor | None) -> SlotRelease:
    assert descriptor is not None
    return SlotRelease(descriptor.segment, descriptor.slot, descriptor.generation, 1)


def test_references_that_were_released_hold_nothing(exchange: MemoryExchange) -> None:
    frame = exchange.capture([b"x" * 100_000])[0]
    descriptors = [exchange.add_ref(frame, "R") for _ in range(3)]
    del frame
    exchange.release([release_of(d) for d in descriptors], "R")
    assert exchange.pool.stats().slots == 0


def test_tensors_that_circulate_among_three(exchange: MemoryExchange, job_id: str) -> None:
    """Any order of sending, changing, passing on and dropping; each value is what its sender saw."""
    dice = random.Random(11)
    with borrower(job_id, "b1") as first, borrower(job_id, "b2") as second:
        processes: dict[str, Borrower] = {"b1": first, "b2": second}
        held: dict[str, tuple[str, str]] = {}
        for step in range(150):
            name = dice.choice(list(processes))
            process = processes[name]
            if dice.random() < 0.5 or not held:
                data = bytes([step]) * dice.choice([70_000, 300_000, 2 << 20])
                frame = exchange.capture([data])[0]
                process.do("borrow", f"v{step}", exchange.add_ref(frame, name), "main")
                held[f"v{step}"] = (name, digest(data))
                del frame
                continue
            value = dice.choice(list(held))
            name, expected = held[value]
            process, other = processes[name], "b2" if name == "b1" else "b1"
            assert process.do("digest", value) == expected
            match dice.choice(["write", "pass on", "drop", "drop"]):
                case "write":
                    process.do("write", value, step)
                    held[value] = (name, process.do("digest", value))
                case "pass on":
                    onward = process.do("pass_on", value, other)
                    if onward is not None:
                        processes[other].do("borrow", f"p{step}", onward, name)
                        process.do("sent", value)
                        held[f"p{step}"] = (other, expected)
                case _:
                    process.do("drop", value)
                    del held[value]
            _exchange_give_backs(exchange, processes)
        for value, (name, expected) in held.items():
            assert processes[name].do("digest", value) == expected
            processes[name].do("drop", value)
        for _ in range(4):
            _exchange_give_backs(exchange, processes)
        assert exchange.pool.stats().slots == 0
        assert first.do("borrowed") == second.do("borrowed") == []


def _exchange_give_backs(exchange: MemoryExchange, processes: dict[str, Borrower]) -> None:
    for name, process in processes.items():
        for lender, ended in process.do("releases").items():
            if lender == "main":
                exchange.release(ended, name)
            else:
                processes[str(lender)].do("receive_give_backs", ended, name)


@pytest.mark.slow
def test_tensors_of_more_than_4_gib_arrive_whole(job_id: str) -> None:
    """Offsets and sizes beyond 32 bits."""
    nbytes = (4 << 30) + 8192
    if _available_bytes() < nbytes + (2 << 30):
        pytest.skip("not enough memory")
    exchange = MemoryExchange(job_id, "huge", wake=lambda: None)
    view = receive(exchange, _Sparse(nbytes))
    tensor = torch.frombuffer(writable(view), dtype=torch.uint8)
    for start in range(0, nbytes, 512 << 20):
        assert not tensor[start : start + 4096].any()
    tensor[nbytes - 2] = 1
    assert bytes(view[-3:]) == b"e\1d"
    part = receive(exchange, _Sparse(70_000))  # the owner's second segment
    frame = exchange.capture([view[: nbytes - 4096]])[0]  # unchanged: not copied
    descriptor = exchange.add_ref(frame, "self")
    assert descriptor is not None and descriptor.nbytes == nbytes - 4096
    assert exchange.pool.stats().slots == 2
    exchange.release([release_of(descriptor)], "self")
    del view, tensor, part, frame
    settle(exchange)
    assert exchange.pool.stats().slots == 0
    again = receive(exchange, _Sparse(nbytes))
    assert bytes(again[-3:]) == b"end"
    exchange.close()


class _Sparse:
    """Writes its last three bytes; fresh pages of a segment are zeros."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def fill(self, into: memoryview) -> None:
        into[-3:] = b"end"


def _available_bytes() -> int:
    with open("/proc/meminfo") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["MemAvailable"].split()[0]) << 10
