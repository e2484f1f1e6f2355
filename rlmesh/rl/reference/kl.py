"""Twins of :mod:`rlmesh.rl.kl`."""

from __future__ import annotations

import numpy as np

from rlmesh.rl.reference.masking import Array, Mask, valid_slots


def kl_estimate(log_probs: Array, ref_log_probs: Array, mask: Mask, estimator: str) -> Array:
    """k1 = d, k2 = d² / 2, k3 = e^−d − 1 + d, with d = log π − log π_ref."""
    out = np.zeros(log_probs.shape)
    for b, t in valid_slots(mask):
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
