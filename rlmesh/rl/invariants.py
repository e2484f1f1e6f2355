"""Invariants of a healthy run, as checks that a trainer makes every few steps.

A run that violates an invariant continues, but optimises something else than intended. Each check raises
:class:`InvariantViolated` with the numbers, the likely cause and the remedy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlmesh.rl.drift import DriftLimits
from rlmesh.rl.masking import keep, require_mask

__all__ = [
    "Cause",
    "EngineGap",
    "InvariantViolated",
    "name_cause",
    "require_centred",
    "require_on_policy",
    "require_same_loss",
    "require_tokens",
]

Cause = Literal["none", "dtype", "truncation", "template", "stale weights", "unknown"]


class InvariantViolated(ArithmeticError):
    """A condition is violated that a correct training step guarantees."""


def require_tokens(mask: Tensor, *, what: str = "the batch") -> None:
    """Check that at least one token is to be trained.

    Args:
        mask: any shape.
        what: name of the batch in the message.

    Raises:
        InvariantViolated: the mask is empty.
    """
    if not bool((mask != 0).any()):
        raise InvariantViolated(
            f"{what} has no token to train on ({tuple(mask.shape)} slots, all masked): all groups were dropped, or the "
            "responses are empty. Look at the counts of failed and abstained rewards, and at the samples"
        )


def require_on_policy(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, *, atol: float = 1e-3) -> None:
    """Check that the probability ratio is 1 before the first update of a step.

    Both log-probabilities come from the same weights and the same kernels then, so they differ by rounding only. A
    larger gap means that temperature, dropout, packing or weights differ between the two passes.

    Args:
        log_probs: of the policy that is about to be trained, ``[batch, time]``.
        old_log_probs: as computed before the step, ``[batch, time]``.
        mask: ``[batch, time]``.
        atol: allowed ``|log ratio|`` of any token.

    Raises:
        InvariantViolated: a valid token's log-ratio is beyond ``atol``.
        ValueError: shapes differ.
        FloatingPointError: a valid slot is not finite.
    """
    valid = require_mask(mask, like=log_probs, name="log_probs")
    gap = keep(log_probs.detach(), valid, name="log_probs")
    gap = (gap - keep(old_log_probs.detach(), valid, name="old_log_probs")).abs()
    largest = float(gap.max()) if gap.numel() else 0.0
    if largest > atol:
        places = gap.argmax()
        row, time = divmod(int(places), gap.shape[1])
        raise InvariantViolated(
            f"before the first update log π − log π_old is {largest:.3g} at row {row}, token {time} (allowed {atol:g}; "
            f"{int((gap > atol).sum())} of {int(valid.sum())} tokens are beyond): both passes must use the same "
            "weights, temperature, dtype and attention, and no dropout"
        )


def require_same_loss(one: float, other: float, *, cuts: tuple[str, str], rtol: float = 1e-4) -> None:
    """Check that two cuts of one batch into micro-batches give the same loss.

    Args:
        one, other: the loss of the whole batch, as the sum of the shares of its parts.
        cuts: names of the two cuts, for the message.
        rtol: allowed difference, relative to the larger loss.

    Raises:
        InvariantViolated: the losses differ by more.
    """
    if abs(one - other) > rtol * max(abs(one), abs(other)) + 1e-12:
        raise InvariantViolated(
            f"the loss is {one:.8g} when cut as {cuts[0]} and {other:.8g} when cut as {cuts[1]}: a part is divided by "
            "its own count. Pass aggregate() the valid_count() of the whole batch, summed over all ranks"
        )


def require_centred(advantages: Tensor, groups: Tensor, *, valid: Tensor | None = None, atol: float = 1e-4) -> None:
    """Check that the advantages of each group sum to zero, as those of GRPO, Dr. GRPO and RLOO do.

    Args:
        advantages: one per response, ``[batch]``.
        groups: ``[batch]``, integers.
        valid: ``[batch]``, False where the reward is missing.
        atol: allowed ``|mean|`` of a group.

    Raises:
        InvariantViolated: the mean of a group is beyond ``atol``, or an invalid response has an advantage.
        ValueError: shapes differ.
    """
    usable = torch.ones_like(advantages, dtype=torch.bool) if valid is None else valid
    usable = require_mask(usable, like=advantages, name="advantages")
    if bool((advantages[~usable] != 0).any()):
        raise InvariantViolated("a response without a reward has an advantage: it must take no part, so 0")
    names, place = groups.unique(return_inverse=True)
    zeros = advantages.new_zeros(len(names))
    mean = zeros.scatter_add(0, place, advantages) / zeros.scatter_add(0, place, usable.to(zeros.dtype)).clamp(min=1)
    if len(names) and float(mean.abs().max()) > atol:
        worst = int(mean.abs().argmax())
        raise InvariantViolated(
            f"the advantages of group {int(names[worst])} have mean {float(mean[worst]):.3g} (allowed {atol:g}): a "
            "response of the group is missing, was counted twice, or stands in another group"
        )


@dataclass(frozen=True, slots=True)
class EngineGap:
    """The gap ``trainer − engine`` of the log-probabilities of a batch, in numbers that distinguish its causes.

    Attributes:
        mean_abs: mean of ``|gap|``, in nats.
        mean: mean of ``gap``: far below 0 if the engine's distribution is renormalised over fewer tokens.
        first: mean of ``|gap|`` over the first tokens of the responses.
        rest: mean of ``|gap|`` over all others.
        tokens: valid tokens.
    """

    mean_abs: float
    mean: float
    first: float
    rest: float
    tokens: int

    @classmethod
    def of(cls, trainer: Tensor, engine: Tensor, mask: Tensor, *, first_tokens: int = 1) -> EngineGap:
        """Compare ``[batch, time]`` log-probabilities of the same tokens.

        Args:
            first_tokens: number of valid tokens at the beginning of each row that count as its first tokens.

        Raises:
            ValueError: shapes differ.
            FloatingPointError: a valid slot is not finite.
        """
        valid = require_mask(mask, like=trainer, name="trainer")
        gap = keep(trainer.detach(), valid, name="trainer") - keep(engine.detach(), valid, name="engine")
        early = valid & (valid.cumsum(1) <= first_tokens)

        def mean(x: Tensor, where: Tensor) -> float:
            return float(x[where].mean()) if bool(where.any()) else 0.0

        size = gap.abs()
        return cls(mean(size, valid), mean(gap, valid), mean(size, early), mean(size, valid & ~early), int(valid.sum()))


def name_cause(
    gap: EngineGap, limits: DriftLimits, *, versions_behind: int = 0, truncated: bool = False, same_prompt: bool = True
) -> tuple[Cause, str]:
    """The most likely cause of a gap between an engine and the trainer, and a sentence with the remedy.

    Known facts decide first (another prompt, older weights), then the shape of the gap: a truncated distribution shifts
    all log-probabilities in the same direction, and a wrong template affects the first tokens most.

    Args:
        gap: the measured gap.
        limits: the gap that the coarser dtype explains (:data:`rlmesh.rl.drift.LIMITS`).
        versions_behind: number of versions by which the sampling weights are older than the trainer's.
        truncated: the engine sampled with top-p, top-k or min-p, and its log-probabilities are those of the truncated
            distribution.
        same_prompt: the token ids of the prompt are equal on both sides.

    Returns:
        the cause, ``"none"`` if the gap is negligible, and the sentence.
    """
    text = f"mean |gap| {gap.mean_abs:.3g} nats over {gap.tokens} tokens (limit {limits.mean_abs:g})"
    if not same_prompt:
        return "template", f"{text}: engine and trainer see different prompts; give both the same token ids"
    if gap.mean_abs <= limits.mean_abs / 10:
        return "none", f"{text}: engine and trainer agree"
    if gap.mean_abs <= limits.mean_abs:
        return "dtype", f"{text}: as much as rounding in the coarser dtype explains"
    if versions_behind > 0:
        return (
            "stale weights",
            f"{text}: the samples are {versions_behind} versions old; correct them, or bound staleness",
        )
    if truncated and gap.mean < -0.5 * gap.mean_abs:
        return "truncation", (
            f"{text}, mean {gap.mean:.3g}: the engine's log-probabilities are of the kept tokens only; add the log of "
            "the kept mass (rlmesh.rl.correction.whole_vocabulary)"
        )
    if gap.first > 4 * max(gap.rest, limits.mean_abs):
        return "template", (
            f"{text}, {gap.first:.3g} at the first tokens and {gap.rest:.3g} after: the prompts differ; compare their "
            "token ids, the chat template and the special tokens"
        )
    return "unknown", f"{text}: compare the weights (push again, then engine.log_probs(tokens)) and the temperature"
