"""A character tokenizer and a Qwen2 of 0.34 million parameters, built here without downloads.

The model is warmed up by supervised learning until some answers are right, like those of a pretrained model: PPO cannot
learn while every reward is 0.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from rlmesh.rl import SamplingParams
from rlmesh.rl.engines.training.forward import response_log_probs
from rlmesh.rl.engines.transformers import sample_batch
from rlmesh.rl.losses import aggregate, valid_count

from .common import MAX_LENGTH, left_pad, right_pad
from .data import Row

logging.disable_progress_bar()  # logs are files

PAD, END = "<pad>", "<end>"
VOCABULARY = [PAD, END, *string.ascii_lowercase, *string.digits, *"> +-*=?."]
PAD_ID, END_ID = VOCABULARY.index(PAD), VOCABULARY.index(END)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of a vocabulary of 46; any other character is an error."""
    tokenizer = Tokenizer(WordLevel({token: i for i, token in enumerate(VOCABULARY)}))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    ids: list[list[int]] = tokenizer(list(texts))["input_ids"]
    return ids


def build_model(seed: int) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(VOCABULARY),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=MAX_LENGTH,
            tie_word_embeddings=False,
            pad_token_id=PAD_ID,
            eos_token_id=END_ID,
            bos_token_id=None,
        )
    )


class ValueModel(nn.Module):
    """A policy's backbone with a head for one number per token ``[batch, time, 1]``, initially 0."""

    def __init__(self, policy: Qwen2ForCausalLM) -> None:
        super().__init__()
        self.backbone = policy.model
        self.head = nn.Linear(policy.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        hidden = self.backbone(input_ids, attention_mask, position_ids, use_cache=False).last_hidden_state
        values: Tensor = self.head(hidden)
        return values.clone()  # FSDP2 warns of outputs that are views, such as those of a linear layer


def make_pretrained(path: Path, rows: Sequence[Row], *, seed: int, accuracy: float) -> float:
    """Build a model, warm it up, and save it with its tokenizer to ``path``.

    Returns:
        the reached accuracy of sampled answers.
    """
    tokenizer, model = build_tokenizer(), build_model(seed)
    reached = warm_up(model, tokenizer, rows, seed=seed, accuracy=accuracy)
    aside = path.with_name(f".{path.name}.tmp")
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    aside.replace(path)  # atomic: the folder is never incomplete
    return reached


def warm_up(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: Sequence[Row],
    *,
    seed: int,
    accuracy: float,
    batch_size: int = 128,
    max_steps: int = 400,
) -> float:
    """Supervised learning until sampled answers are right with the given frequency; see :func:`make_pretrained`.

    Raises:
        RuntimeError: the accuracy was not reached within ``max_steps``.
    """
    rng = random.Random(seed)

    def draw(size: int) -> tuple[list[list[int]], list[list[int]]]:
        drawn = rng.sample(rows, size)
        answers = encode(tokenizer, [row.answer for row in drawn])
        return encode(tokenizer, [row.prompt for row in drawn]), [[*answer, END_ID] for answer in answers]

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    reached = 0.0
    for step in range(1, max_steps + 1):
        prompts, answers = draw(batch_size)
        prompt, attend = left_pad(prompts, PAD_ID)
        answer, chosen = right_pad(answers, PAD_ID)
        tokens, mask = torch.cat([prompt, answer], 1), torch.cat([attend, chosen], 1)
        log_probs = response_log_probs(model, tokens, mask, chosen)
        optimizer.zero_grad()
        count = valid_count(chosen, "token-mean")
        aggregate(-log_probs, chosen, "token-mean", denominator=count).backward()
        optimizer.step()
        if step % 5 == 0:
            prompts, answers = draw(256)
            params = SamplingParams(max_tokens=max(map(len, answers)), seed=seed + step)
            drawn = sample_batch(model, prompts, params, pad_token_id=PAD_ID, stop_token_ids=[END_ID])
            reached = mean(sample.token_ids == answer for sample, answer in zip(drawn, answers, strict=True))
            if reached >= accuracy:
                return reached
    raise RuntimeError(f"the warm-up reached an accuracy of {reached:.2f} in {max_steps} steps, not {accuracy:.2f}")
