"""Attention of one token per row over cached keys, for models in which several query heads share a key head.

Some versions of transformers copy keys and values for each query head: for 128 rows of 700 tokens and seven query heads
per key head, that is 8 GB of copies per token. Here the query heads of a key head become several queries of one head,
which attend to the same keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlmesh.rl.engines.lora import base_model_of

__all__ = ["grouped_attention", "use_grouped_attention"]

NAME = "rlmesh_grouped"


def use_grouped_attention(model: Any) -> None:
    """Let a model with torch's attention use `grouped_attention`; other models are not changed."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    causal = base_model_of(model)
    change = getattr(causal, "set_attn_implementation", None)
    if change is not None and getattr(getattr(causal, "config", None), "_attn_implementation", "") == "sdpa":
        ALL_ATTENTION_FUNCTIONS.register(NAME, grouped_attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
        change(NAME)


def grouped_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """The attention function of transformers' layers: that of torch, without repeated keys for single queries.

    Args:
        query: ``[batch, heads, tokens, width]``.
        key, value: ``[batch, key heads, places, width]``.
        attention_mask: ``[batch, 1, tokens, places]``, boolean or added to the scores.

    Returns:
        ``[batch, tokens, heads, width]``, and no attention weights.
    """
    groups = getattr(module, "num_key_value_groups", 1)
    usual = not any(options.get(name) is not None for name in ("position_bias", "softcap"))
    if groups > 1 and query.shape[2] == 1 and attention_mask is not None and attention_mask.shape[1] == 1 and usual:
        batch, heads, _, width = query.shape
        out = torch.nn.functional.scaled_dot_product_attention(
            query.reshape(batch, heads // groups, groups, width), key, value, attn_mask=attention_mask,
            scale=options.get("scaling"),
        )  # fmt: skip
        return out.reshape(batch, 1, heads, value.shape[-1]), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    result: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return result
