"""Decode passes that are replayed: the same samples as without graphs, whatever comes and goes. No GPU: a recording
computes the pass again, with the weights whose memory it was recorded with."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlmesh.rl.engines.continuous import ContinuousBatch
from rlmesh.rl.engines.decode_graphs import DecodeGraphs, graphs_for, padded_rows, padded_width
from rlmesh.rl.engines.grouped_attention import grouped_attention, use_grouped_attention
from rlmesh.rl.engines.growing import Growing
from rlmesh.rl.engines.rollout import Sample, SamplingParams
from rlmesh.rl.engines.slots import SlotCache
from rlmesh.rl.engines.transformers import TransformersEngine
from tests.engines.models import END, VOCABULARY, sample_batch, tiny
from tests.engines.test_continuous import STOPS, alike, requests, windowed

COUNT = 12


class Recorder:
    """Records passes as a GPU would: a replay uses the memory that the weights had then."""

    def __init__(self, model: Any) -> None:
        self.tensors = [*model.parameters(), *model.buffers()]
        self.recorded = self.replayed = 0

    def __call__(self, compute: Callable[[], Tensor], logits: Tensor, pool: Any) -> Callable[[], None]:
        memory = [tensor.data for tensor in self.tensors]
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            now = [tensor.data for tensor in self.tensors]
            for tensor, held in zip(self.tensors, memory, strict=True):
                tensor.data = held
            with torch.no_grad():
                logits.copy_(compute())
            for tensor, held in zip(self.tensors, now, strict=True):
                tensor.data = held

        return replay


def with_graphs(model: Any, most: int = 64, record: Any = None) -> tuple[ContinuousBatch, Recorder, DecodeGraphs]:
    recorder = Recorder(model)
    graphs = DecodeGraphs(recorder.tensors, record or recorder)
    return ContinuousBatch(model, stop_token_ids=STOPS, most_rows=most, graphs=graphs), recorder, graphs


def alone(model: Any) -> list[Sample]:
    return [sample_batch(model, [prompt], params, stop_token_ids=STOPS)[0] for prompt, params in requests()[:COUNT]]


@cache
def expected(seed: int) -> list[Sample]:
    """The samples of `tiny` one by one."""
    return alone(tiny(seed))


def sample_all(batch: ContinuousBatch) -> list[Sample]:
    rows = [Growing(prompt, params) for prompt, params in requests()[:COUNT]]
    waiting = list(rows)
    while waiting or batch.rows:
        while waiting and batch.room:
            batch.add(waiting.pop(0))
        batch.step(0)
    return [row.sample() for row in rows]


@pytest.mark.parametrize("most", [3, 8, 64])
def test_replayed_as_computed(most: int) -> None:
    model = tiny(0)
    batch, recorder, graphs = with_graphs(model, most)
    alike(sample_all(batch), expected(0))
    assert graphs.works and recorder.replayed > 4 * recorder.recorded > 0
    recorded = graphs.count
    # An engine without requests keeps them for the next ones.
    batch.free()
    alike(sample_all(batch), expected(0))
    assert graphs.count == recorded
    batch.drop()
    assert graphs.count == 0 and batch._cache is None
    alike(sample_all(batch), expected(0))


def test_graphs_belong_to_the_memory_of_the_weights() -> None:
    """Weights that alternate between two sets of memory, as with two buffers, and ones that are overwritten."""
    model, other = tiny(0), tiny(1)
    own = [parameter.data for parameter in model.parameters()]
    new = [parameter.data.clone() for parameter in other.parameters()]
    batch, recorder, _ = with_graphs(model)
    counts = []
    for turn in range(6):
        for parameter, memory in zip(model.parameters(), (own, new)[turn % 2], strict=True):
            parameter.data = memory
        batch.restart()
        alike(sample_all(batch), expected(turn % 2))
        counts.append(recorder.recorded)
    assert counts[0] < counts[1] and counts[3] == counts[5]
    with torch.no_grad():
        for parameter, memory in zip(model.parameters(), own, strict=True):
            parameter.copy_(memory)
    batch.restart()
    alike(sample_all(batch), expected(0))
    assert recorder.recorded == counts[5]


def test_responses_go_on_when_their_weights_change() -> None:
    """The cache is computed anew in the memory that graphs know, or kept."""
    for keep in (False, True):
        found = []
        for graphs in (False, True):
            model, other = tiny(0), tiny(1)
            batch = with_graphs(model)[0] if graphs else ContinuousBatch(model, stop_token_ids=STOPS)
            rows = [Growing([5, 6 + row], SamplingParams(40, seed=row)) for row in range(9)]
            for row in rows:
                batch.add(row)
            for _ in range(12):
                batch.step(0)
            model.load_state_dict(other.state_dict())
            if not keep:
                batch.restart()
            while batch.rows:
                batch.step(1)
            found.append([row.sample() for row in rows])
        alike(found[1], found[0])


def grouped() -> Any:
    """A model whose four query heads share two key heads."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(1)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512, eos_token_id=END, bos_token_id=None,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    return model


