"""Tiny language models, made on the spot, and what they say without any engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from rlmesh.rl.engines.continuous import ContinuousBatch
from rlmesh.rl.engines.growing import Growing
from rlmesh.rl.engines.rollout import Sample, SamplingParams

logging.disable_progress_bar()

VOCABULARY = 96
END = 1
PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13], [5, 6, 7, 8]]
PROBE = [[5, 6, 7, 8, 9, 20, 21, 22], [30, 31, 32]]


def tiny(seed: int, *, tied: bool = False, sharpness: float = 8.0, heads: int = 4) -> Any:
    """A Qwen2 of 0.3 million parameters, with logits that are far from even: the more so, the sharper."""
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=512,
            tie_word_embeddings=tied, pad_token_id=0, eos_token_id=END, bos_token_id=None,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        head = model.lm_head.weight
        head.mul_(sharpness if not tied else 2.0)
        # The end token comes rarely, so that requests run on for a while.
        if not tied:
            head[END] = 0
    return model


def save(model: Any, path: Path) -> Path:
    """As a folder that engines load."""
    model.save_pretrained(path)
    return path


def log_probs_of(model: Any, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """Of each token but the first, by a plain forward pass."""
    found = []
    with torch.no_grad():
        for row in sequences:
            tokens = torch.tensor([list(row)])
            logits = model(input_ids=tokens).logits.float().log_softmax(-1)
            found.append(logits[0, :-1].gather(-1, tokens[0, 1:].unsqueeze(-1)).squeeze(-1).tolist())
    return found


def largest_gap(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> float:
    """Between two lists of log-probabilities."""
    return max(abs(x - y) for row, other in zip(a, b, strict=True) for x, y in zip(row, other, strict=True))


def sample_batch(
    model: Any, prompts: Sequence[Sequence[int]], params: SamplingParams, *, stop_token_ids: Sequence[int]
) -> list[Sample]:
    """Continues each prompt on the calling thread, without an engine."""
    rows = [Growing(prompt, params, row) for row, prompt in enumerate(prompts)]
    batch = ContinuousBatch(model, stop_token_ids=stop_token_ids)
    waiting = deque(rows)
    while waiting or batch.rows:
        while waiting and batch.room:
            batch.add(waiting.popleft())
        batch.step(0)
    return [row.sample() for row in rows]
