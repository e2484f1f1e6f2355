"""Batch calls: arithmetic, what is split, FutureSequence as the list that it stands for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlmesh.errors import CallError, GroupCallError, UsageError
from rlmesh.runtime.batch_split import balanced_sizes, shared, split_call
from rlmesh.runtime.future import Future
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.sequence import FutureSequence
from tests.runtime.conftest import Mesh


class Worker:
    def __init__(self) -> None:
        self.sizes: list[int] = []

    @rpc
    def square(self, items: Sequence[int], *, temperature: float = 1.0, tag: str = "") -> list[Any]:
        self.sizes.append(len(items))
        return [(int(x) ** 2, temperature, tag) for x in items]

    @rpc
    def lengths(self, items: Sequence[str], table: Sequence[int]) -> list[int]:
        return [len(x) + len(table) for x in items]

    @rpc
    def rows(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix * 2

    @rpc
    def plus(self, number: float, items: Sequence[int]) -> list[float]:
        return [number + x for x in items]

    @rpc
    def sums(self, items: Sequence[int], more: int) -> list[int]:
        return [x + more for x in items]

    @rpc
    def total(self, items: Sequence[int], *, scale: int = 1) -> int:
        if any(x < 0 for x in items):
            raise ValueError("negative")
        return int(sum(items)) * scale

    @rpc
    def too_few(self, items: Sequence[int]) -> list[int]:
        return list(items)[1:]


@pytest.mark.case("O6")
@pytest.mark.parametrize("kind", [list, np.array, torch.tensor], ids=["list", "array", "tensor"])
def test_a_batch_of_any_size_comes_back_whole_and_in_order(mesh: Mesh, kind: Any) -> None:
    workers = [Worker() for _ in range(8)]
    group = mesh.serve("W", *workers)
    for size, world in [(4, 3), (5, 4), (9, 8), (10, 7), (2, 8), (0, 3)]:
        items = list(range(size))
        result = group[:world].call_batch("square", size, kind(items), temperature=0.7, tag="abc")
        expected = [(x * x, 0.7, "abc") for x in items]
        assert len(result) == size
        assert list(result) == result.result() == expected
        assert result[::2] == expected[::2] and result[::-1] == expected[::-1]
        if size:
            assert result[-1] == expected[-1] and result[0] == expected[0]
        for index in (size, -size - 1):
            with pytest.raises(IndexError):
                result[index]
        given = [n for worker in workers for n in worker.sizes]
        assert given == [n for n in balanced_sizes(size, world) if n] and sum(given) == size
        assert not given or max(given) - min(given) <= 1
        assert all(worker.sizes == [] for worker in workers[len(given) :]), "who gets no items is not called"
        for worker in workers:
            worker.sizes.clear()


def test_what_is_split_and_what_is_copied(mesh: Mesh) -> None:
    group = mesh.serve("W", Worker(), Worker())
    assert list(group.call_batch("lengths", 3, ["a", "bb", "ccc"], shared([1, 2]))) == [3, 4, 5]
    with pytest.raises(UsageError, match=r"argument 2 of the batch call has 2 items, but the batch has 3.*shared"):
        group.call_batch("lengths", 3, ["a", "bb", "ccc"], [1, 2])
    matrix = torch.arange(10.0).reshape(5, 2)
    rows = group.call_batch("rows", 5, matrix)
    assert torch.equal(torch.stack(list(rows)), matrix * 2)


def test_a_result_of_the_wrong_length_names_the_rank(mesh: Mesh) -> None:
    group = mesh.serve("W", Worker(), Worker(), Worker())
    with pytest.raises(CallError, match="rank 0 returned 1 results for 2 items"):
        list(group[:2].call_batch("too_few", [1, 2, 3, 4]))
    with pytest.raises(CallError, match="rank 1 returned 1 results for 2 items") as caught:
        list(group[1:].call_batch("too_few", [1, 2, 3, 4]))
    assert caught.value.rank == 1


def test_the_number_of_items_is_that_of_the_arguments(mesh: Mesh) -> None:
    group = mesh.serve("W", Worker(), Worker())
    squares = [(1, 1.0, ""), (4, 1.0, ""), (9, 1.0, "")]
    assert group.call_batch("square", [1, 2, 3]).result() == squares
    assert group.call_batch(Worker.square, 3, [1, 2, 3]).result() == squares
    assert group.call_batch("square", items=np.arange(1, 4), tag="t").result() == [(n * n, 1.0, "t") for n in (1, 2, 3)]
    assert group.call_batch("square", group.call_batch("sums", 3, [0, 1, 2], 1)).result() == squares
    assert group.call_batch("square", []).result() == []
    assert group.call_batch("lengths", ["a", "bb", "ccc"], shared([1, 2])).result() == [3, 4, 5]
    with pytest.raises(UsageError, match=r"argument 2 of the batch call has 2 items, but argument 1 has 3"):
        group.call_batch("lengths", ["a", "bb", "ccc"], [1, 2])
    with pytest.raises(UsageError, match=r"argument 'table' of the batch call has 2 items, but argument 'items' has 1"):
        group.call_batch("lengths", items=["a"], table=[1, 2])


def test_an_int_after_the_method_is_the_number_of_items(mesh: Mesh) -> None:
    group = mesh.serve("W", Worker(), Worker())
    # A method whose own first argument is an int gets it behind the number, by its name, or shared.
    assert group.call_batch("plus", 2, 10, [1, 2]).result() == [11, 12]
    assert group.call_batch("plus", shared(10), [1, 2]).result() == [11, 12]
    assert group.call_batch("plus", items=[1, 2], number=10).result() == [11, 12]
    assert group.call_batch("plus", True, [1, 2]).result() == [2, 3]
    assert group.call_batch("plus", 0.5, [1, 2]).result() == [1.5, 2.5]
    with pytest.raises(UsageError, match="argument 1 of the batch call has 2 items, but the batch has 10"):
        group.call_batch("plus", 10, [1, 2])
    with pytest.raises(UsageError, match=r"'plus'.*10 counts as the number of items, but no argument after it has"):
        group.call_batch("plus", 10, number=1)
    with pytest.raises(UsageError, match=r"is np.int64\(2\) \(int64\) the number of items\? Pass it as an int"):
        group.call_batch("plus", np.int64(2), [1, 2])
    for nothing in ((), (None,), ("text",), (1.0, {"a": 1})):
        with pytest.raises(UsageError, match="no argument has items to split"):
            group.call_batch("plus", *nothing)


def test_shards_give_one_value_per_member(mesh: Mesh) -> None:
    workers = [Worker(), Worker(), Worker()]
    group = mesh.serve("W", *workers)
    assert group.call_shards(Worker.total, [1, 2, 3, 4]).result() == [3, 3, 4]
    assert group.call_shards("total", 4, [1, 2, 3, 4]).result() == [3, 3, 4]
    assert group.call_shards("total", [5, 6]).result() == [5, 6]
    assert group.call_shards("total", []).result() == []
    assert group[1:].call_shards("total", torch.arange(4), scale=2).result() == [2, 10]
    with pytest.raises(ValueError, match="negative"):
        group.call_shards("total", [1, 2, -3]).result()
    outcomes = group[1:].options(return_exceptions=True).call_shards("total", [1, -3]).result()
    with pytest.raises(GroupCallError) as caught:
        outcomes.raise_all()
    assert list(caught.value.failures) == [2] and caught.value.results == {1: 1}
    with pytest.raises(UsageError, match=r"call_shards\('total', …\): no argument has items"):
        group.call_shards("total")

    async def main() -> None:
        assert await group.call_shards(Worker.total, [1, 2, 3, 4]) == [3, 3, 4]

    asyncio.run(main())


def test_results_of_one_batch_are_arguments_of_the_next(mesh: Mesh) -> None:
    group = mesh.serve("W", Worker(), Worker())
    first = group.call_batch("rows", 4, torch.ones(4, 2))
    second = group.call_batch("lengths", 4, first, shared([]))
    assert list(second) == [2, 2, 2, 2]


def test_a_batch_is_awaited_iterated_and_taken_as_completed(mesh: Mesh) -> None:
    group = mesh.serve("W", Worker(), Worker(), Worker())

    async def main() -> None:
        expected = [(x * x, 1.0, "") for x in range(7)]
        assert await group.call_batch("square", 7, list(range(7))) == expected
        assert [item async for item in group.call_batch("square", 7, list(range(7)))] == expected
        pairs = [pair async for pair in group.call_batch("square", 7, list(range(7))).as_completed()]
        assert sorted(pairs) == list(enumerate(expected))

    asyncio.run(main())


@given(st.integers(0, 300), st.integers(1, 40))
def test_splitting_is_balanced_and_loses_nothing(size: int, world: int) -> None:
    sizes = balanced_sizes(size, world)
    assert len(sizes) == world and sum(sizes) == size and max(sizes) - min(sizes) <= 1
    calls = split_call(size, world, [list(range(size))], {"k": "text"})
    assert [x for args, _ in calls for x in args[0]] == list(range(size))
    assert all(kwargs == {"k": "text"} for _, kwargs in calls)


@given(st.lists(st.integers(), max_size=30), st.integers(1, 7), st.data())
def test_a_future_sequence_behaves_as_its_list(items: list[int], world: int, data: st.DataObject) -> None:
    sizes = [n for n in balanced_sizes(len(items), world) if n]
    shards, start = [], 0
    for size in sizes:
        shard: Future[list[int]] = Future()
        shard.set_result(items[start : start + size])
        shards.append(shard)
        start += size
    sequence: FutureSequence[int] = FutureSequence(shards, sizes)
    part = data.draw(st.slices(len(items)))
    assert len(sequence) == len(items) and list(sequence) == items and sequence[part] == items[part]
    assert list(reversed(sequence)) == items[::-1]
    for index in range(-len(items), len(items)):
        assert sequence[index] == items[index]
