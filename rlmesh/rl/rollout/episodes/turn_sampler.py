"""`TurnSampler`: samples turns with an engine from an event loop, each with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from rlmesh.rl.engines.rollout import OnTokens, RolloutEngine, Sample, SamplingParams
from rlmesh.rl.rollout.episodes.deadlines import PlaceTimeout

__all__ = ["TurnSampler"]

THREADS = 16
"""Threads that wait for the engine to admit requests; it may be paused for new weights."""


class TurnSampler:
    """Samples single turns.

    Args:
        engine: the engine.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="rlmesh-turns")

    async def sample(
        self, ids: Sequence[int], params: SamplingParams, *, timeout_s: float, place: str,
        on_tokens: OnTokens | None = None,
    ) -> Sample:  # fmt: skip
        """Sample one response.

        Args:
            place: the place, for the text of the error.

        Raises:
            PlaceTimeout: there is none after ``timeout_s``; the request is given up.
            UsageError, WeightsNotReady: see `RolloutEngine.submit`.
        """
        loop = asyncio.get_running_loop()
        more = {} if on_tokens is None else {"on_tokens": on_tokens}
        submit = partial(self.engine.submit, ids, params, timeout_s=timeout_s, **more)
        try:
            async with asyncio.timeout(timeout_s):
                future = await loop.run_in_executor(self._threads, submit)
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise PlaceTimeout(f"{place}: no answer in {timeout_s:g} s") from None

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)
