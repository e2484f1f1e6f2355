"""Twins of :mod:`rlmesh.rl.algorithms.preference`."""

from __future__ import annotations

import math

import numpy as np

from rlmesh.rl.reference.masking import Array, Mask, valid_slots


def dpo(log_probs: Array, ref_log_probs: Array, mask: Mask, *, beta: float) -> tuple[Array, Array]:
    """±β · σ(−margin) at each token, and the margins."""
    rewards = np.zeros(len(mask))
    for b, t in valid_slots(mask):
        rewards[b] += beta * (float(log_probs[b, t]) - float(ref_log_probs[b, t]))
    out, margins = np.zeros(mask.shape), np.asarray([a - b for a, b in zip(rewards[::2], rewards[1::2], strict=True)])
    for b, t in valid_slots(mask):
        out[b, t] = (1 if b % 2 == 0 else -1) * beta / (1 + math.exp(margins[b // 2]))
    return out, margins


def ranked_returns(values: Array, mask: Mask) -> tuple[Array, Array]:
    """V ± 2 · σ(−margin) at the one token of each row, and the margins."""
    own = np.zeros(len(mask))
    for b, t in valid_slots(mask):
        own[b] = values[b, t]
    out, margins = np.zeros(mask.shape), np.asarray([a - b for a, b in zip(own[::2], own[1::2], strict=True)])
    for b, t in valid_slots(mask):
        out[b, t] = own[b] + (1 if b % 2 == 0 else -1) * 2 / (1 + math.exp(margins[b // 2]))
    return out, margins
