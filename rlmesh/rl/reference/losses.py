"""Twins of :mod:`rlmesh.rl.losses`."""

from __future__ import annotations

import numpy as np

from rlmesh.rl.reference.masking import Array, Mask, masked_mean, valid_slots


def ppo_clip_loss(
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    mask: Mask,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> tuple[Array, Array, Mask]:
    """−min(r · A, clip(r) · A), at most −dual_clip · A where A < 0; the ratio r (1 where masked); was it clipped."""
    high = clip_low if clip_high is None else clip_high
    loss, ratio = np.zeros(mask.shape), np.ones(mask.shape)
    clipped = np.zeros(mask.shape, dtype=np.bool_)
    for b, t in valid_slots(mask):
        r = float(np.exp(log_probs[b, t] - old_log_probs[b, t]))
        plain = r * advantages[b, t]
        bounded = min(max(r, 1 - clip_low), 1 + high) * advantages[b, t]
        loss[b, t], ratio[b, t], clipped[b, t] = -min(plain, bounded), r, bounded < plain
        if dual_clip is not None and advantages[b, t] < 0 and loss[b, t] > -dual_clip * advantages[b, t]:
            loss[b, t], clipped[b, t] = -dual_clip * advantages[b, t], True
    return loss, ratio, clipped


def value_clip_loss(
    values: Array, old_values: Array, returns: Array, mask: Mask, *, clip: float | None = 0.2
) -> tuple[Array, Mask]:
    """½ · max((V − R)², (V_old + clip(V − V_old) − R)²), and whether the clipped term was the larger."""
    loss, clipped = np.zeros(mask.shape), np.zeros(mask.shape, dtype=np.bool_)
    for b, t in valid_slots(mask):
        v, old, target = values[b, t], old_values[b, t], returns[b, t]
        plain = (v - target) ** 2
        bounded = plain if clip is None else (old + min(max(v - old, -clip), clip) - target) ** 2
        loss[b, t], clipped[b, t] = max(plain, bounded) / 2, bounded > plain
    return loss, clipped


def valid_count(mask: Mask, mode: str) -> int:
    """Valid tokens (``token-mean``) or sequences with one."""
    return int(mask.sum()) if mode == "token-mean" else sum(bool(row.any()) for row in mask)


def aggregate(per_token: Array, mask: Mask, mode: str, *, denominator: float, constant: float | None = None) -> float:
    """Sum over valid tokens, or over the rows' means, divided by the count of the whole batch (and the constant)."""
    if mode != "sequence-mean":
        total = sum(float(per_token[b, t]) for b, t in valid_slots(mask))
    else:
        total = sum(masked_mean(per_token[b : b + 1], mask[b : b + 1]) for b in range(mask.shape[0]))
    return total / max(denominator, 1.0) / (1.0 if constant is None else constant)


def gspo_loss(
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    mask: Mask,
    *,
    clip_low: float = 3e-4,
    clip_high: float | None = 4e-4,
) -> tuple[Array, Array, Mask]:
    """As :func:`ppo_clip_loss`, with the geometric mean of the sequence's ratios in place of each token's."""
    mean = np.zeros(mask.shape)
    for b in range(mask.shape[0]):
        mean[b] = masked_mean(np.where(mask, log_probs - old_log_probs, 0.0)[b : b + 1], mask[b : b + 1])
    zero = np.zeros(mask.shape)
    return ppo_clip_loss(mean, zero, advantages, mask, clip_low=clip_low, clip_high=clip_high)


def cispo_loss(
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    mask: Mask,
    *,
    clip_low: float | None = None,
    clip_high: float = 4.0,
) -> tuple[Array, Array, Mask]:
    """−clip(r) · A · log π, the ratio r, and whether it was clipped."""
    loss, ratio = np.zeros(mask.shape), np.ones(mask.shape)
    clipped = np.zeros(mask.shape, dtype=np.bool_)
    for b, t in valid_slots(mask):
        r = float(np.exp(log_probs[b, t] - old_log_probs[b, t]))
        weight = min(max(r, 0.0 if clip_low is None else 1 - clip_low), 1 + clip_high)
        loss[b, t], ratio[b, t] = -weight * advantages[b, t] * log_probs[b, t], r
        clipped[b, t] = weight != r
    return loss, ratio, clipped


def sapo_loss(
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    mask: Mask,
    *,
    temperature_up: float = 1.0,
    temperature_down: float = 1.05,
) -> tuple[Array, Array, Mask]:
    """−(4 / τ) · σ(τ · (r − 1)) · A, the ratio r, and False."""
    loss, ratio = np.zeros(mask.shape), np.ones(mask.shape)
    for b, t in valid_slots(mask):
        r = float(np.exp(log_probs[b, t] - old_log_probs[b, t]))
        tau = temperature_up if advantages[b, t] > 0 else temperature_down
        loss[b, t] = -4 / tau / (1 + np.exp(-tau * (r - 1))) * advantages[b, t]
        ratio[b, t] = r
    return loss, ratio, np.zeros(mask.shape, dtype=np.bool_)
