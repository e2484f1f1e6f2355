"""Divergences between a student and a teacher at each token, for distillation on the student's own samples.

The input from the teacher is its log-probability of the sampled token, or those of its k most likely tokens.

With the sampled tokens, the reverse divergence is a policy gradient: :func:`sampled_reverse_kl_advantages` gives the
advantages for the policy component of the loss. With the teacher's top k, :func:`top_k_kl` is a loss by itself.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from rlmesh.rl.masking import keep, require_finite, require_mask

__all__ = ["Direction", "sampled_reverse_kl_advantages", "top_k_kl"]

Direction = Literal["forward", "reverse"]
"""``forward``: KL(teacher ‖ student), which covers all modes of the teacher. ``reverse``: KL(student ‖ teacher), which
concentrates on the teacher's main modes."""


def sampled_reverse_kl_advantages(log_probs: Tensor, teacher_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Advantages whose policy gradient is that of the reverse divergence at each token.

    ``A[t] = log π_teacher − log π_student`` of the sampled token: the gradient of
    ``E_student[log π_student − log π_teacher]`` is ``E[(log π_student − log π_teacher) · ∇ log π_student]`` (Agarwal et
    al. 2023, arXiv:2306.13649; Gu et al. 2023, arXiv:2306.08543).

    Args:
        log_probs: of the student that sampled, ``[batch, time]``.
        teacher_log_probs: of the teacher for the same tokens, ``[batch, time]``.
        mask: ``[batch, time]``.

    Returns:
        ``[batch, time]``, 0 in masked slots. No gradient flows to them.

    Raises:
        ValueError: shapes differ.
        FloatingPointError: a valid slot is not finite.
    """
    teacher = keep(teacher_log_probs.detach(), mask, name="teacher_log_probs")
    return teacher - keep(log_probs.detach(), mask, name="log_probs")


def top_k_kl(
    log_probs: Tensor, teacher_log_probs: Tensor, mask: Tensor, direction: Direction, *, tail: bool = True
) -> Tensor:
    """The divergence at each token, over the teacher's k most likely tokens.

    With p the teacher's probabilities of its top k, q the student's of the same tokens: ``forward = Σ p · (log p − log
    q)``, ``reverse = Σ q · (log q − log p)``. With ``tail``, everything else is one more event of probability ``1 − Σ``
    on each side, so that the value is a divergence (never negative, 0 only if both agree on all k + 1 events). Without
    it, the sums are over the k tokens alone, and the value may be negative.

    Args:
        log_probs: of the student, for the teacher's top tokens, ``[batch, time, k]``.
        teacher_log_probs: of the teacher, for the same tokens, ``[batch, time, k]``; no gradient flows to it.
        mask: ``[batch, time]``.
        direction: forward or reverse.
        tail: treat all other tokens as one event.

    Returns:
        ``[batch, time]``, 0 in masked slots.

    Raises:
        ValueError: shapes differ, or the direction is unknown.
        FloatingPointError: a valid slot is not finite.
    """
    if direction not in get_args(Direction):
        raise ValueError(f"unknown direction {direction!r}: use one of {', '.join(get_args(Direction))}")
    if teacher_log_probs.shape != log_probs.shape or log_probs.ndim != 3:
        raise ValueError(
            f"log_probs {tuple(log_probs.shape)} and teacher_log_probs {tuple(teacher_log_probs.shape)}: expected two "
            "of [batch, time, k]"
        )
    valid = require_mask(mask, like=log_probs[..., 0], name="log_probs[..., 0]")
    each = valid.unsqueeze(-1).expand_as(log_probs)
    student = keep(log_probs, each, name="log_probs")
    teacher = keep(teacher_log_probs.detach(), each, name="teacher_log_probs")
    if tail:
        student = torch.cat([student, _log_rest(student)], -1)
        teacher = torch.cat([teacher, _log_rest(teacher)], -1)
    source, other = (teacher, student) if direction == "forward" else (student, teacher)
    divergence = (source.exp() * (source - other)).sum(-1)
    require_finite(divergence, valid, name="divergence")
    return torch.where(valid, divergence, torch.zeros((), dtype=divergence.dtype, device=divergence.device))


def _log_rest(log_probs: Tensor) -> Tensor:
    """``log(1 − Σ exp log_probs)`` along the last axis, ``[…, 1]``.

    The rest is at least the rounding unit of the dtype: rounding can bring the sum to 1 and above, where the logarithm
    and its slope are infinite.
    """
    unit = torch.finfo(log_probs.dtype).eps
    return (1 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=unit).log()
