"""Triton kernels for one tile of logits: its statistics, and the gradient of its logits.

The plain code of :mod:`rlmesh.rl.head.log_probs` reads and writes a tile about ten times in the forward and in the
backward pass, and this takes longer than the matrix products. Each kernel here reads a tile once.

Importing this module needs Triton, which comes with torch for CUDA.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["logit_gradient", "tile_statistics"]

BLOCK = 2048
"""Columns that one program handles at a time."""


def tile_statistics(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log of the sum of exponentials, and the mean of the logits under their softmax, of each row.

    Args:
        logits: ``[tokens, columns]``, float32 and contiguous.

    Returns:
        Two tensors ``[tokens]`` in float32. A row of −inf alone has the log −inf and the mean of the lowest float.
    """
    rows, columns = logits.shape
    log_sums, means = logits.new_empty(rows), logits.new_empty(rows)
    if rows:
        _statistics[(rows,)](logits, log_sums, means, columns, BLOCK=BLOCK, num_warps=8)
    return log_sums, means


def logit_gradient(
    logits: Tensor,
    normalisers: Tensor,
    entropies: Tensor,
    up: Tensor | None,
    up_entropy: Tensor | None,
    places: Tensor,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient of a tile's logits: ``scale · (up · (one-hot − p) − up_entropy · p · (log p + H))``.

    Args:
        logits: ``[tokens, columns]``, float32 and contiguous, divided by the temperature.
        normalisers, entropies: ``[tokens]``, float32, over the whole vocabulary.
        up, up_entropy: ``[tokens]``, float32; gradients of log-probability and entropy. ``None``: 0.
        places: ``[tokens]``, int64: the column of each token in this tile; outside of [0, columns) if it has none.
        scale: 1 / temperature.
        dtype: of the result.

    Returns:
        ``[tokens, columns]``.
    """
    rows, columns = logits.shape
    result = torch.empty(rows, columns, dtype=dtype, device=logits.device)
    if rows:
        none = normalisers  # not read
        _gradient[(rows, triton.cdiv(columns, BLOCK))](
            logits, result, normalisers, entropies, none if up is None else up,
            none if up_entropy is None else up_entropy, places, columns, scale,
            HAS_UP=up is not None, HAS_ENTROPY=up_entropy is not None, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return result


@triton.jit  # type: ignore[untyped-decorator]
def _statistics(logits, log_sums, means, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    begin = logits + row * columns
    highest = tl.full((), -3.0e38, tl.float32)  # finite: the difference of two infinities is NaN
    total = tl.zeros((), tl.float32)
    weighted = tl.zeros((), tl.float32)  # the sum of exp(x - highest) · (x - highest)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(begin + at, mask=at < columns, other=-float("inf"))
        higher = tl.maximum(highest, tl.max(x, 0))
        shrink = tl.exp(highest - higher)
        weighted = shrink * (weighted + tl.where(total > 0, total * (highest - higher), 0.0))
        weights = tl.exp(x - higher)
        weighted += tl.sum(tl.where(weights > 0, weights * (x - higher), 0.0), 0)
        total = total * shrink + tl.sum(weights, 0)
        highest = higher
    tl.store(log_sums + row, tl.log(total) + highest)
    tl.store(means + row, tl.where(total > 0, weighted / total, 0.0) + highest)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient(  # type: ignore[no-untyped-def]
    logits, result, normalisers, entropies, up, up_entropy, places, columns, scale,
    HAS_UP: tl.constexpr, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    x = tl.load(logits + row * columns + at, mask=inside, other=-float("inf"))
    log_p = x - tl.load(normalisers + row)
    p = tl.exp(log_p)
    slope = tl.zeros((BLOCK,), tl.float32)
    if HAS_ENTROPY:
        entropy = tl.load(entropies + row)
        slope -= tl.load(up_entropy + row) * tl.where(p > 0, p * (log_p + entropy), 0.0)  # 0 · −inf is NaN
    if HAS_UP:
        given = tl.load(up + row)
        slope += given * (tl.where(at == tl.load(places + row), 1.0, 0.0) - p)
    tl.store(result + row * columns + at, (slope * scale).to(result.dtype.element_ty), mask=inside)
