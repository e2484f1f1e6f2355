"""`run_together`: async reward functions on one event loop, with a deadline for each call and for the loop itself."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from contextvars import copy_context
from typing import Any

from rlmesh.rl.rewards.outcomes import to_outcome, to_outcomes
from rlmesh.rl.rewards.reward import Reward
from rlmesh.rl.types import Failed, Outcome

__all__ = ["Call", "failure_of", "put_outcomes", "run_together"]

Call = tuple[Reward, list[int], dict[str, Any]]
"""A reward, the indices of the responses that it scores in one call, and the arguments of the call."""
BEAT_S, SLACK_S = 0.2, 5.0
"""Seconds between two signs of life of the event loop, and seconds that it may be late on a busy machine."""


def run_together(calls: Sequence[Call], found: list[dict[str, Outcome]]) -> None:
    """Run calls of async functions together, and store their outcomes in ``found``.

    A function that blocks the event loop, as ``time.sleep`` does, cannot be interrupted. If the loop stands still for
    longer than the longest deadline, the calls that have not ended are `Failed`, and the loop's thread is given up.
    """
    ended: list[list[Outcome] | None] = [None] * len(calls)
    alive = [time.monotonic()]
    faults: list[BaseException] = []

    def work() -> None:
        try:
            asyncio.run(_together(calls, ended, alive))
        except BaseException as error:
            faults.append(error)

    thread = threading.Thread(target=copy_context().run, args=(work,), name="rlmesh-async-rewards", daemon=True)
    thread.start()
    limit_s = max(reward.timeout_s for reward, _, _ in calls) + SLACK_S
    while thread.is_alive() and time.monotonic() - alive[0] < limit_s:
        thread.join(BEAT_S)
    if faults:
        raise faults[0]
    blocked = Failed(
        f"timeout: async rewards blocked the event loop for {limit_s:g} s. An async function must await what it waits "
        "for, or be a plain function, which has a process of its own"
    )
    for (reward, places, _), outcomes in zip(calls, ended, strict=True):
        for place, outcome in zip(places, outcomes or [blocked] * len(places), strict=True):
            found[place][reward.name] = outcome


def failure_of(reward: Reward, places: list[int], error: BaseException) -> Any:
    """The value of a call that raised an error, in place of the function's own."""
    return _for_each(reward, places, Failed(f"{type(error).__name__}: {error}"))


def put_outcomes(reward: Reward, places: list[int], value: Any, found: list[dict[str, Outcome]]) -> None:
    """Store the outcomes of a call for its responses."""
    for place, outcome in zip(places, _outcomes(reward, places, value), strict=True):
        found[place][reward.name] = outcome


def _for_each(reward: Reward, places: list[int], failed: Failed) -> Any:
    return [failed] * len(places) if reward.batched else failed


def _outcomes(reward: Reward, places: list[int], value: Any) -> list[Outcome]:
    return to_outcomes(value, len(places)) if reward.batched else [to_outcome(value)]


async def _together(calls: Sequence[Call], ended: list[list[Outcome] | None], alive: list[float]) -> None:
    async def one(number: int, reward: Reward, places: list[int], arguments: dict[str, Any]) -> None:
        try:
            value = await asyncio.wait_for(_answer(reward, places, arguments), reward.timeout_s)
        except TimeoutError:
            value = _for_each(reward, places, Failed(f"timeout: the scorer ran longer than {reward.timeout_s:g} s"))
        except Exception as error:
            value = failure_of(reward, places, error)
        ended[number] = _outcomes(reward, places, value)

    async def beat() -> None:
        while True:
            alive[0] = time.monotonic()
            await asyncio.sleep(BEAT_S)

    life = asyncio.ensure_future(beat())
    await asyncio.gather(*(one(number, *call) for number, call in enumerate(calls)))
    life.cancel()


async def _answer(reward: Reward, places: list[int], arguments: dict[str, Any]) -> Any:
    try:
        return await reward.function(**arguments)
    except SystemExit as error:  # it would end the loop, and with it the run
        return failure_of(reward, places, error)
