"""Tokens from logits: temperature, top-k, top-p. The only state is the generator's."""

from __future__ import annotations

import torch
from torch import Tensor

from rlmesh.rl.engines.rollout import SamplingParams

__all__ = ["draw", "log_distribution"]


def log_distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """The sampling distribution, as log-probabilities: ``log softmax(logits / temperature)``, with -inf for tokens
    outside of top-k and top-p, and the rest normalised to sum to 1.

    top-p (Holtzman et al. 2020, arXiv:1904.09751) keeps the smallest set of likeliest tokens whose probabilities reach
    ``top_p``, after top-k. At temperature 0 it is the plain softmax.

    Args:
        logits: ``[batch, vocabulary]``.

    Returns:
        ``[batch, vocabulary]``, float32.
    """
    logits = logits.float()
    if params.temperature == 0:
        return logits.log_softmax(-1)
    logits = logits / params.temperature
    if 0 < params.top_k < logits.shape[-1]:
        least = logits.topk(params.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if params.top_p < 1:
        ordered, places = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(-1)
        beyond = probs.cumsum(-1) - probs >= params.top_p
        logits = logits.masked_fill(beyond.scatter(-1, places, beyond), -torch.inf)
    return logits.log_softmax(-1)


def draw(logits: Tensor, params: SamplingParams, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sample one token per row; returns it with its log-probability.

    The token is the largest of ``log p + Gumbel noise``, which has the distribution p (Maddison et al. 2014,
    arXiv:1411.0030) and needs no pass for cumulative sums.

    Args:
        logits: ``[batch, vocabulary]``.

    Returns:
        ``[batch]`` of int64 and ``[batch]`` of float32.
    """
    log_probs = log_distribution(logits, params)
    if params.temperature == 0:
        tokens = logits.argmax(-1)
    else:
        # If E is exponentially distributed, -log E is Gumbel noise.
        noise = torch.empty_like(log_probs).exponential_(generator=generator)
        tokens = (log_probs - noise.log()).argmax(-1)
    return tokens, log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
