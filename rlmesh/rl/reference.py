"""The functions of this package in plain NumPy loops: slow, obvious, and without torch.

The tests hold every torch function against its counterpart here. It reads valid slots only, so a masked one
may hold anything. Arrays are ``[batch, time]`` and computed in float64; masked slots of results are 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "aggregate",
    "discounted_returns",
    "drift",
    "entropy",
    "gae",
    "grpo",
    "kl_estimate",
    "masked_mean",
    "masked_whiten",
    "ppo_clip_loss",
    "token_log_probs",
    "token_rewards",
    "valid_count",
    "value_clip_loss",
]

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Tokens = NDArray[np.integer[Any]]


def _valid(mask: Mask) -> Iterator[tuple[int, int]]:
    """The (row, time) of each valid slot."""
    return ((b, t) for b in range(mask.shape[0]) for t in range(mask.shape[1]) if mask[b, t])


def masked_mean(x: Array, mask: Mask) -> float:
    """Mean over the valid slots, 0 without any."""
    values = [float(x[b, t]) for b, t in _valid(mask)]
    return sum(values) / len(values) if values else 0.0


def masked_whiten(x: Array, mask: Mask, *, shift_mean: bool = True, eps: float = 1e-8) -> Array:
    """(x − mean) / sqrt(population variance + eps), plus the mean unless ``shift_mean``."""
    mean = masked_mean(x, mask)
    variance = masked_mean((np.where(mask, x, mean) - mean) ** 2, mask)
    out = np.zeros(x.shape)
    for b, t in _valid(mask):
        out[b, t] = (x[b, t] - mean) / np.sqrt(variance + eps) + (0.0 if shift_mean else mean)
    return out


def kl_estimate(log_probs: Array, ref_log_probs: Array, mask: Mask, estimator: str) -> Array:
    """k1 = d, k2 = d² / 2, k3 = e^−d − 1 + d, with d = log π − log π_ref."""
    out = np.zeros(log_probs.shape)
    for b, t in _valid(mask):
        d = log_probs[b, t] - ref_log_probs[b, t]
        out[b, t] = {"k1": d, "k2": d * d / 2, "k3": np.exp(-d) - 1 + d}[estimator]
    return out


def token_rewards(scores: Array, kl: Array, mask: Mask, *, coefficient: float) -> Array:
    """−coefficient · kl at each valid token, plus the row's score at its last one."""
    out = np.zeros(kl.shape)
    for b in range(kl.shape[0]):
        times = [t for t in range(kl.shape[1]) if mask[b, t]]
        for t in times:
            out[b, t] = -coefficient * kl[b, t]
        if times:
            out[b, times[-1]] += scores[b]
    return out


def discounted_returns(rewards: Array, mask: Mask, *, gamma: float) -> Array:
    """Σ over valid s ≥ t of γ^(s − t) · r[s]."""
    out = np.zeros(rewards.shape)
    for b, t in _valid(mask):
        out[b, t] = sum(gamma ** (s - t) * rewards[b, s] for s in range(t, rewards.shape[1]) if mask[b, s])
    return out


def gae(
    rewards: Array,
    values: Array,
    mask: Mask,
    *,
    gamma: float,
    lam: float,
    last_values: Array | None = None,
) -> tuple[Array, Array]:
    """Advantages as the explicit sum of temporal differences, and returns = advantages + values."""
    advantages, returns = np.zeros(rewards.shape), np.zeros(rewards.shape)
    for b in range(rewards.shape[0]):
        times = [t for t in range(rewards.shape[1]) if mask[b, t]]
        deltas = []
        for i, t in enumerate(times):
            if i + 1 < len(times):
                after = gamma ** (times[i + 1] - t) * values[b, times[i + 1]]
            else:
                after = 0.0 if last_values is None else gamma * last_values[b]
            deltas.append(rewards[b, t] + after - values[b, t])
        for i, t in enumerate(times):
            advantages[b, t] = sum(gamma ** (times[j] - t) * lam ** (j - i) * deltas[j] for j in range(i, len(times)))
            returns[b, t] = advantages[b, t] + values[b, t]
    return advantages, returns


