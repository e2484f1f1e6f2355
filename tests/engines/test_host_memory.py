"""Host memory for copies of a GPU: rooms, pages, and their end. CUDA is replaced by a list of its calls."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmesh.rl.engines.host_memory import KeptRooms, empty_on_host, make_rooms

MIB = 1 << 20


class Cuda:
    """CUDA's registrations of host memory."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.error = 0

    def cudaHostRegister(self, begin: int, size: int, flags: int) -> Any:
        self.locked[begin] = size
        return type("Error", (), {"value": self.error, "__str__": lambda self: "out of memory"})()

    def cudaHostUnregister(self, begin: int) -> None:
        del self.locked[begin]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    found = Cuda()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    return found


def mapped(address: int) -> bool:
    ranges = [line.split(" ", 1)[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


@pytest.mark.parametrize("pinned", [False, True])
def test_rooms_do_not_overlap_and_fit_any_type(cuda: Cuda, pinned: bool) -> None:
    sizes = [40 * MIB, 3, 0, 8 * 1000, 1]
    rooms = make_rooms(sizes, pinned=pinned)
    assert [len(room) for room in rooms] == sizes
    for number, room in enumerate(rooms):
        room.fill_(number)
    assert [set(room.unique().tolist()) for room in rooms] == [{0}, {1}, set(), {3}, {4}]
    assert rooms[3].view(torch.float64).shape == (1000,)


def test_pages_are_made_locked_and_given_back(cuda: Cuda) -> None:
    (first, second) = make_rooms([33 * MIB, 2 * MIB], pinned=True)
    ((begin, size),) = cuda.locked.items()
    assert begin == first.data_ptr() and begin % (2 * MIB) == 0 and size == 35 * MIB
    assert first.sum() == 0 and second.sum() == 0
    del first
    gc.collect()
    assert cuda.locked and mapped(begin), "a room still uses it"
    del second
    gc.collect()
    assert not cuda.locked and not mapped(begin)


def test_every_page_is_made_before_cuda_locks_it(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int]] = []
    fill = ctypes.memset

    def fill_and_tell(at: int, value: int, size: int) -> None:
        made.append((at, size))
        fill(at, value, size)

    monkeypatch.setattr(ctypes, "memset", fill_and_tell)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(5)))
    (room,) = make_rooms([41 * MIB + 7], pinned=True)
    begin, ends = room.data_ptr(), room.data_ptr()
    for at, size in sorted(made):
        assert at == ends and size > 0
        ends = at + size
    assert ends == begin + cuda.locked[begin] >= begin + 41 * MIB + 7
    assert len(made) > 1


def test_memory_that_cuda_does_not_lock_is_an_error_and_is_freed(cuda: Cuda) -> None:
    cuda.error = 2
    with pytest.raises(MemoryError, match="CUDA cannot lock 33554432 bytes of host memory: out of memory"):
        make_rooms([32 * MIB], pinned=True)
    ((begin, _),) = cuda.locked.items()
    assert not mapped(begin)


def test_memory_that_the_system_does_not_have_is_an_error(cuda: Cuda) -> None:
    with pytest.raises(MemoryError, match="no 1152921504606846976 bytes of host memory"):
        make_rooms([1 << 60], pinned=True)


def test_a_forked_child_has_none_of_it_and_frees_none(cuda: Cuda) -> None:
    (room,) = make_rooms([32 * MIB], pinned=True)
    begin = room.data_ptr()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            gone = not mapped(begin)
            del room
            gc.collect()
            status = 0 if gone and cuda.locked else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert room.sum() == 0


def test_tensors_on_the_host_have_shape_and_type_of_those_on_the_device() -> None:
    tensors = [torch.ones(3, 4).t(), torch.ones((), dtype=torch.int64), torch.ones(0, 2, dtype=torch.bfloat16)]
    found = empty_on_host(tensors)
    assert [(t.shape, t.dtype, t.is_contiguous()) for t in found] == [(t.shape, t.dtype, True) for t in tensors]


def test_rooms_are_kept_while_their_storages_ask(cuda: Cuda) -> None:
    rooms = KeptRooms()
    weights, moments = torch.empty(20 * MIB, dtype=torch.uint8), torch.empty(24 * MIB, dtype=torch.uint8)
    storages = [weights.untyped_storage(), moments.untyped_storage()]
    (first,) = rooms.of(storages[:1])
    again, new = rooms.of(storages)
    assert again.data_ptr() == first.data_ptr() and len(new) == 24 * MIB
    assert sorted(cuda.locked.values()) == [20 * MIB, 24 * MIB], "what is there is not made again"
    weights.untyped_storage().resize_(30 * MIB)
    del first, again
    (grown, _) = rooms.of(storages)
    assert len(grown) == 30 * MIB
    assert sorted(cuda.locked.values()) == [24 * MIB, 30 * MIB], "the smaller room is given up"
