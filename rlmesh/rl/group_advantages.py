"""Advantages of whole responses, by comparison with other responses to the same prompt.

Each function takes one reward per response and returns one advantage per response; :func:`spread` copies the advantage
of a response to all of its tokens. A response whose reward is missing (the scorer failed or abstained) is not
``valid``: it takes no part in the mean and the deviation of its group, and its advantage is 0. A group without
differences (one valid response, or equal rewards) has advantages of 0.

Everything is computed in the dtype of the rewards, float64 included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlmesh.rl.masking import keep, masked_whiten, require_mask

__all__ = [
    "dr_grpo",
    "grpo",
    "opo",
    "pass_at_k",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "spread",
]


@dataclass(frozen=True, slots=True)
class _Groups:
    """The valid rewards of a batch by group.

    Attributes:
        rewards: ``[batch]``, 0 where invalid, floating point.
        valid: ``[batch]``, boolean.
        place: ``[batch]``, the index of each response's group.
        counts: ``[groups]``, valid responses.
    """

    rewards: Tensor
    valid: Tensor
    place: Tensor
    counts: Tensor

    @classmethod
    def of(cls, rewards: Tensor, groups: Tensor, valid: Tensor | None) -> _Groups:
        if groups.shape != rewards.shape or rewards.ndim != 1:
            raise ValueError(
                f"rewards {tuple(rewards.shape)} and groups {tuple(groups.shape)}: expected one each per response"
            )
        usable = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid
        usable = require_mask(usable, like=rewards, name="rewards")
        reward = rewards.detach()
        if not reward.is_floating_point():
            reward = reward.to(torch.get_default_dtype())
        reward = keep(reward, usable, name="rewards")
        names, place = groups.unique(return_inverse=True)
        counts = reward.new_zeros(len(names)).scatter_add(0, place, usable.to(reward.dtype))
        return cls(reward, usable, place, counts)

    def sum(self, x: Tensor) -> Tensor:
        """Per group, ``[groups]``: the sum of the valid entries of ``x`` ``[batch]``."""
        return torch.zeros_like(self.counts).scatter_add(0, self.place, torch.where(self.valid, x, 0.0).to(x.dtype))

    def of_each(self, per_group: Tensor) -> Tensor:
        """``[batch]``: for each response, the entry of ``per_group`` ``[groups]`` of its group; 0 where invalid."""
        return torch.where(self.valid, per_group[self.place], 0.0).to(per_group.dtype)

    def mean(self) -> Tensor:
        return self.sum(self.rewards) / self.counts.clamp(min=1)

    def centred(self) -> Tensor:
        """``[batch]``: rewards less the mean of their group, 0 where invalid."""
        return torch.where(self.valid, self.rewards - self.of_each(self.mean()), 0.0).to(self.rewards.dtype)


def grpo(
    rewards: Tensor, groups: Tensor, *, scale: bool = True, eps: float = 1e-6, valid: Tensor | None = None
) -> Tensor:
    """GRPO: the distance from the group's mean, in standard deviations of the group.

    ``A[i] = (r[i] − mean r of its group) / (std r of its group + eps)`` with the standard deviation of n − 1 (Shao et
    al. 2024, arXiv:2402.03300, section 4.1.2). Without ``scale`` this is :func:`dr_grpo`.

    Args:
        rewards: one per response, ``[batch]``.
        groups: ``[batch]``, integers; equal for responses to one prompt.
        scale: divide by the standard deviation.
        eps: added to the standard deviation.
        valid: ``[batch]``, False where the reward is missing; ``None``: all are valid.

    Returns:
        ``[batch]``. No gradient flows to them.

    Raises:
        ValueError: shapes differ.
        FloatingPointError: a valid reward is not finite.
    """
    of = _Groups.of(rewards, groups, valid)
    centred = of.centred()
    if not scale:
        return centred
    variance = of.sum(centred.square()) / (of.counts - 1).clamp(min=1)
    return centred / (variance.sqrt()[of.place] + eps)


def dr_grpo(rewards: Tensor, groups: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """Dr. GRPO: the distance from the group's mean, not divided by the deviation.

    ``A[i] = r[i] − mean r of its group``, which weighs easy and hard prompts alike (Liu et al. 2025,
    arXiv:2503.20783). Use it with the loss aggregation ``constant``.

    Arguments, result and errors are those of :func:`grpo`.
    """
    return grpo(rewards, groups, scale=False, valid=valid)


def rloo(rewards: Tensor, groups: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """RLOO: the distance from the mean of the *other* responses of the group.

    ``A[i] = r[i] − Σ_{j ≠ i} r[j] / (n − 1)``, an unbiased baseline (Ahmadian et al. 2024, arXiv:2402.14740).

    Arguments, result and errors are those of :func:`grpo`.
    """
    of = _Groups.of(rewards, groups, valid)
    return of.centred() * of.of_each(of.counts / (of.counts - 1).clamp(min=1))


def remax(rewards: Tensor, greedy_rewards: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """ReMax: the distance from the reward of the greedy response to the same prompt.

    ``A[i] = r[i] − r_greedy[i]`` (Li et al. 2023, arXiv:2310.10505).

    Args:
        rewards: one per response, ``[batch]``.
        greedy_rewards: ``[batch]``, the reward of the greedy response to the prompt of each response.
        valid: ``[batch]``, False where either reward is missing; ``None``: all are valid.

    Returns:
        ``[batch]``. No gradient flows to them.

    Raises:
        ValueError: shapes differ.
        FloatingPointError: a valid reward is not finite.
    """
    usable = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid
    reward = keep(rewards.detach(), usable, name="rewards")
    return reward - keep(greedy_rewards.detach(), usable, name="greedy_rewards")


def opo(rewards: Tensor, groups: Tensor, lengths: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """OPO: the distance from the group's mean weighted by length, which minimises the variance of the gradient.

    ``A[i] = r[i] − Σ_j l[j] · r[j] / Σ_j l[j]`` over the group (Hao et al. 2025, arXiv:2505.23585): the norm of a
    response's gradient grows with its length.

    Args:
        lengths: tokens of each response, ``[batch]``.

    Other arguments, result and errors are those of :func:`grpo`.
    """
    of = _Groups.of(rewards, groups, valid)
    weight = keep(lengths.to(of.rewards.dtype), of.valid, name="lengths")
    total = of.sum(weight)
    baseline = of.sum(weight * of.rewards) / torch.where(total > 0, total, 1.0).to(total.dtype)
    return torch.where(of.valid, of.rewards - of.of_each(baseline), 0.0).to(of.rewards.dtype)


def pass_at_k(correct: Tensor, groups: Tensor, *, k: int, valid: Tensor | None = None) -> Tensor:
    """Pass@k training: advantages that raise the probability that at least one of k responses is right.

    With n valid responses of a group, w of them wrong, and ``R = 1 − C(w, k) / C(n, k)`` the group's pass@k,
    ``s = √(R · (1 − R))``:

    * right: ``A = (1 − R) / s``;
    * wrong: ``A = (1 − R − C(w − 1, k − 1) / C(n − 1, k − 1)) / s``

    (Chen et al. 2025, arXiv:2508.10751, the analytical derivation). A group of fewer than k valid responses, and one
    whose pass@k is 0 or 1, has advantages of 0.

    Args:
        correct: ``[batch]``, boolean.
        k: responses of which one must be right, ≥ 1.

    Other arguments, result and errors are those of :func:`grpo`.
    """
    if k < 1:
        raise ValueError(f"k must be ≥ 1, got {k}")
    if correct.dtype != torch.bool:
        raise ValueError(f"correct must be boolean, got {correct.dtype}: compare the rewards with what counts as right")
    of = _Groups.of(correct.double(), groups, valid)
    wrong = of.counts - of.sum(of.rewards)
    all_wrong = torch.ones_like(wrong)  # C(w, k) / C(n, k)
    all_wrong_with = torch.ones_like(wrong)  # C(w − 1, k − 1) / C(n − 1, k − 1)
    for i in range(k):
        factor = (wrong - i).clamp(min=0) / (of.counts - i).clamp(min=1)
        all_wrong = all_wrong * factor
        if i:
            all_wrong_with = all_wrong_with * factor
    passed = 1 - all_wrong
    deviation = (passed * all_wrong).sqrt()
    usable = (deviation > 0) & (of.counts >= k)
    scale = torch.where(usable, 1 / torch.where(usable, deviation, 1.0), 0.0)
    right = of.of_each(all_wrong * scale)
    return torch.where(of.rewards > 0, right, of.of_each((all_wrong - all_wrong_with) * scale))


def reinforce_plus_plus_baseline(
    rewards: Tensor, groups: Tensor, mask: Tensor, *, valid: Tensor | None = None
) -> Tensor:
    """REINFORCE++ with baseline: the distance from the group's mean, whitened over all tokens of the batch.

    ``A[i] = (a[i] − mean a) / std a`` with ``a[i] = r[i] − mean r of its group``, mean and deviation over the valid
    tokens of the whole batch (Hu et al. 2025, arXiv:2501.03262).

    Args:
        mask: ``[batch, time]``, True at the tokens of the policy, of the *whole* batch.

    Other arguments and errors are those of :func:`grpo`.

    Returns:
        per token, ``[batch, time]``, 0 in masked slots and in invalid responses. No gradient flows to them.
    """
    of = _Groups.of(rewards, groups, valid)
    return masked_whiten(spread(of.centred(), mask), (mask != 0) & of.valid.unsqueeze(1))


def spread(advantages: Tensor, mask: Tensor) -> Tensor:
    """Copy each response's advantage to all of its valid tokens.

    Args:
        advantages: ``[batch]``.
        mask: ``[batch, time]``.

    Returns:
        ``[batch, time]``, 0 in masked slots.

    Raises:
        ValueError: the numbers of rows differ.
    """
    if advantages.shape != mask.shape[:1]:
        raise ValueError(
            f"advantages has shape {tuple(advantages.shape)}: expected one per row of mask, ({mask.shape[0]},)"
        )
    return torch.where(mask != 0, advantages.unsqueeze(1), 0.0).to(advantages.dtype)
