"""Losses of policy and critic per token, and their sums, which do not depend on how a batch is split.

Each loss is a tensor ``[batch, time]``; :func:`aggregate` reduces it to a number. The two are separate because the
divisor belongs to the whole batch, while a call has one micro-batch of one rank::

    n = valid_count(whole_batch_mask, "token-mean")      # summed over all ranks
    for part in micro_batches:
        terms = ppo_clip_loss(log_probs, part.old_log_probs, part.advantages, part.mask)
        aggregate(terms.loss, part.mask, "token-mean", denominator=n).backward()

If each part were divided by its own count, short answers would get more weight, depending on the micro-batch size and
the number of ranks.

Log-probabilities and entropy come from :mod:`rlmesh.rl.head`.
"""

from __future__ import annotations

from typing import NamedTuple, get_args

import torch
from torch import Tensor

from rlmesh.rl.algorithms.choices import Aggregation
from rlmesh.rl.head import entropy, token_log_probs
from rlmesh.rl.masking import keep, masked_mean, masked_sum, require, require_mask

__all__ = [
    "Aggregation",
    "PolicyTerms",
    "ValueTerms",
    "aggregate",
    "cispo_loss",
    "entropy",
    "gspo_loss",
    "ppo_clip_loss",
    "sapo_loss",
    "token_log_probs",
    "valid_count",
    "value_clip_loss",
]


