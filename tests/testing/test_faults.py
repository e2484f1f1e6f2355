"""Under every plan each call ends in time, rightly or with an error, and the runtime works on."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlmesh.errors import CallError, CallTimeout, PeerLost
from rlmesh.runtime.connections.network import NetworkOptions
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime
from rlmesh.testing import FaultPlan, LoopbackNetwork, VirtualLoop, faulty
from tests.runtime.conftest import KEY

TIMEOUT_S = 5.0


class Member:
    def __init__(self) -> None:
        self.seen: list[int] = []

    @rpc
    async def double(self, number: int, ballast: bytes) -> int:
        self.seen.append(number)
        return 2 * number


async def pair(stack: AsyncExitStack, plan: FaultPlan, member: object) -> Any:
    """A member and a caller of it, both behind the plan."""
    network = LoopbackNetwork()
    options = NetworkOptions(
        transports={"loop": faulty(network.transports["loop"], plan)}, share_memory=False,
        bulk_schemes=frozenset({"loop"}), bulk_bytes=5000,
    )  # fmt: skip
    server = await stack.enter_async_context(Runtime.open(name="A:0", key=KEY, bind="loop://a", network=options))
    server.serve("A:0", member)
    caller = await stack.enter_async_context(Runtime.open(name="caller", key=KEY, bind=False, network=options))
    return caller.peer("A:0", "loop://a").options(timeout_s=TIMEOUT_S)


async def outcomes(plan: FaultPlan, calls: int) -> tuple[list[Any], list[int]]:
    """Every third call has a payload that takes a connection of its own."""
    member = Member()
    async with AsyncExitStack() as stack:
        handle = await pair(stack, plan, member)
        futures = []
        for number in range(calls):
            futures.append(handle.call("double", number, bytes(10_000 if number % 3 == 2 else 0)))
            await asyncio.sleep(0.01)
        results = await asyncio.gather(*futures, return_exceptions=True)
    return results, member.seen


plans = st.builds(
    FaultPlan,
    seed=st.integers(0, 2**32),
    drop=st.sampled_from([0.0, 0.1, 0.6]),
    duplicate=st.sampled_from([0.0, 0.3]),
    reorder=st.sampled_from([0.0, 0.3]),
    delay_s=st.sampled_from([(0.0, 0.0), (0.0, 1.0), (4.0, 6.0)]),
    half_open=st.sampled_from([0.0, 0.05]),
    alter=st.sampled_from([0.0, 0.2]),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans)
def test_every_call_ends_rightly_or_with_an_error(plan: FaultPlan) -> None:
    with VirtualLoop() as loop:
        results, _ = loop.run(asyncio.wait_for(outcomes(plan, 20), 60))
    for number, result in enumerate(results):
        if plan.alter:  # A changed header may make another valid one, such as a call of a method that there is not.
            assert isinstance(result, int | CallError), result
        else:
            assert result == 2 * number or isinstance(result, CallTimeout | PeerLost), result


def test_without_faults_nothing_is_lost_doubled_or_out_of_order() -> None:
    with VirtualLoop() as loop:
        results, seen = loop.run(outcomes(FaultPlan(delay_s=(0.0, 0.5)), 100))
    assert results == [2 * n for n in range(100)]
    assert seen == list(range(100))


def test_the_same_seed_gives_the_same_faults() -> None:
    runs = []
    for _ in range(2):
        plan = FaultPlan(seed=11, drop=0.2, duplicate=0.2, reorder=0.2)
        with VirtualLoop() as loop:
            results, _ = loop.run(outcomes(plan, 30))
        runs.append(([str(type(r)) if isinstance(r, Exception) else r for r in results], dict(plan.done)))
    assert runs[0] == runs[1]
    assert runs[0][1].keys() == {"drop", "duplicate", "reorder"}


def test_a_half_open_connection_is_a_timeout_and_not_a_wait_for_ever() -> None:
    with VirtualLoop() as loop:
        began = loop.time()
        results, seen = loop.run(outcomes(FaultPlan(half_open=1.0), 1))
        assert isinstance(results[0], CallTimeout) and seen == []
        assert TIMEOUT_S <= loop.time() - began < TIMEOUT_S + 1


def test_a_broken_connection_is_told_to_both_sides() -> None:
    async def main() -> None:
        network = LoopbackNetwork()
        options = NetworkOptions(transports=network.transports)
        entered = asyncio.Event()

        class Slow:
            @rpc
            async def wait(self) -> None:
                entered.set()
                await asyncio.sleep(1000)

        async with (
            Runtime.open(name="A:0", key=KEY, bind="loop://a", network=options) as server,
            Runtime.open(name="caller", key=KEY, bind=False, network=options) as caller,
        ):
            server.serve("A:0", Slow())
            future = caller.peer("A:0", "loop://a").call("wait")
            await entered.wait()
            network.disconnect("loop://a")
            with pytest.raises(PeerLost, match="closed by the peer"):
                await future

    with VirtualLoop() as loop:
        loop.run(main())
        assert loop.time() < 1010
