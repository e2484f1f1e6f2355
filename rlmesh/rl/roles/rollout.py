"""`RolloutRole`: an engine that samples with the weights of the last push."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rlmesh import ReceivesWeights, rpc
from rlmesh.rl.engines.rollout import RolloutEngine, Sample, SamplingParams
from rlmesh.rl.roles.defaults import choose_device, keep_objects, run_settings
from rlmesh.rl.roles.device_turns import TakesTurns
from rlmesh.rl.roles.sampling import ROLLOUT, SamplingRole, submit_groups
from rlmesh.rl.rollout.requests import GroupRequest

if TYPE_CHECKING:
    from rlmesh.rl.trainers.run import Run

__all__ = ["RolloutRole", "make_rollout_engine"]


class RolloutRole(SamplingRole, TakesTurns, ReceivesWeights):
    """Samples responses. Override `make_engine` for an engine of your own."""

    engine: RolloutEngine

    def setup(self) -> None:
        self.run_settings: Run = run_settings()
        self.turns = self.make_turns()
        with self.turns.lease():
            self.engine = self.make_engine()
            self.add_engine()
        self.receive_weights(self.engine.sink)
        keep_objects()

    def teardown(self) -> None:
        self.close_episodes()
        self.close_weights()
        if "engine" in self.__dict__:
            self.engine.close()

    def make_engine(self) -> RolloutEngine:
        """Make the engine, which serves nothing before the first push of weights."""
        return make_rollout_engine(self.run_settings, sleeps=self.turns.leased)

    @rpc
    def hold_devices(self) -> None:
        """Keep the devices until `release_devices`, with the engine awake, so that weights can be pushed to it."""
        super().hold_devices()
        with self.turns.turn(ROLLOUT):
            pass

    def sampling_engine(self) -> RolloutEngine:
        return self.engine

    @rpc(concurrent=4096)
    async def sample(self, requests: Sequence[GroupRequest], params: SamplingParams) -> list[list[Sample]]:
        """The samples of each request, with the requests' own seeds.

        Calls run concurrently with each other and with pushes, so the engine must not share its devices.
        """
        futures = await asyncio.to_thread(submit_groups, self.engine, requests, params)
        try:
            samples = iter(await first_error_or_all(futures))
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        return [[next(samples) for _ in request.seeds] for request in requests]


async def first_error_or_all(futures: Sequence[Future[Sample]]) -> list[Sample]:
    """The results of all futures, or the first error, with one wake-up of the loop for all of them."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    left, lock = len(futures), threading.Lock()

    def end() -> None:
        if not over.done():
            over.set_result(None)

    def count(future: Future[Sample]) -> None:
        nonlocal left
        with lock:
            left -= 1
            ends = left == 0
        if ends or future.cancelled() or future.exception() is not None:
            with suppress(RuntimeError):  # the loop has ended, and nobody waits
                loop.call_soon_threadsafe(end)

    for future in futures:
        future.add_done_callback(count)
    if futures:
        await over
    return [future.result(0) for future in futures if future.done()]


def make_rollout_engine(run: Run, *, sleeps: bool = False) -> RolloutEngine:
    """The engine that the settings of a run name.

    Args:
        run: the settings.
        sleeps: True if the engine shares its device: it then can free its memory, and keeps one copy of the weights.
    """
    settings = run.rollout
    if settings.engine == "transformers":
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from rlmesh.rl.engines.transformers import TransformersEngine

        device = choose_device(settings.threads)
        dtype = getattr(torch, settings.dtype)
        model = AutoModelForCausalLM.from_pretrained(run.model, dtype=dtype).eval().to(device)
        tokenizer = AutoTokenizer.from_pretrained(run.model)
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
        mode: dict[str, Any] = {"mode": "in_place"} if sleeps else {}
        if not run.schedule.drains:
            mode |= {"pause_mode": "keep", "keep_cache": True}
        options = {**mode, "lora": run.actor.lora.options(), "tokenizer": tokenizer, **settings.options}
        return TransformersEngine(model, pad_token_id=pad, **options)
    from rlmesh.rl.engines.vllm.async_engine import AsyncVllmEngine
    from rlmesh.rl.engines.vllm.sync_engine import VllmEngine

    kinds: dict[str, Any] = {"vllm": VllmEngine, "vllm-async": AsyncVllmEngine}
    longest = run.max_prompt_tokens + run.response_tokens
    asleep: dict[str, Any] = {"enable_sleep_mode": True} if sleeps else {}
    options = {"dtype": settings.dtype, "max_model_len": longest, **asleep, **settings.options}
    engine: RolloutEngine = kinds[settings.engine](run.model, **options)
    return engine
