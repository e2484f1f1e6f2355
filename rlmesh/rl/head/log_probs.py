"""Log-probabilities and entropy of tokens, from logits or straight from hidden states.

``[batch, time, vocabulary]`` is the largest tensor of a training step: 8 × 2,048 tokens of a vocabulary of 152,000 take
10 GB in float32, and a log-softmax, its entropy and their gradients take that several times. :func:`chunked_log_probs`
goes from hidden states to log-probabilities and entropy in one pass over tiles of tokens × vocabulary: the logits of
one tile exist at a time, in the forward pass and in the backward pass, which computes them again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlmesh.errors import import_fault, is_absent
from rlmesh.rl.masking import keep, require_mask

__all__ = ["CHUNK_TOKENS", "TokenTerms", "chunked_log_probs", "entropy", "tile_columns", "token_log_probs"]

logger = logging.getLogger(__name__)

CHUNK_TOKENS = 8192
"""Default number of tokens of one tile."""
TILE_BYTES = {"cpu": 8 * 2**20, "cuda": 128 * 2**20}
"""Memory limit of the logits of one tile, by the type of the device. On a CPU, a tile should stay in the cache."""
ALIGNED = 256
"""Matrix products of a GPU take several times as long if rows in memory do not begin at multiples of 16 bytes."""


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
    :func:`entropy`. Logits are computed in the dtype of ``hidden``, or that of autocast, and reduced in float32 at
    least. The backward pass computes the logits of each tile again: ``∂ log p / ∂ logits = (one-hot − p) /
    temperature`` and ``∂ H / ∂ logits = −p · (log p + H) / temperature``.

    Args:
        hidden: ``[tokens, width]``: the states that predict ``tokens``, so shifted already. Pass those of valid
            tokens only.
        weight: of the LM head, ``[vocabulary, width]``, in the dtype of ``hidden``.
        tokens: ``[tokens]``, integers in [0, vocabulary).
        bias: ``[vocabulary]``.
        temperature: > 0; that of sampling.
        chunk_tokens: tokens per tile; ``None``: `CHUNK_TOKENS`.

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
    size = CHUNK_TOKENS if chunk_tokens is None else chunk_tokens
    if size < 1:
        raise ValueError(f"chunk_tokens must be ≥ 1, got {size}")
    kind, narrow = hidden.device.type, hidden.dtype
    plain: AbstractContextManager[object] = nullcontext()
    if kind in TILE_BYTES and torch.is_autocast_enabled(kind):
        # Autocast sets the dtype of the products, also in the backward pass, but not that of the reduction.
        narrow = narrow if narrow == torch.float64 else torch.get_autocast_dtype(kind)
        plain = torch.autocast(kind, enabled=False)
    with plain:
        found = _ChunkedHead.apply(hidden, weight, bias, tokens, temperature, size, narrow)  # type: ignore[no-untyped-call]
    return TokenTerms(*found)


def tile_columns(rows: int, vocabulary: int, dtype: torch.dtype, device: str) -> int:
    """The vocabulary entries of a tile of ``rows`` tokens whose logits take at most `TILE_BYTES` in the dtype of the
    reduction: a multiple of `ALIGNED`, at most the vocabulary."""
    limit = TILE_BYTES.get(device, TILE_BYTES["cuda"]) // (8 if dtype == torch.float64 else 4)
    return min(max(limit // max(rows, 1) // ALIGNED * ALIGNED, ALIGNED), vocabulary)


class _ChunkedHead(torch.autograd.Function):
    """Log-probabilities and entropy, tile by tile; see :func:`chunked_log_probs`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        temperature: float,
        size: int,
        narrow: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        tiles = _Tiles(hidden, weight, bias, temperature, size, narrow)
        count = len(tiles.columns)
        # For each tile of the vocabulary: the log of its sum of exponentials, and the mean of its logits.
        sums, means = (hidden.new_empty(count, len(tokens), dtype=tiles.wide) for _ in range(2))
        chosen = hidden.new_zeros(len(tokens), dtype=tiles.wide)
        for place, columns in enumerate(tiles.columns):
            entries = tiles.weight(columns)
            for rows in tiles.rows:
                logits = tiles.logits(rows, columns, entries)
                at, inside = _within(tokens[rows], columns)
                chosen[rows] += torch.where(inside, logits.gather(-1, at).squeeze(-1), 0.0)
                sums[place, rows], means[place, rows] = tiles.statistics(logits)
        normalisers = sums.logsumexp(0) if count else chosen
        entropies = normalisers - torch.where(sums > -torch.inf, (sums - normalisers).exp() * means, 0.0).sum(0)
        ctx.save_for_backward(hidden, weight, bias, tokens, normalisers, entropies)
        ctx.temperature, ctx.size, ctx.narrow = temperature, size, narrow
        return chosen - normalisers, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens, normalisers, entropies = ctx.saved_tensors
        tiles = _Tiles(hidden, weight, bias, ctx.temperature, ctx.size, ctx.narrow)
        # Sums over several tiles have the wide dtype, since bfloat16 would lose many small contributions.
        grad_hidden = torch.zeros_like(hidden, dtype=tiles.wide) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.empty_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for columns in tiles.columns:
            entries = tiles.weight(columns)
            total = total_bias = None
            for rows in tiles.rows:
                up = [None if grad is None else grad[rows].contiguous() for grad in grads]
                logits = tiles.logits(rows, columns, entries)
                slope = tiles.gradient(logits, normalisers[rows], entropies[rows], up, tokens[rows], columns)
                if grad_hidden is not None:
                    _add_product(grad_hidden[rows], slope, entries)
                if grad_weight is not None:
                    part = slope.T @ tiles.hidden(rows)
                    total = part if len(tiles.rows) == 1 else part.to(tiles.wide) + (0.0 if total is None else total)
                if grad_bias is not None:
                    total_bias = slope.sum(0, dtype=tiles.wide) + (0.0 if total_bias is None else total_bias)
            if grad_weight is not None:
                grad_weight[columns] = 0.0 if total is None else total.to(weight.dtype)
            if grad_bias is not None:
                grad_bias[columns] = 0.0 if total_bias is None else total_bias.to(grad_bias.dtype)
        given = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
        return given, grad_weight, grad_bias, None, None, None, None


