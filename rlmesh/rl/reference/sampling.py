"""Twins of :mod:`rlmesh.rl.engines.sampling`, for one row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlmesh.rl.reference.masking import Array


def log_distribution(
    logits: Array, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Array:
    """Log-probabilities ``[vocabulary]`` of the sampling distribution, -inf for tokens that truncation leaves out."""
    whole, kept = _kept(logits, temperature, top_k, top_p, min_p)
    found = np.full(len(logits), -np.inf)
    for token in kept:
        found[token] = np.log(whole[token] / sum(whole[other] for other in kept))
    return found


def kept_mass(logits: Array, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> float:
    """The log of the probability of all tokens that truncation keeps."""
    whole, kept = _kept(logits, temperature, top_k, top_p, min_p)
    return float(np.log(sum(whole[token] for token in kept)))


def _kept(logits: Array, temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[Array, list[int]]:
    """Probabilities of the whole vocabulary, and the tokens that are kept, likeliest first."""
    whole = np.exp((logits - logits.max()) / temperature)
    whole /= whole.sum()
    order = sorted(range(len(logits)), key=lambda token: -whole[token])
    likely = [token for token in order if whole[token] >= min_p * whole.max()]
    if top_k:
        likely = likely[:top_k]
    left, reached, kept = sum(whole[token] for token in likely), 0.0, list[int]()
    for token in likely:
        if top_p < 1 and reached >= top_p:
            break
        kept.append(token)
        reached += whole[token] / left
    return whole, kept


def penalised(
    logits: Array,
    prompt: Sequence[int],
    response: Sequence[int],
    *,
    repetition: float,
    presence: float,
    frequency: float,
) -> Array:
    """Logits ``[vocabulary]`` with the penalties of the tokens so far."""
    out = logits.copy()
    for token in range(len(out)):
        if token in prompt or token in response:
            out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
        count = list(response).count(token)
        out[token] -= frequency * count + (presence if count else 0.0)
    return out
