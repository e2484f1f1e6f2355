"""Forward passes from padded sequences to log-probabilities and values of the responses' tokens.

Loss functions use the same passes, so that training and evaluation agree.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlmesh.rl.losses import token_log_probs
from rlmesh.rl.masking import keep

__all__ = ["at_least_float32", "position_ids", "response_log_probs", "response_logits", "response_values"]


def position_ids(attention_mask: Tensor) -> Tensor:
    """Positions ``[batch, time]`` that do not count padding, so that padding on the left does not shift them."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def response_logits(model: nn.Module, sequences: Tensor, attention_mask: Tensor, width: int) -> Tensor:
    """Logits that predict the last ``width`` tokens.

    Args:
        model: a causal language model of transformers, wrapped or not.
        sequences: ``[batch, time]``, integers.
        attention_mask: ``[batch, time]``.

    Returns:
        ``[batch, width, vocabulary]``.
    """
    attend = attention_mask[:, :-1]  # the last token predicts none of the given tokens
    output: Any = model(
        input_ids=sequences[:, :-1],
        attention_mask=attend.long(),
        position_ids=position_ids(attend),
        use_cache=False,
        logits_to_keep=width,
    )
    logits: Tensor = output.logits
    return logits[:, -width:]


def response_log_probs(
    model: nn.Module, sequences: Tensor, attention_mask: Tensor, action_mask: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """Log-probabilities ``[batch, response]`` of the responses' tokens, with gradient; 0 where ``action_mask``
    ``[batch, response]`` is False."""
    width = action_mask.shape[1]
    logits = response_logits(model, sequences, attention_mask, width)
    return token_log_probs(logits, sequences[:, -width:], action_mask, temperature=temperature)


def response_values(model: nn.Module, sequences: Tensor, attention_mask: Tensor, action_mask: Tensor) -> Tensor:
    """Values ``[batch, response]`` before each of the responses' tokens, with gradient; 0 where ``action_mask`` is
    False. The model gives ``[batch, time, 1]``, or an object that has these as ``logits``, as transformers' models for
    token classification with one label do."""
    attend = attention_mask[:, :-1]
    output: Any = model(input_ids=sequences[:, :-1], attention_mask=attend.long(), position_ids=position_ids(attend))
    values: Tensor = output if isinstance(output, Tensor) else output.logits
    if values.ndim != 3 or values.shape[-1] != 1:
        raise ValueError(f"a critic gives one value per token, [batch, time, 1]; this gave {tuple(values.shape)}")
    return keep(at_least_float32(values[:, -action_mask.shape[1] :, 0]), action_mask, name="values")


def at_least_float32(x: Tensor) -> Tensor:
    """The tensor in float32; a float64 tensor stays as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