class _Tiles:
    """The logits in tiles of tokens × vocabulary.

    Attributes:
        rows, columns: ranges of tokens, and of the vocabulary.
        narrow, wide: dtypes of the matrix products and of the reduction.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: float,
        size: int,
        narrow: torch.dtype,
    ) -> None:
        tokens, vocabulary = len(hidden), len(weight)
        self.narrow, self.wide = narrow, torch.float64 if hidden.dtype == torch.float64 else torch.float32
        step = tile_columns(min(tokens, size), vocabulary, self.wide, hidden.device.type)
        self.rows = [slice(at, min(at + size, tokens)) for at in range(0, tokens, size)]
        self.columns = [slice(at, min(at + step, vocabulary)) for at in range(0, vocabulary, step)]
        self._hidden, self._weight, self._bias, self._temperature = hidden, weight, bias, temperature

    def hidden(self, rows: slice) -> Tensor:
        return self._hidden[rows].to(self.narrow)

    def weight(self, columns: slice) -> Tensor:
        return self._weight[columns].to(self.narrow)

    def logits(self, rows: slice, columns: slice, entries: Tensor) -> Tensor:
        """The logits of a tile, divided by the temperature, in the wide dtype."""
        hidden = self.hidden(rows)
        if hidden.is_cuda and self.narrow != self.wide:
            logits = torch.mm(hidden, entries.T, out_dtype=self.wide)  # not rounded in between
        else:
            logits = (hidden @ entries.T).to(self.wide)
        if self._bias is not None:
            logits.add_(self._bias[columns])
        return logits if self._temperature == 1 else logits.div_(self._temperature)

    def statistics(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The log of the sum of exponentials, and the mean of the logits under their softmax, of each row of a tile;
        the logits are overwritten."""
        kernels = _kernels_for(logits)
        if kernels is not None:
            found: tuple[Tensor, Tensor] = kernels.tile_statistics(logits)
            return found
        lowest = torch.finfo(self.wide).min
        # A tile in which every token was ruled out by −inf has the sum 0.
        highest = logits.amax(-1).clamp_(min=lowest)
        below = logits.sub_(highest.unsqueeze(-1))
        weights = below.exp()
        total = weights.sum(-1)
        # 0 · −inf is NaN: logits of −inf count as 0.
        dot = torch.einsum("nv,nv->n", weights, below.clamp_(min=lowest))
        return total.log() + highest, torch.where(total > 0, dot / total, 0.0) + highest

    def gradient(
        self,
        logits: Tensor,
        normalisers: Tensor,
        entropies: Tensor,
        up: Sequence[Tensor | None],
        tokens: Tensor,
        columns: slice,
    ) -> Tensor:
        """The gradient of a tile's logits before they were divided by the temperature, in the narrow dtype; the logits
        are overwritten.

        Args:
            up: gradients of log-probabilities and entropies.
        """
        kernels, (of_log_probs, of_entropies) = _kernels_for(logits), up
        if kernels is not None:
            found: Tensor = kernels.logit_gradient(
                logits, normalisers, entropies, of_log_probs, of_entropies, tokens - columns.start,
                1 / self._temperature, self.narrow,
            )  # fmt: skip
            return found
        log_p = logits.sub_(normalisers.unsqueeze(-1))
        if of_entropies is None:
            slope = log_p.exp_()
            slope = slope.zero_() if of_log_probs is None else slope.mul_(-of_log_probs.unsqueeze(-1))
        else:
            p = log_p.exp()
            finite = log_p.masked_fill_(p == 0, 0.0).add_(entropies.unsqueeze(-1))
            slope = finite.mul_(-of_entropies.unsqueeze(-1))
            slope = (slope if of_log_probs is None else slope.sub_(of_log_probs.unsqueeze(-1))).mul_(p)
        if of_log_probs is not None:
            at, inside = _within(tokens, columns)
            own = torch.where(inside, of_log_probs, 0.0).unsqueeze(-1)
            slope.scatter_add_(-1, at, own.to(slope.dtype))
        if self._temperature != 1:
            slope.div_(self._temperature)
        return slope.to(self.narrow)


