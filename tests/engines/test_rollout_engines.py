"""The suite of `conformance`, over all rollout engines."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from rlmesh.rl.engines.rollout import RolloutEngine
from rlmesh.rl.engines.transformers import TransformersEngine
from tests.engines.conformance import RolloutConformance

NO_VLLM = importlib.util.find_spec("vllm") is None


def with_vllm(test: Any) -> Any:
    """Skipped without vLLM; its own warnings are not ours to fail by."""
    for mark in (
        pytest.mark.slow,
        pytest.mark.engines,
        pytest.mark.timeout(300),
        pytest.mark.skipif(NO_VLLM, reason="vllm is not installed (make engines)"),
        pytest.mark.filterwarnings("ignore"),
    ):
        test = mark(test)
    return test


SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": 64 << 20,
}


class TestTransformers(RolloutConformance):
    mode = "double_buffer"

    @classmethod
    def make(cls, path: Path, **options: Any) -> RolloutEngine:
        model = AutoModelForCausalLM.from_pretrained(path).eval()
        return TransformersEngine(model, mode=cls.mode, pause_mode="keep", **options)

    def started(self, engine: RolloutEngine) -> Callable[[], bool]:
        return lambda: any(row.tokens for row in engine._batch.rows)  # type: ignore[attr-defined]


class TestTransformersTied(TestTransformers):
    tied = True


class TestTransformersInPlace(TestTransformers):
    mode = "in_place"


class OverVllm(RolloutConformance):
    def started(self, engine: RolloutEngine) -> Callable[[], bool]:
        return lambda: any(row.tokens for row, _ in list(engine._running.values()))  # type: ignore[attr-defined]


@with_vllm
class TestVllm(OverVllm):
    @classmethod
    def make(cls, path: Path, **options: Any) -> RolloutEngine:
        from rlmesh.rl.engines.vllm.sync_engine import VllmEngine

        return VllmEngine(str(path), pause_mode="keep", **SMALL, **options)


class TestVllmTied(TestVllm):
    tied = True


@with_vllm
class TestAsyncVllm(RolloutConformance):
    @classmethod
    def make(cls, path: Path, **options: Any) -> RolloutEngine:
        from rlmesh.rl.engines.vllm.async_engine import AsyncVllmEngine

        return AsyncVllmEngine(str(path), pause_mode="keep", **SMALL, **options)

    def started(self, engine: RolloutEngine) -> Callable[[], bool]:
        return lambda: any(each.tokens for each in list(engine._stretches.values()))  # type: ignore[attr-defined]


class TestAsyncVllmTied(TestAsyncVllm):
    tied = True
