"""The pipelines beside each other: sync, one-step-off, async.

python benchmarks/pipelines.py [--steps 16] [--threads 1 2] [--rounds 2] [--staleness 3] [--longest 12]

A job has a trainer, one actor that really trains, and two engines that only wait: each response takes as long as its
recorded length says (log-normal, sigma 1, cut off at `--longest` times the median), and an engine holds 16 responses at
a time, as continuous batching does. Weights are really pushed. The time per token is set so that, in the synchronous
pipeline, sampling a batch takes as long as the rest of the step. The time of a step is the mean over all but the first
three; modes take turns, and each has its best thread count of those given.

In async, a step then takes as long as training. In one-step-off it takes the longer of sampling and training, which is
1.15 times that on average if responses are cut off at 12 medians, and 1.20 times if at 32 or not at all.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import logging
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from rlmesh import RLJobBuilder
from rlmesh.rl.algorithms import GRPO
from rlmesh.rl.drift import DriftAlarm, DriftLimits
from rlmesh.rl.engines.rollout import Sample, SamplingParams
from rlmesh.rl.engines.transformers import TransformersEngine
from rlmesh.rl.rewards import Reward
from rlmesh.rl.roles.rollout import RolloutRole
from rlmesh.rl.rollout.ledger import LEDGER, faults_of
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import ActorSettings, RolloutSettings
from rlmesh.rl.trainers.trainer import Trainer
from rlmesh.testing import LocalCluster

PROMPTS, SAMPLES, ENGINES, SLOTS = 8, 4, 2, 16
MEDIAN, SIGMA = 32, 1.0
VOCABULARY, PROMPT = 1024, 32
LEFT_OUT = 3


@dataclass(frozen=True)
class MeasuredPipeline(Run):
    """A run whose engines wait.

    Attributes:
        token_s: seconds per token.
    """

    token_s: float = 0.0

    def tokenizer(self) -> Any:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(self.model)  # words, unlike those of the model's family


def length_of(seed: int, most: int) -> int:
    """The recorded length of a response."""
    return int(np.clip(MEDIAN * np.exp(SIGMA * np.random.default_rng(seed).standard_normal()), 2, most))


class WaitingEngine(TransformersEngine):
    """Takes weights as the engine of transformers does, and makes responses by waiting."""

    def __init__(self, model: Any, token_s: float, most: int, **options: Any) -> None:
        super().__init__(model, **options)
        self.token_s, self.most = token_s, most
        self._order = itertools.count()
        self._ends: list[tuple[float, int, Any, Future[Sample]]] = []
        self._waits: list[tuple[Any, Future[Sample]]] = []
        self._news = threading.Condition()
        threading.Thread(target=self._wait_out, daemon=True).start()

    def submit_all(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], *, timeout_s: float = 600.0
    ) -> list[Future[Sample]]:
        made: list[Future[Sample]] = [Future() for _ in prompts]
        with self.gate.serving(timeout_s), self._news:
            self._waits += [
                ((list(prompt), own.seed), one) for prompt, own, one in zip(prompts, params, made, strict=True)
            ]
            self._news.notify()
        return made

    def _wait_out(self) -> None:
        while True:
            with self._news:
                while self._waits and len(self._ends) < SLOTS:
                    (prompt, seed), future = self._waits.pop(0)
                    due = time.monotonic() + length_of(seed, self.most) * self.token_s
                    heapq.heappush(self._ends, (due, next(self._order), (prompt, seed, self.version), future))
                left = self._ends[0][0] - time.monotonic() if self._ends else None
                if left is None or left > 0:
                    self._news.wait(left)
                    continue
                _, _, (prompt, seed, version), future = heapq.heappop(self._ends)
            length = length_of(seed, self.most)
            tokens = np.random.default_rng(seed).integers(3, VOCABULARY, length).tolist()
            if future.set_running_or_notify_cancel():
                future.set_result(Sample.of(prompt, tokens, [-np.log(VOCABULARY)] * length, version, "length"))


class WaitingRollout(RolloutRole):
    """An engine that waits."""

    def make_engine(self) -> Any:
        from transformers import AutoModelForCausalLM

        settings: Any = self.run_settings
        model = AutoModelForCausalLM.from_pretrained(settings.model).eval()
        keep: dict[str, Any] = {} if settings.schedule.drains else {"pause_mode": "keep", "keep_cache": True}
        return WaitingEngine(model, settings.token_s, settings.rollout.max_tokens, pad_token_id=0, **keep)


class QuietTrainer(Trainer):
    """A trainer without the alarm: the log-probabilities of responses that nobody sampled mean nothing."""

    def setup(self) -> None:
        super().setup()
        self.alarm = DriftAlarm(DriftLimits(inf, inf))


def even(sample: Any) -> float:
    return float(np.mean([token % 2 for token in sample.token_ids]))


def prepare(folder: Path) -> Path:
    """Save a Qwen2 of random weights, and a tokenizer of words."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    words = {"<pad>": 0, "<end>": 1, "<unk>": 2} | {f"w{place}": place for place in range(3, VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=8192, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def step_s(folder: Path, run: MeasuredPipeline) -> tuple[float, dict[str, float]]:
    """Mean seconds of a step, and means of the report."""
    builder = RLJobBuilder().config(run).node_num(1).device_type("CPU").device_per_node(8)
    builder.trainer(QuietTrainer).resource(cpu=0)
    builder.actor().resource(cpu=0)
    builder.rollout(WaitingRollout).resource(cpu=0).total(ENGINES)
    with LocalCluster(run_root=folder):
        result = builder.build().submit("pipelines", view="none")
    if faults := faults_of(Path(result.run_dir) / LEDGER):
        raise SystemExit("the ledger is wrong: " + "; ".join(faults))
    lines = [json.loads(line) for line in (Path(result.run_dir) / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in lines if line["role"] == "TRAINER" and "reward_mean" in line["metrics"]}
    used = [steps[step] for step in range(LEFT_OUT, run.steps + 1)]
    names = ("buffer/engines_wait_s", "buffer/trainer_wait_s", "buffer/staleness_mean", "buffer/mixed_versions")
    means = {name: float(np.mean([line["metrics"][name] for line in used[1:]])) for name in names}
    return (used[-1]["at"] - used[0]["at"]) / (len(used) - 1), means


def sampling_tokens(run: MeasuredPipeline) -> float:
    """The mean over the steps of the longest response: tokens for which a synchronous step samples."""
    from rlmesh.rl.rollout.requests import sample_seed

    longest = [
        max(
            length_of(sample_seed(run.seed, place, n), run.rollout.max_tokens)
            for place in range(at, at + PROMPTS)
            for n in range(SAMPLES)
        )
        for at in range(0, run.steps * PROMPTS, PROMPTS)
    ]
    return float(np.mean(longest[LEFT_OUT:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--staleness", type=int, default=3)
    parser.add_argument("--longest", type=int, default=12, help="the longest response, in medians")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    most = args.longest * MEDIAN
    with tempfile.TemporaryDirectory(prefix="rlp-") as base:
        model = Path(base) / "model"
        model.mkdir()
        words = np.random.default_rng(0).integers(3, VOCABULARY, (args.steps * PROMPTS, PROMPT))
        run = MeasuredPipeline(
            model=str(prepare(model)), data=[{"prompt": " ".join(f"w{w}" for w in row)} for row in words],
            rewards=[Reward(even, inline=True)], algorithm=GRPO(samples=SAMPLES), steps=args.steps, batch_size=PROMPTS,
            save_every=10**6, actor=ActorSettings(lr=1e-5, token_budget=4096),
            rollout=RolloutSettings(engines=ENGINES, max_tokens=most, in_flight=2 * SLOTS // SAMPLES),
        )  # fmt: skip

        def measure(threads: int, **changes: Any) -> tuple[float, dict[str, float]]:
            one = replace(run, actor=replace(run.actor, threads=threads), **changes)
            return step_s(Path(base), one)

        bare = {threads: measure(threads)[0] for threads in args.threads}
        token_s = min(bare.values()) / sampling_tokens(run)
        print(f"a step without waiting: {', '.join(f'{s:.2f} s ({n} threads)' for n, s in bare.items())}; ")
        print(f"time per token {1e3 * token_s:.2f} ms, so that sampling takes {min(bare.values()):.2f} s", flush=True)
        pipelines = ("sync", "one-step-off", f"async(staleness={args.staleness})")
        found: dict[tuple[str, int], list[float]] = {}
        for number in range(args.rounds):
            for pipeline, threads in itertools.product(pipelines, args.threads):
                seconds, means = measure(threads, token_s=token_s, pipeline=pipeline)
                found.setdefault((pipeline, threads), []).append(seconds)
                said = "  ".join(f"{name.removeprefix('buffer/')} {value:.2f}" for name, value in means.items())
                print(
                    f"round {number + 1}  {pipeline:19} {threads} threads  {seconds:.2f} s a step  {said}", flush=True
                )
        best = {one: min(float(np.mean(found[one, threads])) for threads in args.threads) for one in pipelines}
        sync, off, ahead = (best[one] for one in pipelines)
        print(f"sync {sync:.2f} s, one-step-off {off:.2f} s, {pipelines[2]} {ahead:.2f} s a step")
        print(f"one-step-off is {sync / off:.2f} times as fast as sync, async {off / ahead:.2f} times as one-step-off")


if __name__ == "__main__":
    main()
