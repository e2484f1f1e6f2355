"""What is of the transformers engine alone; what every engine must do is in `conformance`."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rlmesh.errors import UsageError, WeightsNotReady
from rlmesh.rl.engines import continuous
from rlmesh.rl.engines.prompts import checked_params, checked_rows
from rlmesh.rl.engines.rollout import SamplingParams
from rlmesh.rl.engines.sampling import draw, log_distribution
from rlmesh.rl.engines.slots import prefill
from rlmesh.rl.engines.transformers import TransformersEngine
from tests.engines.models import PROBE, PROMPTS, largest_gap, log_probs_of, tiny


def test_the_distribution_is_what_is_left_of_the_softmax() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 3.0, 3.0, 0.5]])
    plain = (logits / 0.5).log_softmax(-1)
    torch.testing.assert_close(log_distribution(logits, SamplingParams(1, temperature=0.5)), plain)
    torch.testing.assert_close(log_distribution(logits, SamplingParams(1, temperature=0)), logits.log_softmax(-1))
    two = log_distribution(logits, SamplingParams(1, top_k=2)).exp()
    assert (two > 0).sum(-1).tolist() == [2, 2] and two.sum(-1).tolist() == pytest.approx([1, 1])
    assert two[0, 0].item() == pytest.approx(torch.tensor([2.0, 1.0]).softmax(-1)[0].item())
    # 0.644, 0.237, 0.087, 0.032: the smallest set that reaches 0.65 has two, that reaches 0.64 has one.
    assert (log_distribution(logits[:1], SamplingParams(1, top_p=0.65)).exp() > 0).sum() == 2
    assert (log_distribution(logits[:1], SamplingParams(1, top_p=0.64)).exp() > 0).sum() == 1


def test_draws_have_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).repeat(20_000, 1)
    params = SamplingParams(1, temperature=1.3, top_k=3)
    tokens, log_probs, mass = draw(logits, params, torch.Generator().manual_seed(0))
    wanted = log_distribution(logits[:1], SamplingParams(1, temperature=1.3, top_k=3))[0]
    seen = torch.bincount(tokens, minlength=4) / len(tokens)
    torch.testing.assert_close(seen, wanted.exp(), atol=0.02, rtol=0)
    torch.testing.assert_close(log_probs, wanted[tokens])
    whole = (logits[0] / 1.3).softmax(-1)
    torch.testing.assert_close(mass, (1 - whole[3]).log().expand(len(mass)))


def test_prompts_of_arrays_are_lists_of_ids() -> None:
    assert checked_rows(np.array([[1, 2], [3, 4]]), 5, what="prompt") == [[1, 2], [3, 4]]
    assert checked_rows([torch.tensor([1, 2]), (3,), [np.int64(4)]], 5, what="prompt") == [[1, 2], [3], [4]]
    assert checked_rows([], 5, what="prompt") == []
    row = [1, 2]
    first, second, other = checked_rows([row, row, [1, 2]], 5, what="prompt")
    assert first is second is not other is not row and first == other == [1, 2]
    with pytest.raises(UsageError, match=r"prompt 0 has id 2 at place 1.*prompt 1 has id 2 at place 1"):
        checked_rows([row, row], 2, what="prompt")

    def changing() -> Iterator[list[int]]:
        for last in range(3):
            row[1] = last
            yield row

    assert checked_rows(changing(), 5, what="prompt") == [[1, 0], [1, 1], [1, 2]]
    with pytest.raises(UsageError, match=r"of 9 prompts, .*4 more\. Nothing was sampled"):
        checked_rows([[]] * 9, None, what="prompt")
    with pytest.raises(UsageError, match=r"params are SamplingParams\(max_tokens=…\), not 4 \(int\)"):
        checked_params(4)


@pytest.mark.parametrize("params", [{"max_tokens": 0}, {"temperature": -1}, {"top_p": 0}, {"top_k": -1},
                                    {"max_tokens": 2.5}, {"max_tokens": "4"}, {"temperature": float("nan")},
                                    {"temperature": float("inf")}, {"top_p": float("nan")}, {"top_k": 1.5},
                                    {"temperature": None}, {"seed": 1.5}, {"stop_token_ids": 3},
                                    {"stop_token_ids": ("a",)}, {"min_p": 1.0}, {"min_p": -0.1},
                                    {"repetition_penalty": 0}, {"presence_penalty": 2.5}, {"frequency_penalty": None},
                                    {"stop": "end"}, {"stop": ("",)}, {"stop": (3,)}])  # fmt: skip
def test_parameters_that_mean_nothing_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="max_tokens must be"):
        SamplingParams(**{"max_tokens": 1, **params})


def test_asleep_at_level_2_it_holds_no_weights_and_wakes_without_a_version() -> None:
    model = tiny(0)
    engine = TransformersEngine(model, version=3)
    before = log_probs_of(model, PROBE)
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine.sleep(2)
    assert sum(tensor.untyped_storage().nbytes() for tensor in model.state_dict().values()) == 0
    with pytest.raises(WeightsNotReady, match=r"sleeps \(level 2\)"):
        engine.generate(PROMPTS, SamplingParams(1))
    engine.wake()
    assert engine.version is None
    with pytest.raises(WeightsNotReady, match="gave its weights up"):
        engine.generate(PROMPTS, SamplingParams(1))
    engine.sink.begin(4)
    engine.sink.stage(kept, keep=False)
    engine.sink.flip(4)
    engine.gate.set_version(4)
    assert largest_gap(engine.log_probs(PROBE), before) < 1e-5


def bytes_of_tensors() -> int:
    """The memory of all tensors that Python can reach, or has not collected yet."""
    storages = {}
    for found in gc.get_objects():
        if isinstance(found, torch.Tensor):
            storages[found.untyped_storage()._cdata] = found.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("level", [1, 2])
def test_asleep_it_keeps_no_cache_even_if_no_garbage_is_collected(level: Any) -> None:
    engine = TransformersEngine(tiny(0), version=3, mode="in_place", stop_token_ids=[])
    gc.collect()
    gc.disable()
    try:
        before = bytes_of_tensors()
        weights = sum(tensor.untyped_storage().nbytes() for tensor in engine.model.state_dict().values())
        engine.generate(PROMPTS, SamplingParams(100))
        engine.sleep(level)
        left = bytes_of_tensors()
    finally:
        gc.enable()
    # A cache of 128 places takes more than what is tolerated here.
    assert left - before + (weights if level == 2 else 0) < 4096
    engine.close()


def test_a_response_ends_at_its_time_limit_with_the_tokens_that_it_has() -> None:
    seconds = itertools.count()
    engine = TransformersEngine(tiny(0), version=1, stop_token_ids=[], clock=lambda: float(next(seconds)))
    params = [SamplingParams(200, time_limit_s=limit_s, seed=1) for limit_s in (60.0, None)]
    limited, whole = [future.result(60) for future in engine.submit_all(PROMPTS[:2], params)]
    assert limited.finish_reason == "time" and 0 < len(limited.token_ids) < 200
    assert whole.finish_reason == "length" and len(whole.token_ids) == 200
    (alone,) = engine.generate(PROMPTS[1:2], SamplingParams(200, seed=1))
    assert alone.token_ids == whole.token_ids, "the other one goes on undisturbed"
    engine.close()


@pytest.mark.parametrize("keep_cache", [True, False])
def test_kept_responses_go_on_with_the_cache_that_they_have(monkeypatch: pytest.MonkeyPatch, keep_cache: bool) -> None:
    """The same weights come as another version: nothing changes, and with ``keep_cache`` nothing is computed again."""
    model = tiny(0)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    params = SamplingParams(30, seed=3)
    (calm,) = TransformersEngine(tiny(0), version=1, stop_token_ids=[]).generate(PROMPTS[:1], params)
    engine = TransformersEngine(model, version=1, stop_token_ids=[], pause_mode="keep", keep_cache=keep_cache)
    contexts: list[int] = []

    def counted(model: Any, rows: Any, *args: Any) -> Any:
        contexts.extend(map(len, rows))
        return prefill(model, rows, *args)

    def flip(self: Any, version: int) -> Any:
        if len(self.rows) == 1 and len(self.rows[0].tokens) == 10 and engine.gate.version == 1:
            engine.sink.begin(2)
            engine.sink.stage(weights, keep=False)
            engine.sink.flip(2)
            engine.gate.set_version(2)
        return step(self, version)

    step = continuous.ContinuousBatch.step
    monkeypatch.setattr(continuous, "prefill", counted)
    monkeypatch.setattr(continuous.ContinuousBatch, "step", flip)
    (sample,) = engine.generate(PROMPTS[:1], params)
    assert sample.token_ids == calm.token_ids
    assert [version for version, _, _ in sample.version_spans] == [1, 2]
    assert contexts == ([4] if keep_cache else [4, 4 + 11]), "the prompt, and what has been sampled until the push"
    engine.close()
