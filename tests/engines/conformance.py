"""What every rollout engine must do, as a suite: subclass it and give it a ``make``.

The engine serves a tiny model from disk. Weights come as they do in a push: by the commands that a receiver gives.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmesh.errors import UsageError, WeightsNotReady, WeightSyncError
from rlmesh.rl.engines.rollout import RolloutEngine, Sample, SamplingParams
from tests.engines.models import END, PROBE, PROMPTS, largest_gap, log_probs_of, tiny

GAP = 1e-4
"""What float32 allows between an engine and a plain forward pass."""
LONG = SamplingParams(max_tokens=400, temperature=1.0, seed=7, stop_token_ids=())

WRONG: list[tuple[Any, str]] = [
    ([[]], "0 is empty"),
    ([[5, 6, 7], []], "1 is empty"),
    ([[5], [], [6], []], "1 is empty: .*; .* 3 is empty"),
    ([[5, 10**6]], "0 has id 1000000 at place 1, beyond the vocabulary of"),
    ([[5], [6, -1]], "1 has the negative id -1 at place 1"),
    ([[5, 1.5]], r"0 has 1.5 \(float\) at place 1"),
    ([[5, True]], r"0 has True \(bool\) at place 1"),
    ([[5, None]], "0 has None"),
    (["56"], r"0 is '56' \(str\)"),
    ([5, 6], r"0 is 5 \(int\)"),
    ("56", "a list with a list of token ids for each"),
    (None, "a list with a list of token ids for each"),
]
"""What is no prompt, and what is said of it."""


@dataclass
class Served:
    """An engine, and how to make it serve other weights."""

    engine: RolloutEngine
    model: Any
    tied: bool

    def begin(self, version: int) -> None:
        """As a receiver does for the first bucket of a push."""
        sink, gate = self.engine.sink, self.engine.gate
        if sink.mode == "in_place":
            gate.close("a push", 30)
            gate.set_version(None, "a push is under way")
        sink.begin(version)

    def stage(self, model: Any, *, parts: int = 3) -> None:
        """All weights, in several buckets that are reused; tied names come as one tensor."""
        state = dict(model.state_dict(keep_vars=True))
        names = list(state)
        for part in range(parts):
            owned: dict[int, Any] = {}
            bucket = {}
            for name in names[part::parts]:
                bucket[name] = owned.setdefault(id(state[name]), state[name].detach().clone())
            if self.tied and ("lm_head.weight" in bucket) != ("model.embed_tokens.weight" in bucket):
                bucket.pop("lm_head.weight", None)
                if "model.embed_tokens.weight" in bucket:
                    bucket["lm_head.weight"] = bucket["model.embed_tokens.weight"]
            self.engine.sink.stage(bucket, keep=False)
            for tensor in owned.values():
                tensor.fill_(float("nan"))  # the memory is somebody else's now

    def commit(self, version: int) -> None:
        sink, gate = self.engine.sink, self.engine.gate
        gate.close("a flip", 30)
        sink.flip(version)
        gate.set_version(version)
        conclude = getattr(sink, "conclude", None)
        if conclude is not None:
            conclude(version)
        gate.open()

    def push(self, model: Any, version: int) -> None:
        self.begin(version)
        self.stage(model)
        self.commit(version)
        self.model = model

    def fail(self) -> None:
        """The push under way is given up."""
        self.engine.sink.discard()
        self.engine.gate.open()


class Background:
    """A call on a thread of its own."""

    def __init__(self, function: Callable[[], list[Sample]]) -> None:
        self.samples: list[Sample] = []
        self.error: Exception | None = None

        def run() -> None:
            try:
                self.samples = function()
            except Exception as error:
                self.error = error

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def wait(self) -> Background:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self

    @property
    def running(self) -> bool:
        return self._thread.is_alive()


class RolloutConformance:
    """Subclasses give ``make`` and ``started``."""

    tied = False

    @classmethod
    @abstractmethod
    def make(cls, path: Path, **options: Any) -> RolloutEngine:
        """An engine of the model in this folder."""

    @abstractmethod
    def started(self, engine: RolloutEngine) -> Callable[[], bool]:
        """Whether requests that were made are being sampled."""

    def test_samples_have_the_log_probs_of_a_plain_forward_pass(self, served: Served) -> None:
        samples = served.engine.generate(PROMPTS, SamplingParams(max_tokens=12, seed=3))
        assert [sample.prompt_token_ids for sample in samples] == PROMPTS
        for sample in samples:
            assert 1 <= len(sample.token_ids) <= 12 and END not in sample.token_ids[:-1]
            assert sample.version_spans == [(1, 0, len(sample.token_ids))] and sample.policy_version == 1
            assert (sample.finish_reason == "stop") == (sample.token_ids[-1] == END)
            plain = log_probs_of(served.model, [[*sample.prompt_token_ids, *sample.token_ids]])[0]
            assert largest_gap([sample.log_probs], [plain[len(sample.prompt_token_ids) - 1 :]]) < GAP

    def test_log_probs_are_of_the_temperature_that_was_sampled_at(self, served: Served) -> None:
        (sample,) = served.engine.generate([[5, 6]], SamplingParams(max_tokens=1, temperature=0.5, seed=1))
        import torch

        with torch.no_grad():
            logits = served.model(input_ids=torch.tensor([[5, 6]])).logits[0, -1] / 0.5
        assert sample.log_probs[0] == pytest.approx(logits.log_softmax(-1)[sample.token_ids[0]].item(), abs=GAP)

    def test_greedy_takes_the_likeliest_token(self, served: Served) -> None:
        (sample,) = served.engine.generate([PROMPTS[0]], SamplingParams(max_tokens=4, temperature=0))
        import torch

        tokens = list(PROMPTS[0])
        for token in sample.token_ids:
            with torch.no_grad():
                assert token == served.model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax().item()
            tokens.append(token)

    def test_a_seed_decides_and_rows_differ(self, served: Served) -> None:
        prompts = [[5, 6, 7]] * 6
        first, again, other = (
            [s.token_ids for s in served.engine.generate(prompts, SamplingParams(max_tokens=8, seed=seed))]
            for seed in (11, 11, 12)
        )
        assert first == again != other and len({tuple(tokens) for tokens in first}) > 1

    def test_stop_tokens_end_a_response_and_belong_to_it(self, served: Served) -> None:
        (free,) = served.engine.generate([PROMPTS[0]], SamplingParams(max_tokens=6, temperature=0))
        stop = free.token_ids[2]
        (cut,) = served.engine.generate(
            [PROMPTS[0]], SamplingParams(max_tokens=6, temperature=0, stop_token_ids=(stop,))
        )
        assert cut.token_ids == free.token_ids[: free.token_ids.index(stop) + 1] and cut.finish_reason == "stop"

    def test_a_probe_is_a_plain_forward_pass(self, served: Served) -> None:
        assert largest_gap(served.engine.log_probs(PROBE), log_probs_of(served.model, PROBE)) < GAP

    def test_nothing_is_nothing(self, served: Served) -> None:
        assert served.engine.generate([], SamplingParams(1)) == [] and served.engine.log_probs([]) == []

    @pytest.mark.case("b12")
    def test_what_is_no_prompt_is_refused_before_anything_is_sampled(self, served: Served) -> None:
        before = served.engine.metrics()
        for rows, told in WRONG:
            for ask in (lambda rows: served.engine.generate(rows, LONG), served.engine.log_probs):
                with pytest.raises(UsageError, match=told):
                    ask(rows)
        with pytest.raises(UsageError, match="params are SamplingParams"):
            served.engine.generate([[5]], {"max_tokens": 1})  # type: ignore[arg-type]
        assert served.engine.metrics() == before

    @pytest.mark.case("b12")
    def test_a_sequence_of_one_token_has_no_log_probs(self, served: Served) -> None:
        assert served.engine.log_probs([[5]]) == [[]]
        (alone,) = served.engine.log_probs([[5, 6, 7]])
        one, three = served.engine.log_probs([[5], [5, 6, 7]])
        assert one == [] and three == pytest.approx(alone, abs=GAP)
        assert served.engine.log_probs(torch.tensor([[5, 6, 7]])) == pytest.approx(  # type: ignore[arg-type]
            [pytest.approx(alone, abs=GAP)]
        )

    @pytest.mark.case("O18")
    def test_after_a_push_it_says_what_the_new_weights_say(self, served: Served) -> None:
        """Several times, since a fault of one update may be hidden by the next."""
        for version in (2, 3, 4):
            served.push(tiny(version, tied=self.tied), version)
            assert served.engine.version == version
            assert largest_gap(served.engine.log_probs(PROBE), log_probs_of(served.model, PROBE)) < GAP
            for sample in served.engine.generate(PROMPTS, SamplingParams(max_tokens=6, seed=3)):
                assert sample.version_spans == [(version, 0, len(sample.token_ids))]
                plain = log_probs_of(served.model, [[*sample.prompt_token_ids, *sample.token_ids]])[0]
                assert largest_gap([sample.log_probs], [plain[len(sample.prompt_token_ids) - 1 :]]) < GAP

    def run_on(self, served: Served, count: int = 4) -> Background:
        """Long requests, which are under way when this returns."""
        running = Background(lambda: served.engine.generate([[5, 6, 7]] * count, LONG))
        end = time.monotonic() + 30
        while not self.started(served.engine)():
            assert running.running and time.monotonic() < end
            time.sleep(0.001)
        return running

    @pytest.mark.case("O17")
    def test_kept_requests_go_on_with_the_new_weights_and_say_so(self, served: Served) -> None:
        old, new = served.model, tiny(5, tied=self.tied)
        running = self.run_on(served)
        served.push(new, 2)
        samples = running.wait().samples
        assert running.error is None and len(samples) == 4
        assert any(len(sample.version_spans) == 2 for sample in samples), "none was under way"
        for sample in samples:
            tokens = [*sample.prompt_token_ids, *sample.token_ids]
            by = {1: log_probs_of(old, [tokens])[0], 2: log_probs_of(new, [tokens])[0]}
            assert sample.finish_reason in ("stop", "length") and sample.policy_version in (1, 2)
            for version, start, end in sample.version_spans:
                first = len(sample.prompt_token_ids) - 1
                assert largest_gap([sample.log_probs[start:end]], [by[version][first + start : first + end]]) < GAP

    def test_aborted_requests_end_where_they_are(self, served: Served) -> None:
        served.engine.pause_mode = "abort"  # type: ignore[attr-defined]
        running = self.run_on(served)
        served.push(tiny(5, tied=self.tied), 2)
        samples = running.wait().samples
        assert running.error is None and "abort" in {sample.finish_reason for sample in samples}
        assert all(version == 1 for sample in samples for version, _, _ in sample.version_spans)

    def test_with_wait_requests_run_to_their_end_first(self, served: Served) -> None:
        served.engine.pause_mode = "wait"  # type: ignore[attr-defined]
        running = self.run_on(served)
        served.push(tiny(5, tied=self.tied), 2)
        assert not running.wait().error
        for sample in running.samples:
            assert sample.version_spans == [(1, 0, len(sample.token_ids))]
            assert sample.finish_reason in ("stop", "length")

    def test_a_pause_that_is_not_over_in_time_is_given_up(self, served: Served) -> None:
        running = self.run_on(served)
        with pytest.raises(WeightSyncError, match=r"still (makes|serves) . .* after 0\.02 s|did not end in"):
            served.engine.pause("wait", timeout_s=0.02)
        assert running.wait().error is None and len(running.samples) == 4
        assert {sample.finish_reason for sample in running.samples} <= {"stop", "length"}
        assert len(served.engine.generate(PROMPTS, SamplingParams(2), timeout_s=30)) == 4

    @pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
    def test_paused_it_lets_nobody_in(self, served: Served, mode: Any) -> None:
        served.engine.pause(mode)
        waiting = Background(lambda: served.engine.generate(PROMPTS, SamplingParams(2)))
        with pytest.raises((TimeoutError, WeightsNotReady)):
            served.engine.generate(PROMPTS, SamplingParams(2), timeout_s=0.05)
        assert waiting.running
        served.engine.resume()
        assert len(waiting.wait().samples) == 4
        with pytest.raises(UsageError, match="this engine can"):
            served.engine.pause("stop")  # type: ignore[arg-type]

    @pytest.mark.case("O17")
    def test_a_push_that_fails_leaves_no_unknown_weights(self, served: Served) -> None:
        before = served.engine.log_probs(PROBE)
        in_place = served.engine.sink.mode == "in_place"
        running = self.run_on(served) if in_place else None
        served.begin(2)
        state = {k: v for k, v in tiny(9, tied=self.tied).state_dict().items() if "layers.0" in k}
        served.engine.sink.stage(state, keep=False)
        served.fail()
        if in_place:
            assert running is not None and isinstance(running.wait().error, WeightsNotReady)
            assert served.engine.version is None
            with pytest.raises(WeightsNotReady):
                served.engine.generate(PROMPTS, SamplingParams(1))
        else:
            assert served.engine.version == 1
            assert largest_gap(served.engine.log_probs(PROBE), before) < GAP
        served.push(tiny(6, tied=self.tied), 3)
        assert largest_gap(served.engine.log_probs(PROBE), log_probs_of(served.model, PROBE)) < GAP

    @pytest.mark.case("O18")
    def test_weights_that_are_not_all_there_are_not_served(self, served: Served) -> None:
        served.begin(2)
        state = {k: v for k, v in tiny(9, tied=self.tied).state_dict().items() if "layers.1.mlp.down" not in k}
        if self.tied:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        served.engine.sink.stage(state, keep=False)
        with pytest.raises(WeightSyncError, match=r"layers\.1\.mlp\.down"):
            served.engine.sink.flip(2)
        served.fail()
        served.push(tiny(6, tied=self.tied), 3)
        assert largest_gap(served.engine.log_probs(PROBE), log_probs_of(served.model, PROBE)) < GAP

    def test_asleep_it_serves_nobody(self, served: Served) -> None:
        served.engine.sleep(1)
        with pytest.raises(WeightsNotReady, match="sleeps"):
            served.engine.generate(PROMPTS, SamplingParams(1))
        served.engine.wake()
        assert len(served.engine.generate(PROMPTS, SamplingParams(1))) == 4
        served.engine.sleep(2)
        served.engine.wake()
        with pytest.raises(WeightsNotReady, match="gave its weights up"):
            served.engine.generate(PROMPTS, SamplingParams(1))
        served.push(tiny(6, tied=self.tied), 3)
        assert largest_gap(served.engine.log_probs(PROBE), log_probs_of(served.model, PROBE)) < GAP

    def test_what_takes_too_long_is_given_up(self, served: Served) -> None:
        with pytest.raises(TimeoutError, match="not made within"):
            served.engine.generate([[5, 6, 7]] * 4, LONG, timeout_s=0.05)
        assert len(served.engine.generate(PROMPTS, SamplingParams(2))) == 4

    def test_requests_of_several_threads_are_all_answered(self, served: Served) -> None:
        calls = [Background(lambda: served.engine.generate(PROMPTS, SamplingParams(20))) for _ in range(4)]
        assert [len(call.wait().samples) for call in calls] == [4] * 4
        served.engine.reset_prefix_cache()
        assert served.engine.metrics()["generated_tokens"] > 0
