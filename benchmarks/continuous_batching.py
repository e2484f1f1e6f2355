"""Sampling responses of log-normal lengths with the transformers engine: continuous batching beside whole batches.

python benchmarks/continuous_batching.py [--prompts 96] [--batch 16] [--model DIR]

Both ways sample the same requests with the same seeds, in turns. Whole batches are what the engine did before: a batch
ends with its longest response. Lengths are fixed in advance (log-normal, median 40, at most 400 tokens), and no token
ends a response, so that both make the same number of tokens. The last figure checks that they made the same ones.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlmesh.rl.engines.continuous import ContinuousBatch
from rlmesh.rl.engines.growing import Growing
from rlmesh.rl.engines.rollout import SamplingParams

PROMPT = 32


def build_model(folder: str | None) -> Any:
    """A model from a folder, or a Qwen2 of 12 million parameters with random weights."""
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=8192, hidden_size=320, intermediate_size=960, num_hidden_layers=8, num_attention_heads=5,
        num_key_value_heads=5, max_position_embeddings=1024, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def requests(count: int, seed: int) -> list[Growing]:
    generator = np.random.default_rng(seed)
    lengths = np.exp(generator.normal(np.log(40), 0.9, count)).astype(int).clip(4, 400)
    prompts = generator.integers(0, 8192, (count, PROMPT))
    return [
        Growing(prompt.tolist(), SamplingParams(int(length), seed=number))
        for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]


def continuous(model: Any, rows: list[Growing], most: int) -> None:
    batch = ContinuousBatch(model, stop_token_ids=[], most_rows=most)
    waiting = deque(rows)
    while waiting or batch.rows:
        while waiting and batch.room:
            batch.add(waiting.popleft())
        batch.step(0)


def whole(model: Any, rows: list[Growing], most: int) -> None:
    """Batch after batch; a row that has its tokens is computed until the longest of its batch has."""
    for first in range(0, len(rows), most):
        part = rows[first : first + most]
        longest = max(row.params.max_tokens for row in part)
        padded = [Growing(row.prompt, replace(row.params, max_tokens=longest)) for row in part]
        continuous(model, padded, most)
        for row, full in zip(part, padded, strict=True):
            count = row.params.max_tokens
            row.add(full.tokens[:count], full.log_probs[:count], 0)
            row.finish("length")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model")
    options = parser.parse_args()
    model = build_model(options.model)
    seconds: dict[str, list[float]] = {"whole batches": [], "continuous": []}
    same = total = 0
    for turn in range(options.rounds):
        made = {}
        for name, way in (("whole batches", whole), ("continuous", continuous)):
            rows = requests(options.prompts, turn)
            began = time.perf_counter()
            way(model, rows, options.batch)
            seconds[name].append(time.perf_counter() - began)
            made[name] = [row.tokens for row in rows]
        tokens = sum(map(len, made["continuous"]))
        total += options.prompts
        same += sum(a == b for a, b in zip(*made.values(), strict=True))
        rates = ", ".join(f"{name} {tokens / taken[-1]:,.0f} tokens/s" for name, taken in seconds.items())
        print(f"round {turn}: {tokens:,} tokens: {rates}", flush=True)
    ratio = np.median(np.array(seconds["whole batches"]) / np.array(seconds["continuous"]))
    print(f"continuous batching is {ratio:.2f} times as fast; {same} of {total} responses are equal token by token")


if __name__ == "__main__":
    main()
