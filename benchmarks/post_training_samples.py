"""What both sides of `trl_equality.py` and `post_training.py` get: a model, and samples that were recorded before."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

__all__ = ["SHAPES", "RecordedBatch", "Shape", "build_model", "build_tokenizer", "record", "training_flops"]

Ids = list[int]


@dataclass(frozen=True)
class Shape:
    """The sizes of a model and of its batches.

    Attributes:
        vocabulary, width, hidden, layers, heads, key_heads: of a Qwen2 model.
        tied: the head has the weights of the embedding.
        prompts, samples: prompts per step, and responses per prompt.
        prompt_tokens: of each prompt.
        response_tokens: the most of a response; recorded lengths are log-normal with a median of a quarter of it.
        micro_batch: rows of a pass of a rectangular batch.
    """

    vocabulary: int
    width: int
    hidden: int
    layers: int
    heads: int
    key_heads: int
    tied: bool
    prompts: int
    samples: int
    prompt_tokens: int
    response_tokens: int
    micro_batch: int

    @property
    def rows(self) -> int:
        """Responses per step."""
        return self.prompts * self.samples


SHAPES = {
    # That of the equality check.
    "check": Shape(64, 32, 48, 2, 4, 2, True, 4, 4, 6, 12, 4),
    # That of examples/grpo_model.py, 0.34 million parameters.
    "0.34m": Shape(46, 128, 256, 2, 4, 4, False, 128, 8, 8, 6, 64),
    # The sizes of SmolLM2-135M.
    "135m": Shape(49152, 576, 1536, 30, 9, 3, True, 2, 8, 64, 96, 8),
    # The sizes of Qwen2.5-0.5B.
    "0.5b": Shape(151936, 896, 4864, 24, 14, 2, True, 16, 8, 512, 2048, 8),
}


@dataclass(frozen=True)
class RecordedBatch:
    """The samples of one step, group by group.

    Attributes:
        prompts: ``[prompts]`` token ids.
        responses: ``[prompts][samples]`` token ids.
        rewards: ``[prompts][samples]``.
    """

    prompts: list[Ids]
    responses: list[list[Ids]]
    rewards: list[list[float]]

    @property
    def tokens(self) -> int:
        """Useful tokens: prompt and response of each sample, without padding."""
        return sum(
            len(prompt) + len(row) for prompt, group in zip(self.prompts, self.responses, strict=True) for row in group
        )

    @property
    def response_tokens(self) -> int:
        return sum(len(row) for group in self.responses for row in group)


def record(shape: Shape, steps: int, seed: int = 0) -> list[RecordedBatch]:
    """Batches of random ids, the same for the same arguments."""
    draw = random.Random(seed)
    pad, end = special_ids(shape)

    def ids(count: int) -> Ids:
        return [draw.randrange(min(pad, end)) for _ in range(count)]

    def response() -> Ids:
        length = int(draw.lognormvariate(0, 0.9) * shape.response_tokens / 4)
        length = max(min(8, shape.response_tokens // 3), min(shape.response_tokens, length))
        return [*ids(length - 1), end]

    return [
        RecordedBatch(
            [ids(shape.prompt_tokens) for _ in range(shape.prompts)],
            [[response() for _ in range(shape.samples)] for _ in range(shape.prompts)],
            [[draw.random() for _ in range(shape.samples)] for _ in range(shape.prompts)],
        )
        for _ in range(steps)
    ]


def special_ids(shape: Shape) -> tuple[int, int]:
    """The ids of padding and of the end of a response."""
    return shape.vocabulary - 3, shape.vocabulary - 2


def build_model(shape: Shape, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A Qwen2 model with random weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    pad, end = special_ids(shape)
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        max_position_embeddings=max(shape.prompt_tokens + shape.response_tokens, 256),
        tie_word_embeddings=shape.tied,
    )
    config.pad_token_id, config.eos_token_id, config.bos_token_id = pad, end, None
    return cast(nn.Module, Qwen2ForCausalLM(config)).to(dtype)


def build_tokenizer(shape: Shape) -> Any:
    """A tokenizer of words w0, w1, … for the whole vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pad, end = special_ids(shape)
    words = {f"w{i}": i for i in range(pad)} | {"<pad>": pad, "<end>": end, "<unk>": shape.vocabulary - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="<unk>", padding_side="left"
    )


def training_flops(shape: Shape, batch: RecordedBatch) -> float:
    """Useful operations of one step of training, by the usual formula: 6 per parameter and token, and 6 · layers ·
    width · length² for causal attention of each sample (12, of which the mask leaves half). Padding, scoring and
    recomputation do not count; every sample counts its prompt."""
    per_layer = shape.width * (2 * shape.width + 2 * shape.width * shape.key_heads // shape.heads + 3 * shape.hidden)
    parameters = shape.layers * per_layer + shape.vocabulary * shape.width
    lengths = [
        len(prompt) + len(row) for prompt, group in zip(batch.prompts, batch.responses, strict=True) for row in group
    ]
    return 6.0 * parameters * sum(lengths) + 6.0 * shape.layers * shape.width * sum(n * n for n in lengths)
