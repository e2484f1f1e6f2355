"""Twins of :mod:`rlmesh.rl.head`."""

from __future__ import annotations

import numpy as np

from rlmesh.rl.reference.masking import Array, Mask, Tokens, valid_slots


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max()
    result: Array = shifted - np.log(np.exp(shifted).sum())
    return result


def token_log_probs(logits: Array, tokens: Tokens, mask: Mask, *, temperature: float = 1.0) -> Array:
    """log softmax(logits / temperature) of the given tokens; logits are ``[batch, time, vocabulary]``."""
    out = np.zeros(tokens.shape)
    for b, t in valid_slots(mask):
        out[b, t] = _log_softmax(logits[b, t] / temperature)[tokens[b, t]]
    return out


def entropy(logits: Array, mask: Mask, *, temperature: float = 1.0) -> Array:
    """−Σ p log p with p = softmax(logits / temperature)."""
    out = np.zeros(mask.shape)
    for b, t in valid_slots(mask):
        log_probs = _log_softmax(logits[b, t] / temperature)
        out[b, t] = -sum(np.exp(lp) * lp for lp in log_probs if lp > -np.inf)
    return out
