"""Sampling of tokens from logits: penalties, temperature, min-p, top-k, top-p. Only random generators have a state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlmesh.rl.engines.rollout import SamplingParams

__all__ = ["SampledTokens", "draw", "kept_mass", "log_distribution", "penalised"]


class SampledTokens(NamedTuple):
    """One token per row; all fields are ``[batch]``.

    Attributes:
        tokens: the tokens.
        log_probs: their log-probabilities under the sampling distribution, in its dtype.
        kept_log_mass: see `kept_mass`; 0 if no token is left out.
    """

    tokens: Tensor
    log_probs: Tensor
    kept_log_mass: Tensor


def _tempered(logits: Tensor, params: SamplingParams) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide / params.temperature if params.temperature > 0 else wide


def log_distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """The sampling distribution, as log-probabilities: ``log softmax(logits / temperature)`` over the tokens that
    min-p, top-k and top-p keep, normalised so that their probabilities sum to 1, and -inf for the other tokens.

    The three apply in this order. min-p keeps the tokens with at least ``min_p`` times the probability of the likeliest
    one, top-k the ``top_k`` likeliest of these. top-p (Holtzman et al. 2020, arXiv:1904.09751) keeps the smallest set
    of the likeliest tokens whose probabilities, relative to those of all that are left, reach ``top_p``. At temperature
    0 the logits are not scaled.

    Args:
        logits: ``[batch, vocabulary]``, with penalties applied (`penalised`).

    Returns:
        ``[batch, vocabulary]``, float32, or float64 for logits of that type.
    """
    logits = _tempered(logits, params)
    if not params.truncates:
        return logits.log_softmax(-1)
    if params.min_p > 0:
        least = logits.amax(-1, keepdim=True) + torch.tensor(params.min_p, dtype=torch.float64).log().item()
        logits = logits.masked_fill(logits < least, -torch.inf)
    if 0 < params.top_k < logits.shape[-1]:
        least = logits.topk(params.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if params.top_p < 1:
        ordered, places = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(-1)
        beyond = probs.cumsum(-1) - probs >= params.top_p
        logits = logits.masked_fill(beyond.scatter(-1, places, beyond), -torch.inf)
    return logits.log_softmax(-1)


def kept_mass(logits: Tensor, log_probs: Tensor, params: SamplingParams) -> Tensor:
    """The log of the probability that min-p, top-k and top-p keep, ``[batch]``: ``log Σ softmax(logits / temperature)``
    over the tokens that they keep.

    Args:
        logits: ``[batch, vocabulary]``, with penalties applied.
        log_probs: the `log_distribution` of these logits: -inf marks the tokens that are not kept.
    """
    if not params.truncates:
        return log_probs.new_zeros(len(log_probs))
    whole = _tempered(logits, params).log_softmax(-1)
    mass: Tensor = whole.masked_fill(log_probs == -torch.inf, -torch.inf).logsumexp(-1)
    return mass.clamp(max=0)


def penalised(logits: Tensor, params: SamplingParams, *, seen: Tensor, counts: Tensor) -> Tensor:
    """Logits after the penalties of `SamplingParams` for the tokens that occurred so far.

    Args:
        logits: ``[batch, vocabulary]``.
        seen: ``[batch, vocabulary]``, True for tokens of prompt and response.
        counts: ``[batch, vocabulary]``, how often the response has each token so far.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if params.repetition_penalty != 1:
        scaled = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        logits = torch.where(seen, scaled, logits)
    counts = counts.to(logits.dtype)
    return logits - params.frequency_penalty * counts - params.presence_penalty * counts.clamp(max=1)


def draw(
    logits: Tensor, params: SamplingParams, generators: torch.Generator | Sequence[torch.Generator]
) -> SampledTokens:
    """Sample one token per row.

    The token with the largest ``log p + Gumbel noise`` has the distribution p (Maddison et al. 2014, arXiv:1411.0030);
    this needs no cumulative sums. Rounding hardly ever changes it: a row with a generator of its own gets the same
    token in any batch. At temperature 0 it is the likeliest token.

    Args:
        logits: ``[batch, vocabulary]``, with penalties applied.
        generators: one for all rows, or one per row.
    """
    log_probs = log_distribution(logits, params)
    if params.temperature == 0:
        tokens = logits.argmax(-1)
    else:
        # If E is exponentially distributed, -log E is Gumbel noise.
        noise = torch.empty_like(log_probs)
        if isinstance(generators, torch.Generator):
            noise.exponential_(generator=generators)
        else:
            for row, generator in zip(noise, generators, strict=True):
                row.exponential_(generator=generator)
        tokens = (log_probs - noise.log()).argmax(-1)
    chosen = log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return SampledTokens(tokens, chosen, kept_mass(logits, log_probs, params))
