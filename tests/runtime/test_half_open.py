"""How long and how many strangers may wait, in virtual time."""

from __future__ import annotations

from rlmesh.runtime.transport import half_open
from rlmesh.runtime.transport.half_open import GRACE_S, HARD_LIMIT, SOFT_LIMIT, TIMEOUT_S, HalfOpen
from rlmesh.testing.clock import VirtualLoop


def test_few_may_wait_until_the_timeout_and_many_only_a_moment() -> None:
    evicted: list[tuple[float, int]] = []
    with VirtualLoop() as loop:
        waiting: HalfOpen[int] = HalfOpen(loop, lambda number, _: evicted.append((loop.time(), number)))
        start = loop.time()
        for number in range(SOFT_LIMIT + 72):
            waiting.add(number)
        loop.advance(GRACE_S * 0.9)
        assert evicted == []
        loop.advance(GRACE_S * 0.2)
        assert [number for _, number in evicted] == list(range(72)), "the oldest go, down to the limit"
        waiting.discard(72)
        loop.advance(TIMEOUT_S)
        assert len(waiting) == 0
        assert [number for _, number in evicted] == [n for n in range(SOFT_LIMIT + 72) if n != 72]
        assert evicted[-1][0] - start <= TIMEOUT_S + GRACE_S
        waiting.close()


def test_above_the_hard_limit_the_oldest_goes_at_once() -> None:
    evicted: list[int] = []
    with VirtualLoop() as loop:
        waiting: HalfOpen[int] = HalfOpen(loop, lambda number, _: evicted.append(number))
        waiting._hard_limit = half_open.HARD_LIMIT
        for number in range(HARD_LIMIT + 5):
            waiting.add(number)
        assert evicted == [0, 1, 2, 3, 4]
        assert waiting.evict_oldest() and evicted[-1] == 5
        waiting.close()
        assert not waiting.evict_oldest()
