"""PPO's losses per token, and sums of them that do not depend on how a batch is split.

Each loss is a tensor ``[batch, time]``; :func:`aggregate` makes it a number. The two are apart because the
divisor belongs to the whole batch, while a call sees one micro-batch of one rank::

    n = valid_count(whole_batch_mask, "token-mean")      # summed over all ranks
    for part in micro_batches:
        terms = ppo_clip_loss(log_probs, part.old_log_probs, part.advantages, part.mask)
        aggregate(terms.loss, part.mask, "token-mean", denominator=n).backward()

Dividing each part by its own count instead gives short answers more weight, by an amount that changes with
the micro-batch size and the number of ranks.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from rlmesh.rl.masking import keep, masked_mean, masked_sum, require_mask

__all__ = [
    "Aggregation",
    "PolicyTerms",
    "ValueTerms",
    "aggregate",
    "entropy",
    "ppo_clip_loss",
    "token_log_probs",
    "valid_count",
    "value_clip_loss",
]

Aggregation = Literal["token-mean", "sequence-mean"]
"""``token-mean``: every valid token weighs the same. ``sequence-mean``: every sequence that has a valid token
does, and within it every token."""


class PolicyTerms(NamedTuple):
    """Per token, each ``[batch, time]``: the loss, the probability ratio (1 in masked slots, detached), and
    whether clipping took the gradient away."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


class ValueTerms(NamedTuple):
    """Per token, each ``[batch, time]``: the loss, and whether clipping took the gradient away."""

    loss: Tensor
    clipped: Tensor


def token_log_probs(logits: Tensor, tokens: Tensor, mask: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of the given tokens.

    ``log softmax(logits / temperature)[token]``. Use the temperature of sampling, else the ratio of policies
    that are equal is not 1.

    Args:
        logits: ``[batch, time, vocabulary]``; those that predict ``tokens``, so shifted already.
        tokens: ``[batch, time]``, integers.
        mask: ``[batch, time]``.
        temperature: > 0.

    Returns:
        ``[batch, time]``, in float32 at least, 0 in masked slots.

    Raises:
        ValueError: shapes differ, or the temperature is not positive.
        FloatingPointError: a result in a valid slot is not finite.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}: greedy choices have no log-probability")
    valid = require_mask(mask, like=tokens, name="tokens")
    if logits.shape[:-1] != tokens.shape:
        raise ValueError(f"logits of shape {tuple(logits.shape)} do not match tokens {tuple(tokens.shape)}")
    log_probs = _clean_logits(logits, valid).div(temperature).log_softmax(-1)
    chosen = torch.where(valid, tokens, torch.zeros_like(tokens))
    return keep(log_probs.gather(-1, chosen.unsqueeze(-1)).squeeze(-1), valid, name="log_probs")


