"""What a method of a batch call returns: a sequence with one result per item, or an error that says what it was."""

from __future__ import annotations

import asyncio
import collections
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from rlmesh.errors import CallError
from rlmesh.runtime.rpc import rpc
from tests.own_time import HANG_S
from tests.runtime.conftest import Mesh


class Record(NamedTuple):
    loss: float
    norm: float


class Duck:
    """A sequence in all but name."""

    def __init__(self, items: list[int]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, at: Any) -> Any:
        return self.items[at]


class Table:
    """As data frames are: iterated, it gives the names of its columns."""

    columns = ("loss", "norm")

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)


class Opaque(Sequence[int]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, at: Any) -> Any:
        return [7, 8][at]


WRONG: dict[str, Any] = {
    "dict": {"loss": 1.0, "norm": 2.0}, "str": "ok", "bytes": b"ok", "bytearray": bytearray(b"ok"), "set": {1, 2},
    "frozenset": frozenset({1, 2}), "float": 1.5, "int": 2, "NoneType": None,
    "OrderedDict": collections.OrderedDict(a=1, b=2),
    "Counter": collections.Counter("ab"), "UserDict": collections.UserDict(a=1, b=2),
    "UserString": collections.UserString("ok"),
    "ndarray": np.array(2.0), "Tensor": torch.tensor(2.0),
    "Record": Record(1.0, 2.0), "max": torch.tensor([1.0]).max(dim=0),
    "Table": Table(),
}  # fmt: skip
RIGHT: dict[str, Any] = {
    "list": [7, 8], "tuple": (7, 8), "ndarray": np.array([7, 8]), "Tensor": torch.tensor([7, 8]), "range": range(7, 9),
    "deque": collections.deque([7, 8]), "array": array("l", [7, 8]), "UserList": collections.UserList([7, 8]),
    "Duck": Duck([7, 8]), "Opaque": Opaque(),
}  # fmt: skip


class Worker:
    @rpc
    def gives(self, kind: str, items: list[int]) -> Any:
        return (WRONG if kind in WRONG and items[0] < 100 else RIGHT)[kind]

    @rpc
    async def gives_async(self, kind: str, items: list[int]) -> Any:
        return self.gives(kind, items)

    @rpc
    def generator(self, items: list[int]) -> Any:
        return (x for x in items)

    @rpc
    def total(self, items: list[int]) -> int:
        return int(sum(items))


@pytest.mark.case("n05")
@pytest.mark.parametrize("method", ["gives", "gives_async"])
@pytest.mark.parametrize("kind", WRONG)
def test_what_is_no_sequence_is_refused_by_name(mesh: Mesh, method: str, kind: str) -> None:
    group = mesh.serve("WORKER", Worker(), Worker())
    batch = [1, 2, 3, 4]

    async def awaited() -> Any:
        return await group.call_batch(method, 4, kind, batch)

    async def iterated() -> Any:
        return [item async for item in group.call_batch(method, 4, kind, batch)]

    async def completed() -> Any:
        return [item async for item in group.call_batch(method, 4, kind, batch).as_completed()]

    ways: list[Callable[[], Any]] = [
        lambda: list(group.call_batch(method, 4, kind, batch)),
        lambda: group.call_batch(method, 4, kind, batch).result(HANG_S),
        lambda: group.call_batch(method, 4, kind, batch)[3],
        lambda: group[0].call("total", group.call_batch(method, 4, kind, batch).as_argument()).result(HANG_S),
        lambda: asyncio.run(awaited()),
        lambda: asyncio.run(iterated()),
        lambda: asyncio.run(completed()),
    ]
    for way in ways:
        with pytest.raises(CallError, match=rf"returned a .*{kind}.* for 2 items") as caught:
            way()
        assert "one result per item" in str(caught.value) and caught.value.executed == "yes"
        assert f"{method}()" in str(caught.value)


@pytest.mark.case("n05")
@pytest.mark.parametrize("kind", RIGHT)
def test_sequences_arrays_and_tensors_are_results(mesh: Mesh, kind: str) -> None:
    group = mesh.serve("WORKER", Worker(), Worker())
    results = group.call_batch("gives", 4, kind, [100, 101, 102, 103])
    assert [int(x) for x in results] == [7, 8, 7, 8]
    assert group[0].call("total", results.as_argument()).result(HANG_S) == 30


@pytest.mark.case("n05")
def test_a_generator_is_refused_by_name(mesh: Mesh) -> None:
    group = mesh.serve("WORKER", Worker())
    with pytest.raises(CallError, match=r"generator.*in generator\(\)"):
        group.call_batch("generator", 2, [1, 2]).result(HANG_S)
