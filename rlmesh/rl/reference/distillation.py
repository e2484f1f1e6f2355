"""Twins of :mod:`rlmesh.rl.distillation`."""

from __future__ import annotations

import numpy as np

from rlmesh.rl.reference.masking import Array, Mask, valid_slots


def sampled_reverse_kl_advantages(log_probs: Array, teacher_log_probs: Array, mask: Mask) -> Array:
    """log π_teacher − log π_student of the sampled token."""
    out = np.zeros(mask.shape)
    for b, t in valid_slots(mask):
        out[b, t] = teacher_log_probs[b, t] - log_probs[b, t]
    return out


def top_k_kl(log_probs: Array, teacher_log_probs: Array, mask: Mask, direction: str, *, tail: bool = True) -> Array:
    """Σ p · log (p / q) over the teacher's top k (and the rest), p the teacher's or the student's probabilities."""
    out = np.zeros(mask.shape)
    for b, t in valid_slots(mask):
        student, teacher = list(np.exp(log_probs[b, t])), list(np.exp(teacher_log_probs[b, t]))
        if tail:
            unit = np.finfo(np.float64).eps
            student, teacher = ([*ps, max(1 - sum(ps), unit)] for ps in (student, teacher))
        of, other = (teacher, student) if direction == "forward" else (student, teacher)
        out[b, t] = sum(p * np.log(p / q) for p, q in zip(of, other, strict=True))
    return out
