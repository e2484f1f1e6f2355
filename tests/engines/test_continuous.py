"""Requests that are sampled together: the same samples as one by one, whoever comes and goes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlmesh.errors import UsageError
from rlmesh.rl import reference
from rlmesh.rl.correction import Correction, correct
from rlmesh.rl.engines.continuous import ContinuousBatch
from rlmesh.rl.engines.growing import Growing, completes
from rlmesh.rl.engines.rollout import Sample, SamplingParams
from rlmesh.rl.engines.sampling import draw, kept_mass, log_distribution, penalised
from rlmesh.rl.engines.slots import SlotCache, WholeCache
from rlmesh.rl.engines.transformers import TransformersEngine
from rlmesh.rl.types import Episode
from tests.engines.models import END, VOCABULARY, sample_batch, tiny

STOPS = [END, *range(20, 24)]
LENGTHS = np.random.default_rng(3).lognormal(2.2, 0.9, 24).astype(int).clip(1, 60).tolist()
PARAMS = [
    SamplingParams(1, temperature=0),
    SamplingParams(1),
    SamplingParams(1, temperature=0.8, top_p=0.7, top_k=12),
    SamplingParams(1, min_p=0.05, repetition_penalty=1.2),
    SamplingParams(1, presence_penalty=0.5, frequency_penalty=0.3),
]


def windowed() -> Any:
    """A model whose cache slots cannot hold."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(1)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512, eos_token_id=END, bos_token_id=None,
            use_sliding_window=True, sliding_window=8, max_window_layers=1,
        )
    ).eval()  # fmt: skip


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 7 tokens, some of them equal; lengths from a few tokens to dozens; all kinds of parameters."""
    return [
        ([5 + (number // 2) % 9, *range(10, 10 + number % 7)], replace(kind, max_tokens=length, seed=number))
        for number, (length, kind) in enumerate(zip(LENGTHS, itertools.cycle(PARAMS), strict=False))
    ]


def alone(model: Any) -> list[Sample]:
    return [sample_batch(model, [prompt], params, stop_token_ids=STOPS)[0] for prompt, params in requests()]


def alike(together: list[Sample], one_by_one: list[Sample]) -> None:
    for number, (mine, other) in enumerate(zip(together, one_by_one, strict=True)):
        assert (mine.token_ids, mine.finish_reason) == (other.token_ids, other.finish_reason), number
        assert mine.log_probs == pytest.approx(other.log_probs, abs=1e-4)
        assert mine.kept_log_mass == (
            None if other.kept_log_mass is None else pytest.approx(other.kept_log_mass, abs=1e-4)
        )


@pytest.mark.parametrize(("make", "kind"), [(lambda: tiny(0), SlotCache), (windowed, WholeCache)])
@pytest.mark.parametrize("most", [8, *(pytest.param(count, marks=pytest.mark.slow) for count in (3, 64))])
def test_together_as_alone(make: Any, kind: type, most: int) -> None:
    """Greedy, and with a seed for each request, whatever else is in the batch."""
    model = make()
    batch = ContinuousBatch(model, stop_token_ids=STOPS, most_rows=most)
    rows = [Growing(prompt, params) for prompt, params in requests()]
    waiting, widest = list(rows), 0
    while waiting or batch.rows:
        while waiting and batch.room:
            batch.add(waiting.pop(0))
        batch.step(0)
        assert batch._cache is None or type(batch._cache) is kind
        widest = max(widest, len(batch.rows))
    assert widest <= most
    alike([row.sample() for row in rows], alone(model))
    assert len({row.finish_reason for row in rows}) == 2


def test_together_as_alone_by_futures() -> None:
    model = tiny(0)
    engine = TransformersEngine(model, version=0, max_batch=5, stop_token_ids=STOPS)
    try:
        futures = [engine.submit(prompt, params) for prompt, params in requests()]
        alike([future.result(60) for future in futures], alone(model))
        assert engine.metrics()["generated_tokens"] == sum(len(future.result().token_ids) for future in futures)
        prompts = [[5, 6, 7]] * 7
        wide = engine.generate(prompts, SamplingParams(30, seed=5))
        narrow = TransformersEngine(model, version=0, max_batch=2, stop_token_ids=STOPS)
        alike(narrow.generate(prompts, SamplingParams(30, seed=5)), wide)
        assert len({tuple(sample.token_ids) for sample in wide}) > 1
        narrow.close()
    finally:
        engine.close()


def test_equal_prompts_are_computed_once() -> None:
    model = tiny(0)
    seen: list[int] = []
    model.register_forward_pre_hook(
        lambda module, args, options: seen.append(options["input_ids"].numel()), with_kwargs=True
    )
    samples = sample_batch(model, [[5, 6, 7, 8]] * 6, SamplingParams(3, seed=1), stop_token_ids=[])
    assert seen == [4, 6, 6] and {len(sample.token_ids) for sample in samples} == {3}


def test_a_request_that_is_cancelled_makes_room() -> None:
    engine = TransformersEngine(tiny(0), version=0, max_batch=1, stop_token_ids=[])
    try:
        long, short = (engine.submit([5, 6], SamplingParams(count, seed=1)) for count in (450, 3))
        assert long.cancel()
        assert len(short.result(60).token_ids) == 3
        with pytest.raises(CancelledError):
            long.result(1)
        left = engine.submit([5, 6], SamplingParams(450, seed=1))
    finally:
        engine.close()
    with pytest.raises(UsageError, match="was closed"):
        left.result(60)
    with pytest.raises(UsageError, match="is closed"):
        engine.submit([5], SamplingParams(1))


class Letters:
    """A tokenizer of one letter per token; `decode` is asked for few tokens at a time."""

    longest = 0

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        self.longest = max(self.longest, len(ids))
        return "".join(chr(33 + token) for token in ids)


def test_a_stop_text_ends_a_response_with_the_token_that_completes_it() -> None:
    tokenizer = Letters()
    engine = TransformersEngine(tiny(0), version=0, tokenizer=tokenizer, stop_token_ids=[])
    try:
        (free,) = engine.generate([[5, 6, 7]], SamplingParams(40, seed=2))
        text = tokenizer.decode(free.token_ids[20:23])
        (cut,) = engine.generate([[5, 6, 7]], SamplingParams(40, seed=2, stop=("never!!", text)))
        end = next(i for i in range(41) if text in tokenizer.decode(free.token_ids[:i]))
        tokenizer.longest = 0
        assert cut.token_ids == free.token_ids[:end] and cut.finish_reason == "stop"
        assert cut.log_probs == pytest.approx(free.log_probs[:end], abs=1e-5)
        engine.generate([[5, 6, 7]], SamplingParams(40, seed=2, stop=("never",)))
        assert 0 < tokenizer.longest <= 9
    finally:
        engine.close()
    bare = TransformersEngine(tiny(0), version=0)
    with pytest.raises(UsageError, match=r"stop=\('x',\): the engine has no tokenizer"):
        bare.generate([[5]], SamplingParams(1, stop=("x",)))


def test_several_tokens_at_once_are_cut_at_a_stop_text() -> None:
    row = Growing([1], SamplingParams(9, stop=("cd",)), decode=Letters().decode)
    row.add([ord(letter) - 33 for letter in "abcdef"], [-1.0] * 6, 0)
    assert len(row.tokens) == 4 and row.finish_reason == "stop" and len(row.sample().log_probs) == 4
    assert completes([ord("é") - 33], ("é",), lambda ids: "é") and not completes([], ("a",), lambda ids: "a")


def test_penalties_are_those_of_the_definition() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5, 0.0]], dtype=torch.float64)
    seen = torch.tensor([[True, True, False, False]])
    counts = torch.tensor([[3, 0, 0, 0]])
    params = SamplingParams(1, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.1)
    found = penalised(logits, params, seen=seen, counts=counts)
    assert found.dtype == torch.float64
    assert found[0].tolist() == pytest.approx([2.0 / 2 - 0.3 - 0.25, -2.0, 0.5, 0.0])
    # Greedily, a token that was just said is not said again.
    (sample,) = sample_batch(tiny(0), [[5]], SamplingParams(20, 0, repetition_penalty=1e6), stop_token_ids=[])
    assert len(set(sample.token_ids)) == len(sample.token_ids)


def test_min_p_keeps_what_is_likely_enough() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1]], dtype=torch.float64).log()
    kept = log_distribution(logits, SamplingParams(1, min_p=0.3)).exp()
    assert kept.dtype == torch.float64
    assert kept[0].tolist() == pytest.approx([0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0])
    mass = kept_mass(logits, kept.log(), SamplingParams(1, min_p=0.3))
    assert mass.exp().tolist() == pytest.approx([0.9])


@pytest.mark.parametrize("params", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 5, "top_p": 0.8}])
def test_ratios_under_truncated_sampling_by_enumeration(params: dict[str, Any]) -> None:
    """All sequences of three tokens over a vocabulary of six, with their exact probabilities under the engine.

    With the mass, the ratio of a trainer with the engine's weights is 1, so the weighed mean of any reward is that of
    the samples; for another trainer it is the ratio of the two policies at each token. Without the mass, each token's
    ratio would be off by the mass that was left out.
    """
    how = SamplingParams(1, temperature=0.7, **params)
    generator = torch.Generator().manual_seed(5)
    size = 6

    def table(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    engine = [table(size**place, size) for place in range(3)]
    trainer = [logits + 0.3 * table(*logits.shape) for logits in engine]
    sequences = list(itertools.product(range(size), repeat=3))
    reward = table(len(sequences))
    total, weighed, plain, expected = 0.0, 0.0, 0.0, 0.0
    for sequence, value in zip(sequences, reward.tolist(), strict=True):
        prefixes = [sum(token * size**i for i, token in enumerate(sequence[:place])) for place in range(3)]
        sampled, masses, mine, same = [], [], [], []
        for place, (token, prefix) in enumerate(zip(sequence, prefixes, strict=True)):
            log_probs = log_distribution(engine[place][prefix : prefix + 1], how)
            sampled.append(log_probs[0, token].item())
            masses.append(kept_mass(engine[place][prefix : prefix + 1], log_probs, how).item())
            same.append((engine[place][prefix] / 0.7).log_softmax(-1)[token].item())
            mine.append((trainer[place][prefix] / 0.7).log_softmax(-1)[token].item())
        probability = math.exp(sum(sampled))
        if probability == 0:
            continue
        sample = Sample([0], list(sequence), sampled, "length", [(0, 0, 3)], masses)
        whole = torch.from_numpy(Episode.of(sample).sampled_log_probs[1:].astype(np.float64)).unsqueeze(0)
        mask = torch.ones(1, 3, dtype=torch.bool)
        wide = Correction("sequence", upper=1e9)
        on_policy = correct(torch.tensor([same]).double(), whole, mask, wide).weights
        assert on_policy.tolist()[0] == pytest.approx([1.0] * 3, abs=1e-5)
        off_policy = correct(torch.tensor([mine]).double(), whole, mask, wide).weights[0, 0].item()
        assert off_policy == pytest.approx(math.exp(sum(mine) - sum(same)), rel=1e-5)
        twin = reference.whole_vocabulary(np.array([sampled]), np.array([masses]), np.ones((1, 3), np.bool_))
        assert np.allclose(twin, [same], atol=1e-12)
        total += probability
        weighed += probability * off_policy * value
        plain += probability * math.exp(sum(mine) - sum(sampled)) * value
        # π restricted to what the engine can sample, each token's probability divided by the mass that was kept.
        expected += math.exp(sum(mine) - sum(masses)) * value
    assert total == pytest.approx(1.0, abs=1e-9), "the engine's probabilities are those of a distribution"
    assert weighed == pytest.approx(expected, abs=1e-4)
    assert abs(plain - expected) > 1e-3


def test_mass_of_samples_makes_them_those_of_the_whole_vocabulary() -> None:
    model = tiny(0, sharpness=2.0).double()
    (sample,) = sample_batch(model, [[5, 6, 7]], SamplingParams(20, 0.9, top_p=0.6, seed=3), stop_token_ids=[])
    ids = torch.tensor([[*sample.prompt_token_ids, *sample.token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, 2:-1] / 0.9
    wanted = logits.log_softmax(-1).gather(-1, ids[0, 3:].unsqueeze(-1)).squeeze(-1)
    assert sample.kept_log_mass is not None
    whole = np.array(sample.log_probs) + sample.kept_log_mass
    np.testing.assert_allclose(whole, wanted.numpy(), atol=1e-6)
    assert min(sample.kept_log_mass) < math.log(0.95) and max(sample.kept_log_mass) <= 0
    assert sample_batch(model, [[5]], SamplingParams(2, seed=3), stop_token_ids=[])[0].kept_log_mass is None
    with pytest.raises(ValueError, match="as many masses"):
        replace(sample, kept_log_mass=[0.0])


def test_rows_of_a_batch_keep_float64() -> None:
    logits = torch.randn(3, 5, dtype=torch.float64)
    generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
    assert draw(logits, SamplingParams(1), generators).log_probs.dtype == torch.float64
