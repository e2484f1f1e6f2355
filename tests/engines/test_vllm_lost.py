"""`AsyncVllmEngine` without vLLM: what it does when vLLM says that it cannot go on."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rlmesh.rl.engines.growing import Growing
from rlmesh.rl.engines.rollout import SamplingParams
from rlmesh.rl.engines.vllm.async_engine import AsyncVllmEngine, Stretch
from rlmesh.rl.engines.vllm.requests import RequestBatch


class Dead:
    """The outputs of requests to a vLLM whose core has raised an exception: its process still lives."""

    errored = True

    def get_nowait(self) -> None:
        raise RuntimeError("EngineCore encountered an issue")


def test_a_loss_is_told_before_requests_fail_of_it() -> None:
    engine: Any = AsyncVllmEngine.__new__(AsyncVllmEngine)
    told: list[str] = []
    versions: list[int | None] = []
    engine.gate = SimpleNamespace(who="ROLLOUT:0", set_version=lambda version, why: versions.append(version))
    engine._engine, engine._children, engine._is_lost = Dead(), [], False
    batches = [RequestBatch([Growing([1], SamplingParams(4))]) for _ in range(2)]

    def lost(why: str) -> None:
        told.append(why)
        assert not any(batch.done.is_set() for batch in batches), "callers would take it for an error of the request"

    engine.on_lost = lost
    for batch in batches:
        asyncio.run(engine._follow(batch.rows[0], Stretch("0", batch), Dead()))
    assert told == ["ROLLOUT:0: vLLM's process is gone: RuntimeError: EngineCore encountered an issue"]
    assert versions == [None] and all(batch.error is not None for batch in batches)


def test_a_loss_is_told_before_a_request_is_refused_for_it() -> None:
    engine: Any = AsyncVllmEngine.__new__(AsyncVllmEngine)
    told: list[str] = []
    engine.gate = SimpleNamespace(who="ROLLOUT:0", set_version=lambda version, why: None)
    engine._engine, engine._children, engine._is_lost, engine.on_lost = Dead(), [], False, told.append

    async def refused(row: Growing, batch: RequestBatch) -> None:
        raise RuntimeError("EngineCore encountered an issue")

    engine._add = refused
    with pytest.raises(RuntimeError, match="EngineCore"):
        asyncio.run(engine._submitted(RequestBatch([Growing([1], SamplingParams(4))])))
    assert len(told) == 1
