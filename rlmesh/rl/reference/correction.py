"""Twins of :mod:`rlmesh.rl.correction`."""

from __future__ import annotations

import numpy as np

from rlmesh.rl.reference.masking import Array, Mask, valid_slots


def correct(
    log_probs: Array,
    sampled_log_probs: Array,
    mask: Mask,
    *,
    level: str,
    upper: float,
    lower: float | None = None,
    beyond: str = "truncate",
    reject_below: float | None = None,
    weigh: bool = True,
) -> tuple[Array, Mask, Mask]:
    """Weights π_old / μ within bounds, the mask of what stays, and where a weight was set to a bound."""
    weights, stays, bounded = np.zeros(mask.shape), mask.copy(), np.zeros(mask.shape, dtype=np.bool_)
    least = 0.0 if lower is None else lower
    for b in range(mask.shape[0]):
        gaps = {t: float(log_probs[b, t] - sampled_log_probs[b, t]) for row, t in valid_slots(mask) if row == b}
        if reject_below is not None and any(np.exp(gap) < reject_below for gap in gaps.values()):
            stays[b] = False
        total = sum(gaps.values())
        for t, gap in gaps.items():
            ratio = np.exp({"token": gap, "sequence": total, "geometric": total / len(gaps)}[level])
            outside = not least <= ratio <= upper
            if outside and beyond == "mask":
                stays[b, t] = False
            if stays[b, t]:
                weights[b, t] = min(max(ratio, least), upper) if weigh else 1.0
                bounded[b, t] = outside
    return weights, stays, bounded


def whole_vocabulary(sampled_log_probs: Array, kept_log_mass: Array, mask: Mask) -> Array:
    """log (p / m) + log m."""
    out = np.zeros(mask.shape)
    for b, t in valid_slots(mask):
        out[b, t] = sampled_log_probs[b, t] + kept_log_mass[b, t]
    return out
