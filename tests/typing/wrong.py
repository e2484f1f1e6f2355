"""What type checkers must refuse: each line that is marked, and no other. Checked by mypy and pyright, never run."""

from __future__ import annotations

from collections.abc import Iterator

from rlmesh import RoleGroup, rpc


def stub(prompts: list[str]) -> list[str]:
    return prompts


class Actor:
    @rpc
    def forward(self, x: int, *, scale: float = 1.0) -> str:
        return str(x * scale)

    @rpc
    async def forward_async(self, x: int) -> str:
        return str(x)

    @rpc(stub)
    def produce(self, prompts: list[str]) -> list[str]:
        return prompts

    @rpc
    def batch(self, xs: list[int], *, scale: float = 1.0) -> list[float]:
        return [x * scale for x in xs]

    @rpc
    async def batch_async(self, xs: list[int]) -> list[float]:
        return [float(x) for x in xs]

    @rpc
    def nothing(self, xs: list[int]) -> None: ...

    @rpc
    def items(self, n: int) -> Iterator[int]:
        yield from range(n)


class Critic:
    @rpc
    def value(self, x: int) -> float:
        return float(x)

    @rpc
    def values(self, xs: list[int]) -> list[float]:
        return [float(x) for x in xs]


def wrong(group: RoleGroup[Actor], actor: Actor) -> None:
    group.call(Critic.value, 3)  # wrong: another role's method
    group.call(Actor.forward)  # wrong: an argument is missing
    group.call(Actor.forward, "text")  # wrong: an argument of another type
    group.call(Actor.forward, 3, 4)  # wrong: too many arguments
    group.call(Actor.forward, 3, scales=0.5)  # wrong: no such keyword
    group.call(Actor.forward, 3, scale="large")  # wrong: a keyword of another type
    group.call(Actor.forward_async, "text")  # wrong
    group.call(Actor.produce, [1])  # wrong
    group.call(stub, 3)  # wrong
    group.call(3)  # wrong: not a method
    group.call_rank0(Critic.value, 3)  # wrong
    group.call_rank0(Actor.forward, "text")  # wrong
    group.call_any(Actor.forward, 3, scales=0.5)  # wrong
    group.call(Critic.value, [3, 4], _scatter=True)  # wrong
    group.call(Actor.forward, ["a", "b"], _scatter=True)  # wrong: items of another type
    group.call(Actor.forward, "text", _scatter=True)  # wrong
    group.call(Actor.batch, 3, _scatter=True)  # wrong
    group.call_batch(Critic.values, 2, [1, 2])  # wrong: another role's method
    group.call_batch(Actor.batch, 2)  # wrong: an argument is missing
    group.call_batch(Actor.batch, ["a", "b"])  # wrong: items of another type
    group.call_batch(Actor.batch)  # wrong: an argument is missing
    group.call_batch(Actor.batch, [1, 2], scales=0.5)  # wrong: no such keyword
    group.call_batch(Critic.values, [1, 2])  # wrong: another role's method
    group.call_batch(Actor.nothing, [1, 2])  # wrong: gives no result per item
    group.call_shards(Actor.batch, ["a", "b"])  # wrong: items of another type
    group.call_shards(Actor.batch, 2)  # wrong: an argument is missing
    group.call_shards(Critic.values, [1, 2])  # wrong: another role's method
    group.options(return_exceptions=True).call(Actor.forward, "text")  # wrong
    group.options(return_exceptions=True).call(Critic.value, 3)  # wrong: another role's method
    group.options(scatter=True).call(Actor.forward, ["a", "b"])  # wrong: items of another type
    group.options(scatter=True).call(Critic.value, [3, 4])  # wrong: another role's method
    group.options(scatter="yes")  # wrong: True or False
    group.call_batch(Actor.batch, 2, ["a", "b"])  # wrong: items of another type
    group.call_batch(Actor.batch, 2, 3)  # wrong: no items
    group.call_batch(Actor.batch, 2, [1, 2], 3)  # wrong: too many arguments
    group.call_batch(Actor.batch, 2, [1, 2], scales=0.5)  # wrong: no such keyword
    group.call_batch(Actor.batch, 2, [1, 2], scale="large")  # wrong: a keyword of another type
    group.call_batch(Actor.batch_async, 2, ["a", "b"])  # wrong
    group.call_batch(Actor.nothing, 2, [1, 2])  # wrong: gives no result per item
    group.call_batch(Actor.forward_async, 2, [1, 2])  # wrong
    group.call_batch(stub, 2, [1, 2])  # wrong
    RoleGroup("ACTOR").call_batch(Actor.batch, 2, ["a", "b"])  # wrong
    group.notify(Critic.value, 3)  # wrong
    group.notify(Actor.forward, "text")  # wrong
    group[0].notify(Actor.forward, 3, scales=0.5)  # wrong
    group[0].call(Critic.value, 3)  # wrong
    group[0].call(Actor.forward, "text")  # wrong
    group.stream(Actor.forward, 3)  # wrong: not a generator
    group.stream(Actor.items, "text")  # wrong
    group.options(timeout=3)  # wrong: no such option
    group.along(3)  # wrong: an axis is named by text
    RoleGroup(Critic).call(Actor.forward, 3)  # wrong
    RoleGroup("ACTOR").call(Actor.forward, "text")  # wrong
    actor.forward("text")  # wrong: @rpc keeps the method's type
    actor.produce([1])  # wrong: and so does @rpc(stub)
