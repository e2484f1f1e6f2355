"""Log-probabilities and entropy of tokens, from logits or straight from hidden states.

``[batch, time, vocabulary]`` is the largest tensor of a training step: 8 × 2,048 tokens of a vocabulary of 152,000 take
10 GB in float32, and a log-softmax, its entropy and their gradients take that several times. :func:`chunked_log_probs`
goes from hidden states to log-probabilities and entropy in one pass over chunks of tokens: the logits of one chunk
exist at a time, in the forward pass and in the backward pass, which computes them again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlmesh.rl.masking import keep, require_mask

__all__ = ["TokenTerms", "chunk_size", "chunked_log_probs", "entropy", "token_log_probs"]

CHUNK_BYTES = 256 * 2**20
"""Default memory limit of the float32 logits of one chunk."""


class TokenTerms(NamedTuple):
    """Per token, each ``[tokens]``: the log-probability of the given token, and the entropy in nats."""

    log_probs: Tensor
    entropy: Tensor


def token_log_probs(logits: Tensor, tokens: Tensor, mask: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of the given tokens.

    ``log softmax(logits / temperature)[token]``. Use the temperature of sampling, else the ratio of policies
    that are equal is not 1.

    Args:
        logits: ``[batch, time, vocabulary]``; those that predict ``tokens``, so shifted already.
        tokens: ``[batch, time]``, integers.
        mask: ``[batch, time]``.
        temperature: > 0.

    Returns:
        ``[batch, time]``, in float32 at least, 0 in masked slots.

    Raises:
        ValueError: shapes differ, or the temperature is not positive.
        FloatingPointError: a result in a valid slot is not finite.
    """
    _require_temperature(temperature)
    valid = require_mask(mask, like=tokens, name="tokens")
    if logits.shape[:-1] != tokens.shape:
        raise ValueError(f"logits of shape {tuple(logits.shape)} do not match tokens {tuple(tokens.shape)}")
    log_probs = _clean_logits(logits, valid).div(temperature).log_softmax(-1)
    chosen = torch.where(valid, tokens, torch.zeros_like(tokens))
    return keep(log_probs.gather(-1, chosen.unsqueeze(-1)).squeeze(-1), valid, name="log_probs")