class PolicyTerms(NamedTuple):
    """Per token, each ``[batch, time]``: the loss, the probability ratio (1 in masked slots, detached), and a flag that
    clipping removed the gradient."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


class ValueTerms(NamedTuple):
    """Per token, each ``[batch, time]``: the loss, and a flag that clipping removed the gradient."""

    loss: Tensor
    clipped: Tensor


def ppo_clip_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> PolicyTerms:
    """PPO's clipped surrogate, negated so that it is minimised.

    With r = exp(log π − log π_old): ``loss = −min(r · A, clip(r, 1 − clip_low, 1 + clip_high) · A)``
    (Schulman et al. 2017, arXiv:1707.06347, equation 7). A ``clip_high`` above ``clip_low`` leaves unlikely
    tokens more room to grow (Yu et al. 2025, arXiv:2503.14476, "clip-higher"). With ``dual_clip`` c, the loss of a
    token with A < 0 is at most ``−c · A`` for any ratio (Ye et al. 2019, arXiv:1912.09729, equation 4).

    Args:
        log_probs: of the policy that is trained, ``[batch, time]``.
        old_log_probs: of the policy that the advantages belong to, ``[batch, time]``; without gradient.
        advantages: ``[batch, time]``; no gradient flows to it.
        mask: ``[batch, time]``.
        clip_low: in [0, 1).
        clip_high: ≥ 0; ``None`` means as ``clip_low``.
        dual_clip: > 1, usually 3; ``None`` leaves the loss of tokens with A < 0 unbounded.

    Raises:
        ValueError: shapes differ, or a clip bound is out of range.
        FloatingPointError: a valid slot is not finite, in an argument or in the ratio.
    """
    low, high = _clip_range(clip_low, clip_high)
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip must be > 1, or None for none; got {dual_clip}")
    _, log_ratio, advantage, valid = _ratio_terms(log_probs, old_log_probs, advantages, mask)
    ratio = log_ratio.exp()
    plain = keep(ratio * advantage, valid, name="ratio · advantage")
    bounded = ratio.clamp(low, high) * advantage
    objective, clipped = torch.minimum(plain, bounded), bounded < plain
    if dual_clip is not None:
        floor = torch.where(advantage < 0, dual_clip * advantage, -torch.inf)
        clipped = clipped | (floor > objective)
        objective = torch.maximum(objective, floor)
    return PolicyTerms(-objective, ratio.detach(), clipped.detach())


def gspo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    rows: Tensor | None = None,
    clip_low: float = 3e-4,
    clip_high: float | None = 4e-4,
) -> PolicyTerms:
    """GSPO: PPO's clipped surrogate with one ratio per sequence.

    ``s = exp(mean over the valid tokens of log π − log π_old)``, and per token
    ``loss = −min(s′ · A, clip(s′) · A)`` with ``s′ = sg(s) · π / sg(π)``, which has the value of s and lets each
    token's advantage have its own gradient (Zheng et al. 2025, arXiv:2507.18071, GSPO-token; with equal advantages in a
    sequence it is GSPO).

    Args:
        log_probs: of the policy that is trained, ``[batch, time]``; each row is one whole sequence. Or ``[tokens]`` of
            whole sequences, with ``rows``.
        old_log_probs: of the policy that the advantages belong to, the same shape; without gradient.
        advantages: the same shape; no gradient flows to it.
        mask: the same shape.
        rows: ``[tokens]``, integers ≥ 0, equal for the tokens of a sequence; ``None`` for a rectangular batch.
        clip_low: in [0, 1); the paper's values are far below those of PPO, since s is a mean.
        clip_high: ≥ 0; ``None`` means as ``clip_low``.

    Raises:
        ValueError: shapes differ, or a clip bound is out of range.
        FloatingPointError: a valid slot is not finite, in an argument or in the ratio.
    """
    low, high = _clip_range(clip_low, clip_high)
    new, log_ratio, advantage, valid = _ratio_terms(log_probs, old_log_probs, advantages, mask)
    of_sequence = _mean_of_rows(log_ratio.detach(), valid, rows)
    ratio = torch.where(valid, (of_sequence + new - new.detach()).exp(), 1.0).to(new.dtype)
    plain = keep(ratio * advantage, valid, name="ratio · advantage")
    bounded = ratio.clamp(low, high) * advantage
    return PolicyTerms(-torch.minimum(plain, bounded), ratio.detach(), (bounded < plain).detach())


def cispo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float | None = None,
    clip_high: float = 4.0,
) -> PolicyTerms:
    """CISPO: the policy gradient weighted by the clipped ratio, through which no gradient flows.

    ``loss = −sg(clip(r, 1 − clip_low, 1 + clip_high)) · A · log π`` (MiniMax 2025, arXiv:2506.13585, equation 4). Every
    token keeps a gradient; the clip bounds its weight only.

    Args:
        log_probs: of the policy that is trained, ``[batch, time]``.
        old_log_probs: of the policy that the advantages belong to, ``[batch, time]``; without gradient.
        advantages: ``[batch, time]``; no gradient flows to it.
        mask: ``[batch, time]``.
        clip_low: in [0, 1]; ``None`` sets no lower bound, as in the paper.
        clip_high: ≥ 0.

    Returns:
        as :func:`ppo_clip_loss`; ``clipped`` is True where the weight is bounded.

    Raises:
        ValueError: shapes differ, or a clip bound is out of range.
        FloatingPointError: a valid slot is not finite, in an argument or in the ratio.
    """
    if clip_high < 0 or (clip_low is not None and not 0 <= clip_low <= 1):
        raise ValueError(f"clip_low must be in [0, 1] and clip_high ≥ 0, got {clip_low} and {clip_high}")
    new, log_ratio, advantage, valid = _ratio_terms(log_probs, old_log_probs, advantages, mask)
    ratio = keep(log_ratio.detach().exp(), torch.ones_like(valid), name="ratio")
    weight = ratio.clamp(0.0 if clip_low is None else 1 - clip_low, 1 + clip_high)
    return PolicyTerms(-weight * advantage * new, ratio, weight != ratio)


def sapo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    temperature_up: float = 1.0,
    temperature_down: float = 1.05,
) -> PolicyTerms:
    """SAPO: a smooth gate in place of PPO's clip.

    ``loss = −(4 / τ) · σ(τ · (r − 1)) · A`` with ``τ = temperature_up`` where A > 0 and ``temperature_down`` elsewhere
    (Gao et al. 2025, arXiv:2511.20347). At r = 1 the gradient is that of the plain policy gradient,
    and it fades as the ratio leaves 1, faster with a larger temperature.

    Args:
        log_probs: of the policy that is trained, ``[batch, time]``.
        old_log_probs: of the policy that the advantages belong to, ``[batch, time]``; without gradient.
        advantages: ``[batch, time]``; no gradient flows to it.
        mask: ``[batch, time]``.
        temperature_up, temperature_down: > 0.

    Returns:
        as :func:`ppo_clip_loss`; nothing is ever ``clipped``.

    Raises:
        ValueError: shapes differ, or a temperature is not positive.
        FloatingPointError: a valid slot is not finite, in an argument or in the ratio.
    """
    if temperature_up <= 0 or temperature_down <= 0:
        raise ValueError(f"temperatures must be > 0, got {temperature_up} and {temperature_down}")
    _, log_ratio, advantage, valid = _ratio_terms(log_probs, old_log_probs, advantages, mask)
    ratio = keep(log_ratio.exp(), torch.ones_like(valid), name="ratio")
    temperature = torch.full_like(ratio, temperature_down).masked_fill(advantage > 0, temperature_up)
    gate = 4 / temperature * torch.sigmoid(temperature * (ratio - 1))
    return PolicyTerms(-gate * advantage, ratio.detach(), torch.zeros_like(valid))


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
    """This part's summand of the divisor of :func:`aggregate`.

    Sum it over all micro-batches and ranks (one ``all_reduce``).

    Args:
        mask: ``[batch, time]``.

    Returns:
        a scalar int64: valid tokens, or sequences with a valid token (``sequence-mean`` and ``constant``).
    """
    valid = mask != 0
    return valid.sum() if _known(mode) == "token-mean" else valid.any(1).sum()


def aggregate(
    per_token: Tensor, mask: Tensor, mode: Aggregation, *, denominator: Tensor | float, constant: float | None = None
) -> Tensor:
    """The share of this part in a mean over the whole batch.

    * ``token-mean``: Σ over the valid tokens / denominator (Yu et al. 2025, arXiv:2503.14476, section 3.3);
    * ``sequence-mean``: Σ over the sequences of the mean of their valid tokens / denominator (Shao et al.
      2024, arXiv:2402.03300, equation 3);
    * ``constant``: Σ over the valid tokens / (denominator · constant) (Liu et al. 2025, arXiv:2503.20783, section 3.2).

    The shares of all micro-batches and ranks *add up* to the mean, and so do their gradients. Where the
    training engine averages gradients over N ranks (DDP and FSDP do), multiply the loss by N to get the sum.

    Args:
        per_token: ``[batch, time]``.
        mask: ``[batch, time]``.
        mode: see :data:`Aggregation`.
        denominator: :func:`valid_count` of the *whole* batch.
        constant: for the mode ``constant`` only, > 0: usually the token limit of a response.

    Returns:
        a scalar; 0, with gradients 0, if no slot of this part is valid.

    Raises:
        ValueError: shapes differ, the mode is unknown, ``constant`` is missing or not allowed, or the denominator is
            below this part's count, so that it cannot be that of the whole batch.
        FloatingPointError: a valid slot is not finite.
    """
    if (mode == "constant") != (constant is not None) or (constant is not None and constant <= 0):
        raise ValueError(f"the aggregation 'constant', and no other, takes a constant > 0; got {mode!r} and {constant}")
    here = valid_count(mask, mode)
    whole = denominator if isinstance(denominator, Tensor) else torch.tensor(float(denominator), device=here.device)
    require(here > whole, _denominator_too_small, here, whole)
    if mode == "sequence-mean":
        total = masked_mean(per_token, mask, dim=1, name="per_token").sum()
    else:
        total = masked_sum(per_token, mask, name="per_token")
    return total / (whole.clamp(min=1) * (1.0 if constant is None else constant))


def _denominator_too_small(_: bool, here: float, whole: float) -> ValueError:
    return ValueError(
        f"denominator is {whole:g}, but this part alone has {here:g}: pass valid_count() summed over "
        "all micro-batches and ranks"
    )


def _known(mode: Aggregation) -> Aggregation:
    if mode not in get_args(Aggregation):
        raise ValueError(f"unknown aggregation {mode!r}: use one of {', '.join(get_args(Aggregation))}")
    return mode


def _clip_range(clip_low: float, clip_high: float | None) -> tuple[float, float]:
    """The lowest and the highest ratio that are not clipped."""
    high = clip_low if clip_high is None else clip_high
    if not 0 <= clip_low < 1 or high < 0:
        raise ValueError(f"clip_low must be in [0, 1) and clip_high ≥ 0, got {clip_low} and {high}")
    return 1 - clip_low, 1 + high


def _ratio_terms(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The checked and masked log π, log π − log π_old and advantages, and the mask as booleans."""
    valid = require_mask(mask, like=log_probs, name="log_probs")
    advantage = keep(advantages.detach(), valid, name="advantages")
    new = keep(log_probs, valid, name="log_probs")
    return new, new - keep(old_log_probs.detach(), valid, name="old_log_probs"), advantage, valid


def _mean_of_rows(x: Tensor, valid: Tensor, rows: Tensor | None) -> Tensor:
    """For each token, the mean of ``x`` over the valid tokens of its sequence; its shape broadcasts to ``x``."""
    if rows is None:
        return masked_mean(x, valid, dim=1).unsqueeze(1)
    _, place = rows.unique(return_inverse=True)
    zeros = x.new_zeros(len(x))  # enough slots, since there are at most as many sequences as tokens
    counts = zeros.scatter_add(0, place, valid.to(x.dtype))
    return (zeros.scatter_add(0, place, x) / counts.clamp(min=1))[place]