def test_new_rows_wait_for_each_other() -> None:
    batch, recorder, _ = with_graphs(tiny(0), most=64)

    def add(count: int) -> list[Growing]:
        rows = [Growing([5, 6, 7 + row], SamplingParams(200, seed=row)) for row in range(count)]
        for row in rows:
            batch.add(row)
        return rows

    begun = add(40)
    while not recorder.recorded:
        batch.step(0)
    assert all(row.tokens for row in begun)
    few = add(1)
    counts = [len(few[0].tokens) for _ in range(9) if batch.step(0) is not None]
    assert counts == [0] * 8 + [2]
    many = add(3)
    batch.step(0)
    assert [len(row.tokens) for row in many] == [2, 2, 2]
    batch.remove(lambda row: row not in many)
    (last,) = add(1)
    batch.step(0)
    assert len(last.tokens) == 2, "few rows wait for nobody"


def fails(compute: Callable[[], Tensor], logits: Tensor, pool: Any) -> Callable[[], None]:
    raise RuntimeError("operation not permitted when stream is capturing\nmore")


def differs(compute: Callable[[], Tensor], logits: Tensor, pool: Any) -> Callable[[], None]:
    def replay() -> None:
        logits.copy_(compute() * 1.01)

    return replay


def forgets(compute: Callable[[], Tensor], logits: Tensor, pool: Any) -> Callable[[], None]:
    return lambda: None


@pytest.mark.parametrize(
    ("record", "why"), [(fails, r"when stream is capturing\)$"), (differs, "logits differ by"), (forgets, "nan")]
)
def test_without_graphs_if_they_cannot_be_trusted(record: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny(0)
    batch, _, graphs = with_graphs(model, record=record)
    with caplog.at_level(logging.WARNING):
        alike(sample_all(batch), expected(0))
    (warning,) = [entry for entry in caplog.records if "without CUDA graphs" in entry.getMessage()]
    assert not graphs.works and graphs.count == 0
    assert re.search(why, warning.getMessage())


def test_caches_of_another_kind_have_no_graphs() -> None:
    model = windowed()
    batch, recorder, _ = with_graphs(model)
    alike(sample_all(batch), alone(model))
    assert recorder.recorded == 0
    assert graphs_for(model) is None, "it is not on a GPU"


def test_an_engine_frees_graphs_when_it_sleeps_and_after_an_error() -> None:
    model = tiny(0)
    engine = TransformersEngine(model, version=0, stop_token_ids=STOPS)
    engine._batch, recorder, graphs = with_graphs(model)
    try:
        (first,) = engine.generate([[5, 6, 7]], SamplingParams(20, seed=1))
        assert graphs.count
        engine.sleep(1)
        assert graphs.count == 0
        engine.wake()
        alike(engine.generate([[5, 6, 7]], SamplingParams(20, seed=1)), [first])
        assert graphs.count
        handle = model.register_forward_pre_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.generate([[5, 6, 7]], SamplingParams(20, seed=1))
        handle.remove()
        alike(engine.generate([[5, 6, 7]], SamplingParams(20, seed=1)), [first])
        assert recorder.recorded == 3
    finally:
        engine.close()


def test_sizes_are_few_and_large_enough() -> None:
    for rounded, step in ((padded_rows, 64), (padded_width, 256)):
        sizes = [rounded(count) for count in range(1, 4097)]
        assert all(count <= size for count, size in enumerate(sizes, 1)) and sizes == sorted(sizes)
        assert all(size <= max(2 * count, count + step) for count, size in enumerate(sizes, 1))
        assert all(rounded(size) == size for size in sizes)
    assert len({padded_rows(count) for count in range(1, 257)}) == 7
    assert len({padded_width(count) for count in range(1, 4097)}) <= 16


@pytest.mark.parametrize("added", [False, True])
def test_grouped_attention_is_that_of_repeated_keys(added: bool) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(3, 6, 1, 8).double(), torch.randn(3, 2, 11, 8).double()
    value = torch.randn(3, 2, 11, 8).double()
    attend = torch.arange(11) <= torch.tensor([[3], [10], [0]])
    mask = attend[:, None, None]
    if added:
        mask = torch.zeros(3, 1, 1, 11).double().masked_fill(~mask, -torch.inf)
    found, _ = grouped_attention(SimpleNamespace(num_key_value_groups=3), query, key, value, mask, scaling=0.3)
    for row, (head, place) in enumerate(zip([0, 4, 5], [3, 10, 0], strict=True)):
        keys, values = key[row, head // 3, : place + 1].numpy(), value[row, head // 3, : place + 1].numpy()
        scores = np.exp(0.3 * keys @ query[row, head, 0].numpy())
        np.testing.assert_allclose(found[row, 0, head].numpy(), scores / scores.sum() @ values, atol=1e-12)


def test_a_model_with_grouped_attention_says_the_same() -> None:
    model = grouped()
    wanted = alone(model)
    use_grouped_attention(model)
    assert model.config._attn_implementation == "rlmesh_grouped"
    batch = with_graphs(model)[0]
    alike(sample_all(batch), wanted)
    assert isinstance(batch._cache, SlotCache)