def entropy(logits: Tensor, mask: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Entropy at each token, in nats: ``−Σ p log p`` with p = softmax(logits / temperature).

    Args:
        logits: ``[batch, time, vocabulary]``.
        mask: ``[batch, time]``.

    Returns:
        ``[batch, time]``, 0 in masked slots. As a bonus, subtract its mean from the loss (Mnih et al. 2016,
        arXiv:1602.01783).
    """
    valid = require_mask(mask, like=logits[..., 0], name="logits[..., 0]")
    log_probs = _clean_logits(logits, valid).div(temperature).log_softmax(-1)
    probs = log_probs.exp()
    # p · log p is 0 at p = 0, where the log is −inf for a token that was ruled out.
    terms = torch.where(probs > 0, probs * log_probs.clamp(min=torch.finfo(log_probs.dtype).min), 0.0)
    return keep(-terms.sum(-1), valid, name="entropy")


def ppo_clip_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
) -> PolicyTerms:
    """PPO's clipped surrogate, negated so that it is minimised.

    With r = exp(log π − log π_old): ``loss = −min(r · A, clip(r, 1 − clip_low, 1 + clip_high) · A)``
    (Schulman et al. 2017, arXiv:1707.06347, equation 7). A ``clip_high`` above ``clip_low`` leaves unlikely
    tokens more room to grow (Yu et al. 2025, arXiv:2503.14476, "clip-higher").

    Args:
        log_probs: of the policy that is trained, ``[batch, time]``.
        old_log_probs: of the policy that the advantages belong to, ``[batch, time]``; without gradient.
        advantages: ``[batch, time]``; no gradient flows to it.
        mask: ``[batch, time]``.
        clip_low: in [0, 1).
        clip_high: ≥ 0; ``None`` means as ``clip_low``.

    Raises:
        ValueError: shapes differ, or a clip bound is out of range.
        FloatingPointError: a valid slot is not finite, in an argument or in the ratio.
    """
    high = clip_low if clip_high is None else clip_high
    if not 0 <= clip_low < 1 or high < 0:
        raise ValueError(f"clip_low must be in [0, 1) and clip_high ≥ 0, got {clip_low} and {high}")
    valid = require_mask(mask, like=log_probs, name="log_probs")
    advantage = keep(advantages.detach(), valid, name="advantages")
    new = keep(log_probs, valid, name="log_probs")
    ratio = (new - keep(old_log_probs.detach(), valid, name="old_log_probs")).exp()
    plain = keep(ratio * advantage, valid, name="ratio · advantage")
    bounded = ratio.clamp(1 - clip_low, 1 + high) * advantage
    return PolicyTerms(-torch.minimum(plain, bounded), ratio.detach(), (bounded < plain).detach())


def value_clip_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None = 0.2
) -> ValueTerms:
    """Squared error of the critic, with its change from the old values clipped.

    ``loss = ½ · max((V − R)², (V_old + clip(V − V_old, ±clip) − R)²)``, the value loss of OpenAI's baselines
    PPO, described by Huang et al. 2022 ("The 37 Implementation Details of PPO", detail 9).

    Args:
        values: of the critic that is trained, ``[batch, time]``.
        old_values: of the critic before this batch, ``[batch, time]``; no gradient flows to it.
        returns: targets, ``[batch, time]``; no gradient flows to it.
        mask: ``[batch, time]``.
        clip: > 0; ``None`` is the plain squared error.

    Raises:
        ValueError: shapes differ, or ``clip`` is not positive.
        FloatingPointError: a valid slot is not finite.
    """
    if clip is not None and clip <= 0:
        raise ValueError(f"clip must be > 0, or None for no clipping; got {clip}")
    new = keep(values, mask, name="values")
    target = keep(returns.detach(), mask, name="returns")
    old = keep(old_values.detach(), mask, name="old_values")
    plain = (new - target).square()
    if clip is None:
        return ValueTerms(plain / 2, torch.zeros_like(plain, dtype=torch.bool))
    bounded = (old + (new - old).clamp(-clip, clip) - target).square()
    return ValueTerms(torch.maximum(plain, bounded) / 2, (bounded > plain).detach())


def valid_count(mask: Tensor, mode: Aggregation) -> Tensor:
    """What :func:`aggregate` divides by, for the part of the batch that ``mask`` belongs to.

    Sum it over all micro-batches and ranks (one ``all_reduce``).

    Args:
        mask: ``[batch, time]``.

    Returns:
        a scalar int64: valid tokens, or sequences with a valid token.
    """
    valid = mask != 0
    return valid.sum() if _known(mode) == "token-mean" else valid.any(1).sum()


def aggregate(per_token: Tensor, mask: Tensor, mode: Aggregation, *, denominator: Tensor | float) -> Tensor:
    """This part's share of a mean over the whole batch.

    * ``token-mean``: Σ over the valid tokens / denominator (Yu et al. 2025, arXiv:2503.14476, section 3.3);
    * ``sequence-mean``: Σ over the sequences of the mean of their valid tokens / denominator (Shao et al.
      2024, arXiv:2402.03300, equation 3).

    The shares of all micro-batches and ranks *add up* to the mean, and so do their gradients. Where the
    training engine averages gradients over N ranks (DDP and FSDP do), multiply the loss by N to get the sum.

    Args:
        per_token: ``[batch, time]``.
        mask: ``[batch, time]``.
        mode: see :data:`Aggregation`.
        denominator: :func:`valid_count` of the *whole* batch.

    Returns:
        a scalar; 0, with gradients 0, where nothing is valid here.

    Raises:
        ValueError: shapes differ, the mode is unknown, or the denominator is below the count at hand, so
            that it cannot be that of the whole batch.
        FloatingPointError: a valid slot is not finite.
    """
    here, whole = float(valid_count(mask, mode)), float(denominator)
    if here > whole:
        raise ValueError(
            f"denominator is {whole:g}, but this part alone has {here:g}: pass valid_count() summed over "
            "all micro-batches and ranks"
        )
    if mode == "token-mean":
        total = masked_sum(per_token, mask, name="per_token")
    else:
        total = masked_mean(per_token, mask, dim=1, name="per_token").sum()
    return total / max(whole, 1.0)


def _known(mode: Aggregation) -> Aggregation:
    if mode not in get_args(Aggregation):
        raise ValueError(f"unknown aggregation {mode!r}: use one of {', '.join(get_args(Aggregation))}")
    return mode


def _clean_logits(logits: Tensor, valid: Tensor) -> Tensor:
    """Logits with masked slots set to 0 (before the softmax, for its slope there), in float32 at least."""
    zero = torch.zeros((), dtype=logits.dtype, device=logits.device)
    clean = torch.where(valid.unsqueeze(-1), logits, zero)
    return clean.float() if clean.dtype in (torch.float16, torch.bfloat16) else clean