def grpo(rewards: Array, groups: Tokens, *, scale: bool = True, eps: float = 1e-6) -> Array:
    """(r − mean) / (std + eps) within each group, std with n − 1; 0 in a group of one."""
    out = np.zeros(rewards.shape)
    for i, group in enumerate(groups):
        others = [float(r) for r, of in zip(rewards, groups, strict=True) if of == group]
        mean = sum(others) / len(others)
        std = np.sqrt(sum((r - mean) ** 2 for r in others) / max(len(others) - 1, 1))
        out[i] = (rewards[i] - mean) / (std + eps if scale else 1.0)
    return out


def drift(trainer: Array, engine: Array, mask: Mask) -> tuple[float, float, float]:
    """Mean |d|, largest |d| and mean k3 = e^d − 1 − d, with d = trainer − engine."""
    gaps = [float(trainer[b, t] - engine[b, t]) for b, t in _valid(mask)]
    if not gaps:
        return 0.0, 0.0, 0.0
    count = len(gaps)
    return sum(map(abs, gaps)) / count, max(map(abs, gaps)), sum(float(np.exp(d)) - 1 - d for d in gaps) / count


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max()
    result: Array = shifted - np.log(np.exp(shifted).sum())
    return result


def token_log_probs(logits: Array, tokens: Tokens, mask: Mask, *, temperature: float = 1.0) -> Array:
    """log softmax(logits / temperature) of the given tokens; logits are ``[batch, time, vocabulary]``."""
    out = np.zeros(tokens.shape)
    for b, t in _valid(mask):
        out[b, t] = _log_softmax(logits[b, t] / temperature)[tokens[b, t]]
    return out


def entropy(logits: Array, mask: Mask, *, temperature: float = 1.0) -> Array:
    """−Σ p log p with p = softmax(logits / temperature)."""
    out = np.zeros(mask.shape)
    for b, t in _valid(mask):
        log_probs = _log_softmax(logits[b, t] / temperature)
        out[b, t] = -sum(np.exp(lp) * lp for lp in log_probs if lp > -np.inf)
    return out


def ppo_clip_loss(
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    mask: Mask,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
) -> tuple[Array, Array, Mask]:
    """−min(r · A, clip(r) · A), the ratio r (1 where masked), and whether the clipped term won."""
    high = clip_low if clip_high is None else clip_high
    loss, ratio = np.zeros(mask.shape), np.ones(mask.shape)
    clipped = np.zeros(mask.shape, dtype=np.bool_)
    for b, t in _valid(mask):
        r = float(np.exp(log_probs[b, t] - old_log_probs[b, t]))
        plain = r * advantages[b, t]
        bounded = min(max(r, 1 - clip_low), 1 + high) * advantages[b, t]
        loss[b, t], ratio[b, t], clipped[b, t] = -min(plain, bounded), r, bounded < plain
    return loss, ratio, clipped


def value_clip_loss(
    values: Array, old_values: Array, returns: Array, mask: Mask, *, clip: float | None = 0.2
) -> tuple[Array, Mask]:
    """½ · max((V − R)², (V_old + clip(V − V_old) − R)²), and whether the clipped term was the larger."""
    loss, clipped = np.zeros(mask.shape), np.zeros(mask.shape, dtype=np.bool_)
    for b, t in _valid(mask):
        v, old, target = values[b, t], old_values[b, t], returns[b, t]
        plain = (v - target) ** 2
        bounded = plain if clip is None else (old + min(max(v - old, -clip), clip) - target) ** 2
        loss[b, t], clipped[b, t] = max(plain, bounded) / 2, bounded > plain
    return loss, clipped


def valid_count(mask: Mask, mode: str) -> int:
    """Valid tokens (``token-mean``) or sequences with one (``sequence-mean``)."""
    return int(mask.sum()) if mode == "token-mean" else sum(bool(row.any()) for row in mask)


def aggregate(per_token: Array, mask: Mask, mode: str, *, denominator: float) -> float:
    """Sum over valid tokens, or over the rows' means, divided by the count of the whole batch."""
    if mode == "token-mean":
        total = sum(float(per_token[b, t]) for b, t in _valid(mask))
    else:
        total = sum(masked_mean(per_token[b : b + 1], mask[b : b + 1]) for b in range(mask.shape[0]))
    return total / max(denominator, 1.0)
