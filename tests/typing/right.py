"""What type checkers infer. Checked by mypy and pyright, never run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, assert_type

import numpy as np
import torch
from numpy.typing import NDArray

import rlmesh
from rlmesh import Future, FutureSequence, GroupOutcomes, MemberHandle, RLRoleType, RoleGroup, Stream, rpc, shared


def generate(prompts: list[str], *, temperature: float = 1.0) -> list[str]:
    """A stub: what another role implements."""
    return prompts


@rpc
def top_level(x: int) -> str:
    return str(x)


class Actor:
    @rpc
    def forward(self, x: int, *, scale: float = 1.0) -> str:
        return str(x * scale)

    @rpc
    async def forward_async(self, x: int) -> str:
        return str(x)

    @rpc()
    def empty(self) -> bytes:
        return b""

    @rpc("other_name")
    def named(self, x: int) -> float:
        return float(x)

    @rpc(concurrent=4)
    def pooled(self, x: int) -> list[int]:
        return [x]

    @rpc(generate)
    def produce(self, prompts: list[str], *, temperature: float = 1.0) -> list[str]:
        return prompts

    @rpc(generate, concurrent=2)
    def produce_many(self, prompts: list[str]) -> list[str]:
        return prompts

    @rpc(top_level)
    def by_marked_stub(self, x: int) -> str:
        return str(x)

    @rpc
    def keeps(self, x: int, return_exceptions: bool = False) -> int:
        return x

    @rpc
    def mean(self, xs: list[int]) -> float:
        return sum(xs) / len(xs)

    @rpc
    async def mean_async(self, xs: list[int], *, scale: float = 1.0) -> float:
        return sum(xs) / len(xs) * scale

    @rpc
    def batch(self, xs: list[int]) -> list[float]:
        return [float(x) for x in xs]

    @rpc
    async def batch_async(self, xs: list[int]) -> list[float]:
        return [float(x) for x in xs]

    @rpc
    def batch_with(self, xs: list[int], table: list[str], *, scale: float = 1.0) -> tuple[str, ...]:
        return tuple(table[x] for x in xs)

    @rpc
    def batch_of_tensors(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    @rpc
    def batch_of_arrays(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        return rows

    @rpc
    def items(self, n: int) -> Iterator[int]:
        yield from range(n)

    @rpc
    async def items_async(self, n: int) -> AsyncIterator[str]:
        yield str(n)

    @rpc
    @staticmethod
    def static(x: int) -> int:
        return x


class Critic:
    @rpc
    def value(self, x: int) -> float:
        return float(x)

    @rpc
    def values(self, xs: list[float]) -> list[float]:
        return xs


class LargeActor(Actor):
    def forward(self, x: int, *, scale: float = 1.0) -> str:
        return "large"


def decorated_methods_keep_their_types(actor: Actor) -> None:
    assert_type(actor.forward(1, scale=2.0), str)
    assert_type(actor.produce(["a"], temperature=0.5), list[str])
    assert_type(actor.produce_many(["a"]), list[str])
    assert_type(actor.by_marked_stub(1), str)
    assert_type(actor.pooled(1), list[int])
    assert_type(top_level(3), str)
    assert_type(Actor.static(3), int)


def groups_by_class_and_by_name() -> None:
    assert_type(RoleGroup(Actor), RoleGroup[Actor])
    assert_type(RoleGroup[Actor]("ACTOR"), RoleGroup[Actor])
    assert_type(RoleGroup("ACTOR"), RoleGroup[Any])
    assert_type(RoleGroup(Actor, group="prefill"), RoleGroup[Actor])
    assert_type(RoleGroup[Actor]("ACTOR/prefill"), RoleGroup[Actor])
    assert_type(RoleGroup[Actor](RLRoleType.ACTOR)[0], MemberHandle[Actor])
    assert_type(RoleGroup[Actor]("ACTOR")[1:3], RoleGroup[Actor])
    assert_type(RoleGroup[Actor]("ACTOR").along("dp").options(timeout_s=3, idempotent=True), RoleGroup[Actor])


def typed_calls(group: RoleGroup[Actor]) -> None:
    assert_type(group.call(Actor.forward, 3), Future[list[str]])
    assert_type(group.call(Actor.forward, 3, scale=0.5).result(), list[str])
    assert_type(group.call(Actor.forward_async, x=3), Future[list[str]])
    assert_type(group.call(Actor.empty), Future[list[bytes]])
    assert_type(group.call(Actor.named, 3), Future[list[float]])
    assert_type(group.call(Actor.produce, ["a"]), Future[list[list[str]]])
    assert_type(group.call(LargeActor().forward, 3), Future[list[str]])
    assert_type(group.call(generate, ["a"], temperature=0.1), Future[list[list[str]]])
    assert_type(group.call(top_level, 3), Future[list[str]])
    assert_type(group.call("forward", 3), Future[list[Any]])
    group.notify(Actor.forward, 3, scale=0.5)
    group.notify(generate, ["a"])
    group.notify("forward", 3)
    group.call(Actor.forward, 3, return_exceptions=True).result().raise_all()
    assert_type(group.call(Actor.keeps, 3, return_exceptions=True), Future[list[int]])


def options_of_groups(group: RoleGroup[Actor]) -> None:
    collecting = group.options(return_exceptions=True)
    assert_type(collecting.call(Actor.forward, 3, scale=0.5), Future[GroupOutcomes])
    assert_type(collecting.call("forward", 3).result().ranks, tuple[int, ...])
    collecting.call(generate, ["a"]).result().raise_all()
    collecting.call_shards(Actor.mean, [1, 2]).result().raise_all()
    scattering = group.options(timeout_s=3, scatter=True)
    assert_type(scattering.call(Actor.forward, [3, 4]), Future[list[str]])
    assert_type(scattering.call(Actor.forward_async, [1, 2]), Future[list[str]])
    assert_type(scattering.call(Actor.batch_with, [[1], [2]], shared(["a"])), Future[list[tuple[str, ...]]])
    assert_type(scattering.call(generate, [["a"], ["b"]]), Future[list[list[str]]])
    assert_type(scattering.call("forward", [1, 2]), Future[list[Any]])


def scattered(group: RoleGroup[Actor]) -> None:
    assert_type(group.call(Actor.forward, [3, 4], _scatter=True), Future[list[str]])
    assert_type(group.call(Actor.forward, (3, 4), scale=[0.1, 0.2], _scatter=True), Future[list[str]])
    assert_type(group.call(Actor.forward_async, [1, 2], _scatter=True), Future[list[str]])
    assert_type(group.call(Actor.forward, 3, _scatter=True), Future[list[str]])
    assert_type(group.call(Actor.batch, [[1, 2], [3, 4]], _scatter=True), Future[list[list[float]]])
    assert_type(group.call(Actor.batch_with, [[1], [2]], shared(["a"]), _scatter=True), Future[list[tuple[str, ...]]])
    assert_type(group.call(generate, [["a"], ["b"]], _scatter=True), Future[list[list[str]]])
    assert_type(group.call(Actor.forward, x=[3, 4], _scatter=True), Future[list[str]])


def calls_to_one(group: RoleGroup[Actor]) -> None:
    assert_type(group.call_rank0(Actor.forward, 3), Future[str])
    assert_type(group.call_any(Actor.forward_async, 3), Future[str])
    assert_type(group[0].call(Actor.forward, 3), Future[str])
    assert_type(group[0].options(queue=False).call(Actor.forward, 3).result(), str)
    assert_type(group[0].call("forward", 3), Future[Any])
    for member in group:
        assert_type(member, MemberHandle[Actor])
        member.notify(Actor.forward, 3)


def batches_and_streams(group: RoleGroup[Actor]) -> None:
    assert_type(group.call_batch(Actor.batch, 2, [1, 2]), FutureSequence[float])
    assert_type(group.call_batch(Actor.batch_async, 2, [1, 2])[0], float)
    assert_type(group.call_batch(Actor.batch, 2, xs=[1, 2])[0:1], list[float])
    assert_type(group.call_batch(Actor.batch_with, 2, [1, 2], shared(["a", "b"]), scale=0.5), FutureSequence[str])
    assert_type(group.call_batch(Actor.batch_of_tensors, 2, torch.ones(2)), FutureSequence[torch.Tensor])
    group.call_batch(Actor.batch_of_arrays, 2, np.ones(2, dtype=np.float32))
    assert_type(group.call_batch(Actor().batch, 2, [1, 2]), FutureSequence[float])
    assert_type(group.call_batch(generate, 2, ["a", "b"], temperature=0.1), FutureSequence[str])
    assert_type(RoleGroup("ACTOR").call_batch(Actor.batch, 2, [1, 2]), FutureSequence[float])
    assert_type(RoleGroup("ACTOR").call_batch(generate, 2, ["a", "b"]), FutureSequence[str])
    assert_type(group.call_batch("batch", 2, [1, 2]), FutureSequence[Any])
    assert_type(group.call_batch(Actor.batch, [1, 2]), FutureSequence[float])
    assert_type(group.call_batch(Actor.batch_async, xs=[1, 2])[0], float)
    assert_type(group.call_batch(Actor.batch_with, [1, 2], shared(["a", "b"]), scale=0.5), FutureSequence[str])
    assert_type(group.call_batch(Actor.batch_of_tensors, torch.ones(2)), FutureSequence[torch.Tensor])
    assert_type(group.call_batch(generate, ["a", "b"], temperature=0.1), FutureSequence[str])
    assert_type(RoleGroup("ACTOR").call_batch(Actor.batch, [1, 2]), FutureSequence[float])
    assert_type(group.call_batch("batch", [1, 2]), FutureSequence[Any])
    assert_type(group.call_shards(Actor.mean, [1, 2]), Future[list[float]])
    assert_type(group.call_shards(Actor.mean, 2, [1, 2]), Future[list[float]])
    assert_type(group.call_shards(Actor.mean_async, [1, 2], scale=0.5), Future[list[float]])
    assert_type(group.call_shards(generate, ["a"]), Future[list[list[str]]])
    assert_type(group.call_shards("mean", [1, 2]), Future[list[Any]])
    assert_type(group.stream(Actor.items, 3), Stream[int])
    assert_type(group[0].stream(Actor.items_async, 3), Stream[str])
    for item in group.stream(Actor.items, 3):
        assert_type(item, int)


async def awaited(group: RoleGroup[Actor]) -> None:
    assert_type(await group.call(Actor.forward, 3), list[str])
    assert_type(await group.call_batch(Actor.batch, 2, [1, 2]), list[float])
    async for item in group.stream(Actor.items_async, 3):
        assert_type(item, str)


def passed_on(group: RoleGroup[Actor], critics: RoleGroup[Critic]) -> None:
    made = group.call_rank0(Actor.named, 3)
    assert_type(made.as_argument(), float)
    batch = group.call_batch(Actor.batch, 2, [1, 2])
    assert_type(critics.call_batch(Critic.values, 2, batch.as_argument()), FutureSequence[float])


def names_at_the_top() -> None:
    assert_type(rlmesh.RoleGroup(Critic).call(Critic.value, 3), Future[list[float]])
    untyped = RoleGroup("ACTOR")
    assert_type(untyped.call(Actor.forward, 3), Future[list[str]])
    assert_type(untyped.call_any(generate, ["a"]), Future[list[str]])
    factory: Callable[[int], str] = top_level
    assert_type(factory(3), str)
