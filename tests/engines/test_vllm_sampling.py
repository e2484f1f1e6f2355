"""vLLM: truncation with its mass, penalties, stop texts, futures."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmesh.errors import UsageError, WeightSyncError
from rlmesh.rl.engines.rollout import SamplingParams
from rlmesh.rl.engines.sampling import kept_mass, log_distribution, penalised
from tests.engines.conformance import LONG
from tests.engines.models import END, VOCABULARY, save, tiny
from tests.engines.test_rollout_engines import with_vllm
from tests.engines.test_vllm import engine_of, until

GAP = 1e-4
TRUNCATED = [
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"min_p": 0.02, "top_k": 20, "top_p": 0.8},
    {"top_p": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
]


def make_tokenizer(folder: Path) -> Any:
    """One letter per token."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({chr(0x4E00 + token): token for token in range(VOCABULARY)}, unk_token="一"))
    tokenizer.decoder = Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    made.save_pretrained(folder)
    return made


class Suite:
    kind: str

    @pytest.fixture(scope="class")
    def made(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any, Any]]:
        """An engine, its model and its tokenizer."""
        folder = save(tiny(0, sharpness=2.0), tmp_path_factory.mktemp("tiny"))
        tokenizer = make_tokenizer(folder)
        engine = engine_of(self.kind, folder, version=1)
        engine.generate([[5]], SamplingParams(2, stop=("x",), top_p=0.9))
        yield engine, tiny(0, sharpness=2.0), tokenizer
        engine.close()
        del engine
        gc.collect()

    @pytest.mark.parametrize("options", TRUNCATED)
    def test_samples_carry_the_mass_that_truncation_keeps(self, made: Any, options: dict[str, Any]) -> None:
        engine, model, _ = made
        params = SamplingParams(10, temperature=0.8, seed=3, **options)
        plain = replace(params, top_k=0, top_p=1.0, min_p=0.0)
        # Beside requests of another kind, in one batch.
        other = engine.submit([7, 8], SamplingParams(10, seed=1))
        for sample in engine.generate([[5, 6, 7], [9, 10], [5]], params):
            tokens = torch.tensor([[*sample.prompt_token_ids, *sample.token_ids]])
            first = len(sample.prompt_token_ids)
            with torch.no_grad():
                logits = model(input_ids=tokens).logits[0, first - 1 : -1].float()
            assert sample.kept_log_mass is not None
            for place, token in enumerate(sample.token_ids):
                row = logits[place : place + 1]
                counts = torch.bincount(tokens[0, first : first + place], minlength=VOCABULARY).unsqueeze(0)
                seen = torch.bincount(tokens[0, : first + place], minlength=VOCABULARY).unsqueeze(0) > 0
                row = penalised(row, params, seen=seen, counts=counts)
                wanted = log_distribution(row, params)
                assert sample.log_probs[place] == pytest.approx(wanted[0, token].item(), abs=GAP)
                mass = kept_mass(row, wanted, params).item()
                assert sample.kept_log_mass[place] == pytest.approx(mass, abs=GAP)
                whole = log_distribution(row, plain)[0, token].item()
                assert sample.log_probs[place] + sample.kept_log_mass[place] == pytest.approx(whole, abs=GAP)
            assert min(sample.kept_log_mass) < -0.01
        assert other.result(60).kept_log_mass is None

    def test_a_stop_text_ends_a_response(self, made: Any) -> None:
        engine, _, tokenizer = made
        params = SamplingParams(40, seed=2)
        (free,) = engine.generate([[5, 6, 7]], params)
        text = tokenizer.decode(free.token_ids[10:12])
        (cut,) = engine.generate([[5, 6, 7]], replace(params, stop=("no!", text)))
        end = next(i for i in range(41) if text in tokenizer.decode(free.token_ids[:i]))
        assert cut.token_ids == free.token_ids[:end] and cut.finish_reason == "stop"

    def test_a_response_ends_at_its_time_limit_with_the_tokens_that_it_has(self, made: Any) -> None:
        engine, _, _ = made
        seed, free = self.longest(engine)
        params = replace(LONG, seed=seed)
        limited = engine.submit(free.prompt_token_ids, replace(params, time_limit_s=1e-6))
        other = engine.submit(free.prompt_token_ids, replace(params, time_limit_s=600.0))
        sample = limited.result(60)
        assert sample.finish_reason == "time" and 0 < len(sample.token_ids) < len(free.token_ids)
        assert sample.token_ids == free.token_ids[: len(sample.token_ids)]
        assert other.result(60).token_ids == free.token_ids, "the other one goes on undisturbed"
        running = engine._running if self.kind == "sync" else engine._stretches
        until(lambda: not running)

    def test_the_time_limit_goes_on_in_a_pause(self, made: Any) -> None:
        engine, _, _ = made
        seed, free = self.longest(engine)
        parts: list[int] = []
        limited = engine.submit(
            free.prompt_token_ids,
            replace(LONG, seed=seed, time_limit_s=1.0),
            on_tokens=lambda ids, _: parts.append(len(ids)),
        )
        begun = (
            (lambda: any(row.ends_at < math.inf for row, _ in list(engine._running.values())))
            if self.kind == "sync"
            else (lambda: any(each.timer is not None for each in list(engine._stretches.values())))
        )
        until(begun)
        engine.pause("keep")
        sampled = sum(parts)
        time.sleep(1.1)
        engine.resume()
        sample = limited.result(60)
        assert sample.finish_reason == "time" and len(sample.token_ids) == sum(parts)
        assert sum(parts) == sampled, "nothing is sampled after the pause"

    def longest(self, engine: Any) -> tuple[int, Any]:
        """Of some responses without a limit of time the longest one, and its seed."""
        futures = [engine.submit([5, 6, 7], replace(LONG, seed=seed)) for seed in range(16)]
        found = [future.result(60) for future in futures]
        return max(enumerate(found), key=lambda one: len(one[1].token_ids))

    def test_futures_can_be_cancelled(self, made: Any) -> None:
        engine, _, _ = made
        futures = [engine.submit([5, 6], replace(LONG, seed=seed)) for seed in range(4)]
        assert futures[0].cancel()
        assert {len(future.result(60).token_ids) > 0 for future in futures[1:]} == {True}
        running = engine._running if self.kind == "sync" else engine._stretches
        until(lambda: not running)

    def test_adapters_are_refused(self, made: Any) -> None:
        engine, _, _ = made
        with pytest.raises(WeightSyncError, match=r"has no adapters\. Push merged weights"):
            engine.sink.stage({"base_model.model.x.lora_A.weight": torch.zeros(1)}, keep=False)

    def test_kept_requests_whose_penalties_would_begin_anew_end(self, made: Any) -> None:
        engine, _, _ = made
        goes_on, ends = (
            engine.submit([5, 6], replace(LONG, frequency_penalty=penalty, stop_token_ids=(END,)))
            for penalty in (0.0, 0.1)
        )
        running = engine._running if self.kind == "sync" else engine._stretches
        until(lambda: len(running) == 2 or goes_on.done() or ends.done())
        engine.pause("keep")
        engine.resume()
        assert ends.result(60).finish_reason == "abort" or len(ends.result().token_ids) == LONG.max_tokens
        assert goes_on.result(60).finish_reason in ("stop", "length")


@with_vllm
class TestSync(Suite):
    kind = "sync"


@with_vllm
class TestAsync(Suite):
    kind = "async"


@with_vllm
def test_what_cannot_be_told_is_refused(tmp_path: Path) -> None:
    from rlmesh.rl.engines.vllm.carried_mass import carry_mass

    assert not carry_mass(object())
    engine = engine_of("sync", save(tiny(0), tmp_path / "model"), version=1)
    try:
        with pytest.raises(UsageError, match="stop: the engine finds texts with the tokenizer in"):
            engine.generate([[5]], SamplingParams(1, stop=("x",)))
        engine._carries_mass = False
        with pytest.raises(UsageError, match="does not tell how much probability"):
            engine.generate([[5]], SamplingParams(1, top_p=0.5))
        assert len(engine.generate([[5]], SamplingParams(1))) == 1
    finally:
        engine.close()
