"""What type checkers infer. Checked by mypy and pyright, never run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, assert_type

import rlmesh
from rlmesh import Future, FutureSequence, MemberHandle, RLRoleType, RoleGroup, Stream, rpc


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
    def batch(self, xs: list[int]) -> list[float]:
        return [float(x) for x in xs]

    @rpc
    async def batch_async(self, xs: list[int]) -> list[float]:
        return [float(x) for x in xs]

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
    assert_type(group.call(Actor.forward, [3, 4], _scatter=True), Future[list[str]])
    assert_type(group.call(generate, ["a"], temperature=0.1), Future[list[list[str]]])
    assert_type(group.call(top_level, 3), Future[list[str]])
    assert_type(group.call("forward", 3), Future[list[Any]])
    group.call(Actor.forward, 3, return_exceptions=True).result().raise_all()


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
    assert_type(group.call_batch("batch", 2, [1, 2]), FutureSequence[Any])
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
    assert_type(critics.call_batch(Critic.value, 2, group.call_batch(Actor.batch, 2, [1, 2])), FutureSequence[Any])


def names_at_the_top() -> None:
    assert_type(rlmesh.RoleGroup(Critic).call(Critic.value, 3), Future[list[float]])
    untyped = RoleGroup("ACTOR")
    assert_type(untyped.call(Actor.forward, 3), Future[list[str]])
    assert_type(untyped.call_any(generate, ["a"]), Future[list[str]])
    factory: Callable[[int], str] = top_level
    assert_type(factory(3), str)
