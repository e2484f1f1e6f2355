"""`RolloutRole`: an engine that samples with the weights of the last push."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from rlmesh import ReceivesWeights, current_worker, rpc
from rlmesh.rl.engines.rollout import RolloutEngine, Sample, SamplingParams
from rlmesh.rl.roles.defaults import choose_device, keep_objects, run_settings
from rlmesh.rl.roles.playing import ROLLOUT, PlaysEpisodes
from rlmesh.rl.roles.turns import TakesTurns
from rlmesh.rl.rollout.requests import GroupRequest

if TYPE_CHECKING:
    from rlmesh.rl.trainers.run import Run

__all__ = ["ROLLOUT", "RolloutRole", "engine_params", "make_rollout_engine"]

logger = logging.getLogger(__name__)

SAMPLE_S = 24 * 3600.0
"""Seconds after which a response is given up that no other limit has ended."""
LOST_CODE = 70
"""Exit code of a member whose engine lost its own process."""
SEEDS = 1009
"""Seeds per call. Engine n takes the n-th of them, so that no two engines or calls share a seed."""


class RolloutRole(PlaysEpisodes, TakesTurns, ReceivesWeights):
    """Samples responses. Override `make_engine` for an engine of your own."""

    engine: RolloutEngine

    def setup(self) -> None:
        self.run_settings: Run = run_settings()
        self.rank = current_worker().rank
        self.turns = self.make_turns()
        with self.turns.lease():
            self.engine = self.make_engine()
            if hasattr(self.engine, "on_lost"):
                self.engine.on_lost = end_process
            # Level 2 drops the weights: after each sleep, a push comes before the next sample.
            self.turns.add(ROLLOUT, wake=self.engine.wake, sleep=lambda: self.engine.sleep(2))
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

    @rpc
    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Sample]:
        """One sample per prompt. The engine's seed is derived from the call's seed and the rank."""
        with self.turns.turn(ROLLOUT):
            return self.engine.generate(prompts, engine_params(params, self.rank))

    def sampling_engine(self) -> RolloutEngine:
        return self.engine

    @rpc(concurrent=4096)
    async def sample(self, requests: Sequence[GroupRequest], params: SamplingParams) -> list[list[Sample]]:
        """The samples of each request, with the requests' own seeds.

        Calls run concurrently with each other and with pushes, so the engine must not share its devices.

        """
        futures = await asyncio.to_thread(submit_groups, self.engine, requests, params)
        try:
            samples = iter(await asyncio.gather(*map(asyncio.wrap_future, futures)))
        finally:
            for future in futures:
                future.cancel()
        return [[next(samples) for _ in request.seeds] for request in requests]

    @rpc
    def sample_in_turn(self, requests: Sequence[GroupRequest], params: SamplingParams) -> list[list[Sample]]:
        """As `sample`, for an engine that shares its devices."""
        with self.turns.turn(ROLLOUT):
            return sample_groups(self.engine, requests, params)


def end_process(why: str) -> None:
    """End this process, since the engine's own process has ended: a restart of the member starts a new one."""
    logger.critical("%s", why)
    logging.shutdown()
    os._exit(LOST_CODE)


def submit_groups(
    engine: RolloutEngine, requests: Sequence[GroupRequest], params: SamplingParams
) -> list[Future[Sample]]:
    """Submit the responses of requests to an engine; returns one future per response, in order."""
    prompts = [request.prompt for request in requests for _ in request.seeds]
    each = [dataclasses.replace(params, seed=seed) for request in requests for seed in request.seeds]
    submit_all = getattr(engine, "submit_all", None)
    if submit_all is None:
        return [engine.submit(prompt, own) for prompt, own in zip(prompts, each, strict=True)]
    found: list[Future[Sample]] = submit_all(prompts, each)
    return found


def sample_groups(
    engine: RolloutEngine, requests: Sequence[GroupRequest], params: SamplingParams
) -> list[list[Sample]]:
    """The samples of each request; waits for them."""
    futures = submit_groups(engine, requests, params)
    try:
        samples = iter([future.result(SAMPLE_S) for future in futures])
    finally:
        for future in futures:
            future.cancel()
    return [[next(samples) for _ in request.seeds] for request in requests]


def engine_params(params: SamplingParams, rank: int) -> SamplingParams:
    """The parameters for one engine, with a seed that is derived from the call's seed and the engine's rank."""
    seed = None if params.seed is None else params.seed * SEEDS + rank
    return dataclasses.replace(params, seed=seed)


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