def entropy(logits: Tensor, mask: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Entropy at each token, in nats: ``−Σ p log p`` with p = softmax(logits / temperature).

    Args:
        logits: ``[batch, time, vocabulary]``.
        mask: ``[batch, time]``.

    Returns:
        ``[batch, time]``, 0 in masked slots. As a bonus, subtract its mean from the loss (Mnih et al. 2016,
        arXiv:1602.01783).
    """
    _require_temperature(temperature)
    valid = require_mask(mask, like=logits[..., 0], name="logits[..., 0]")
    log_probs = _clean_logits(logits, valid).div(temperature).log_softmax(-1)
    probs = log_probs.exp()
    # p · log p is 0 at p = 0, where the log is −inf for a token that was ruled out.
    terms = torch.where(probs > 0, probs * log_probs.clamp(min=torch.finfo(log_probs.dtype).min), 0.0)
    return keep(-terms.sum(-1), valid, name="entropy")


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
) -> TokenTerms:
    """Log-probability of each given token and entropy at it, without the logits of all tokens at once.

    With ``logits = hidden · weightᵀ + bias``: the same values and gradients as :func:`token_log_probs` and
    :func:`entropy`. Logits are computed in the dtype of ``hidden`` and reduced in float32 at least. The backward pass
    computes the logits of each chunk again: ``∂ log p / ∂ logits = (one-hot − p) / temperature`` and ``∂ H / ∂ logits =
    −p · (log p + H) / temperature``.

    Args:
        hidden: ``[tokens, width]``: the states that predict ``tokens``, so shifted already. Pass those of valid
            tokens only.
        weight: of the LM head, ``[vocabulary, width]``, in the dtype of ``hidden``.
        tokens: ``[tokens]``, integers in [0, vocabulary).
        bias: ``[vocabulary]``.
        temperature: > 0; that of sampling.
        chunk_tokens: tokens per chunk; ``None``: :func:`chunk_size`.

    Returns:
        float32 at least. Gradients flow to ``hidden``, ``weight`` and ``bias``, once (no second derivatives).

    Raises:
        ValueError: shapes do not match, or the temperature or the chunk is not positive.
    """
    _require_temperature(temperature)
    if hidden.ndim != 2 or tokens.shape != hidden.shape[:1] or weight.shape[1:] != hidden.shape[1:]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and tokens {tuple(tokens.shape)}: expected "
            "[tokens, width], [vocabulary, width] and [tokens]"
        )
    size = chunk_size(len(weight), hidden.dtype) if chunk_tokens is None else chunk_tokens
    if size < 1:
        raise ValueError(f"chunk_tokens must be ≥ 1, got {size}")
    return TokenTerms(*_ChunkedHead.apply(hidden, weight, bias, tokens, temperature, size))  # type: ignore[no-untyped-call]


def chunk_size(vocabulary: int, dtype: torch.dtype, *, limit_bytes: int = CHUNK_BYTES) -> int:
    """The number of tokens whose logits take at most ``limit_bytes`` in the dtype of the reduction; at least 1."""
    return max(1, limit_bytes // (vocabulary * (8 if dtype == torch.float64 else 4)))


class _ChunkedHead(torch.autograd.Function):
    """Log-probabilities and entropy of chunks of tokens; see :func:`chunked_log_probs`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, temperature: float, size: int
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        log_probs, entropies, normalisers = (hidden.new_empty(len(tokens), dtype=wide) for _ in range(3))
        for start in range(0, len(tokens), size):
            part = slice(start, start + size)
            logits = _chunk_logits(hidden[part], weight, bias, temperature, wide)
            normaliser = logits.logsumexp(-1)
            chosen = logits.gather(-1, tokens[part].unsqueeze(-1)).squeeze(-1)
            log_probs[part], normalisers[part] = chosen - normaliser, normaliser
            p = (logits - normaliser.unsqueeze(-1)).exp_()
            # p is 0 where a token was ruled out by −inf, and 0 · −inf is NaN: such logits count as 0.
            entropies[part] = normaliser - torch.einsum("nv,nv->n", p, logits.masked_fill_(p == 0, 0.0))
        ctx.save_for_backward(hidden, weight, bias, tokens, normalisers, entropies)
        ctx.temperature, ctx.size = temperature, size
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens, normalisers, entropies = ctx.saved_tensors
        grad_log_probs, grad_entropy = grads
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Sums over chunks use the wide type: in bfloat16 the contributions of many small chunks would be lost.
        wide = normalisers.dtype
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and ctx.needs_input_grad[2] else None
        for start in range(0, len(tokens), ctx.size):
            part = slice(start, start + ctx.size)
            logits = _chunk_logits(hidden[part], weight, bias, ctx.temperature, wide)
            log_p = logits.sub_(normalisers[part].unsqueeze(-1))
            p = log_p.exp()
            up, up_entropy = grad_log_probs[part].unsqueeze(-1), grad_entropy[part].unsqueeze(-1)
            log_p.masked_fill_(p == 0, 0.0).add_(entropies[part].unsqueeze(-1)).mul_(-up_entropy).sub_(up)
            grad_logits = log_p.mul_(p)
            grad_logits.scatter_add_(-1, tokens[part].unsqueeze(-1), up)
            narrow = grad_logits.div_(ctx.temperature).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = narrow @ weight
            if grad_weight is not None:
                grad_weight += narrow.T @ hidden[part]
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _chunk_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, wide: torch.dtype) -> Tensor:
    """The logits of one chunk, divided by the temperature, ``[chunk, vocabulary]`` in ``wide``."""
    logits = (hidden @ weight.T if bias is None else torch.addmm(bias, hidden, weight.T)).to(wide)
    return logits if temperature == 1 else logits.div_(temperature)


def _require_temperature(temperature: float) -> None:
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}: greedy choices have no log-probability")


def _clean_logits(logits: Tensor, valid: Tensor) -> Tensor:
    """Logits with masked slots set to 0 (before the softmax, for its slope there), in float32 at least."""
    zero = torch.zeros((), dtype=logits.dtype, device=logits.device)
    clean = torch.where(valid.unsqueeze(-1), logits, zero)
    return clean.float() if clean.dtype in (torch.float16, torch.bfloat16) else clean
