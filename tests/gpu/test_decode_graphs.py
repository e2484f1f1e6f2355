"""The engine's decode passes as CUDA graphs: the samples of plain passes, also across pushes, sleep and faults."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from rlmesh.rl.engines.decode_graphs import graphs_for
from rlmesh.rl.engines.rollout import Sample, SamplingParams
from rlmesh.rl.engines.transformers import TransformersEngine
from tests.engines.models import END, VOCABULARY

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

PROMPTS = [[5 + row % 7, *range(10, 11 + row % 29)] for row in range(24)]


def build(seed: int = 0) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    model: Any = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=1024, eos_token_id=END, bos_token_id=None,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    return model.cuda()


def engine_of(model: Any, **options: Any) -> TransformersEngine:
    return TransformersEngine(model, version=0, stop_token_ids=[], **options)


def samples(engine: TransformersEngine) -> list[Sample]:
    greedy = engine.generate(PROMPTS, SamplingParams(70, temperature=0))
    return [*greedy, *engine.generate(PROMPTS, SamplingParams(70, seed=3, top_p=0.9))]


def alike(mine: list[Sample], other: list[Sample]) -> None:
    for number, (a, b) in enumerate(zip(mine, other, strict=True)):
        assert a.token_ids == b.token_ids, number
        assert a.log_probs == pytest.approx(b.log_probs, abs=1e-3)


def graphs_of(engine: TransformersEngine) -> Any:
    return engine._batch._graphs


def plain(seed: int) -> list[Sample]:
    engine = engine_of(build(seed), cuda_graphs=False)
    try:
        assert graphs_of(engine) is None
        return samples(engine)
    finally:
        engine.close()


def test_graphs_sample_what_passes_sample_across_changes_of_weights_and_sleep() -> None:
    wanted = plain(0), plain(1)
    model = build(0)
    engine = engine_of(model)
    try:
        alike(samples(engine), wanted[0])
        assert graphs_of(engine).works and graphs_of(engine).count
        own = [parameter.data for parameter in model.parameters()]
        new = [parameter.data.clone() for parameter in build(1).parameters()]
        for turn in (1, 0, 1, 0):  # the two buffers of a sink
            for parameter, memory in zip(model.parameters(), (own, new)[turn], strict=True):
                parameter.data = memory
            engine._batch.restart()
            alike(samples(engine), wanted[turn])
        held = torch.cuda.memory_allocated()
        engine.sleep(1)
        assert graphs_of(engine).count == 0 and torch.cuda.memory_allocated() < held
        engine.wake()
        alike(samples(engine), wanted[0])
        assert graphs_of(engine).works and graphs_of(engine).count
    finally:
        engine.close()


def test_a_model_that_asks_the_gpu_is_computed_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    wanted = plain(0)
    model = build(0)
    model.model.layers[1].register_forward_pre_hook(lambda module, args: (args[0].sum().item(), None)[1])
    engine = engine_of(model)
    try:
        with caplog.at_level(logging.WARNING):
            alike(samples(engine), wanted)
        assert not graphs_of(engine).works
        assert "without CUDA graphs" in caplog.text
        # The GPU and its allocator are as before.
        other = engine_of(build(1))
        alike(samples(other), plain(1))
        assert graphs_of(other).works and graphs_of(other).count
        other.close()
    finally:
        engine.close()


def test_other_threads_may_use_the_gpu_during_a_recording() -> None:
    import threading

    model = build(0)
    engine = engine_of(model)
    over = threading.Event()
    faults: list[BaseException] = []

    def compute() -> None:
        try:
            while not over.is_set():
                engine.log_probs([[5, 6, 7, 8]])
                torch.empty(1 << 20, device="cuda").normal_(generator=torch.Generator("cuda")).sum().item()
        except BaseException as error:
            faults.append(error)

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        alike(samples(engine), plain(0))
        assert graphs_of(engine).works and graphs_of(engine).count
    finally:
        over.set()
        thread.join(30)
        engine.close()
    assert not faults


def test_graphs_for_a_model_on_a_gpu() -> None:
    assert graphs_for(build()) is not None