def _kernels_for(logits: Tensor) -> Any:
    """The module of Triton kernels, for tiles that it computes; ``None``: use the plain code."""
    return _kernels() if logits.is_cuda and logits.dtype == torch.float32 else None


@cache
def _kernels() -> Any:
    try:
        return import_module("rlmesh.rl.head.cuda_kernels")
    except ImportError as error:
        if not is_absent("triton", error):  # torch may be built without it
            logger.warning("the head computes without its kernels: %s", import_fault("triton", error, "triton"))
        return None


def _within(tokens: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Each token's column in a tile, ``[tokens, 1]``, and whether the tile has it, ``[tokens]``."""
    inside = (tokens >= columns.start) & (tokens < columns.stop)
    return (tokens - columns.start).clamp(0, columns.stop - columns.start - 1).unsqueeze(-1), inside


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left · right`` in place, in the dtype of the total."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        total += torch.mm(left, right, out_dtype=total.dtype)
    else:
        total += left @ right


def _require_temperature(temperature: float) -> None:
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}: greedy choices have no log-probability")


def _clean_logits(logits: Tensor, valid: Tensor) -> Tensor:
    """Logits with masked slots set to 0 (before the softmax, for its slope there), in float32 at least."""
    zero = torch.zeros((), dtype=logits.dtype, device=logits.device)
    clean = torch.where(valid.unsqueeze(-1), logits, zero)
    return clean.float() if clean.dtype in (torch.float16, torch.bfloat16) else clean
