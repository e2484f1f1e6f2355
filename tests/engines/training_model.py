"""What the conformance suite of training engines trains: a tiny model with tied embeddings, and ragged data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlmesh.rl.engines.training.forward import response_log_probs, response_values
from rlmesh.rl.engines.training.protocol import LossFunction
from rlmesh.rl.losses import aggregate, value_clip_loss

PROMPT, RESPONSE, VOCABULARY = 4, 5, 50


def build_policy(seed: int = 0, *, tied: bool = True, vocabulary: int = VOCABULARY) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
            bos_token_id=None,
        )
    )


class Critic(nn.Module):
    """A backbone with a head for one value per token, a buffer, and no support of its own for checkpointing."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.backbone = build_policy(seed).model
        self.head = nn.Linear(32, 1)
        self.scale: Tensor
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        hidden = self.backbone(input_ids, attention_mask, position_ids, use_cache=False).last_hidden_state
        values: Tensor = self.head(hidden) * self.scale
        return values


@dataclass(frozen=True)
class Rows:
    """``[batch, time]`` twice, then ``[batch, response]`` twice."""

    sequences: Tensor
    attention_mask: Tensor
    action_mask: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.sequences)

    def split(self, parts: int) -> Sequence[Rows]:
        columns = [getattr(self, field.name).tensor_split(parts) for field in fields(self)]
        return [Rows(*part) for part in zip(*columns, strict=True)]


def make_rows(count: int, seed: int = 7) -> Rows:
    """Prompts of 1 to 4 tokens, responses of 0 to 5: the row with none and the longest are both there."""
    generator = torch.Generator().manual_seed(seed)
    sequences = torch.randint(0, VOCABULARY, (count, PROMPT + RESPONSE), generator=generator)
    prompt = torch.arange(PROMPT) >= PROMPT - 1 - torch.arange(count).unsqueeze(1) % PROMPT
    response = torch.arange(RESPONSE) < (torch.arange(count).unsqueeze(1) * 2) % (RESPONSE + 1)
    targets = torch.randn(count, RESPONSE, generator=generator)
    return Rows(sequences, torch.cat([prompt, response], 1), response, targets)


def policy_loss(whole: Rows) -> LossFunction:
    count = whole.action_mask.sum()

    def loss(model: nn.Module, part: Rows) -> tuple[Tensor, Mapping[str, Tensor]]:
        log_probs = response_log_probs(model, part.sequences, part.attention_mask, part.action_mask)
        share = aggregate(-log_probs * part.targets, part.action_mask, "token-mean", denominator=count)
        return share, {"tokens": part.action_mask.sum()}

    return loss


def critic_loss(whole: Rows) -> LossFunction:
    count = whole.action_mask.sum()

    def loss(model: nn.Module, part: Rows) -> tuple[Tensor, Mapping[str, Tensor]]:
        values = response_values(model, part.sequences, part.attention_mask, part.action_mask)
        terms = value_clip_loss(values, torch.zeros_like(values), part.targets, part.action_mask, clip=None)
        return aggregate(terms.loss, part.action_mask, "token-mean", denominator=count), {}

    return loss
