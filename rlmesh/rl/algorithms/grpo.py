"""GRPO and its relatives: several responses per prompt, compared with each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rlmesh.rl.algorithms.choices import (
    MOST_WEIGHT,
    Aggregation,
    Correction,
    KLEstimator,
    Level,
    choice_faults,
    clip_faults,
    correction_faults,
    number_faults,
)
from rlmesh.rl.algorithms.protocol import Algorithm, Evaluated, Need, Normalisers, PolicyLoss, TokenWeights
from rlmesh.rl.types import EQUAL

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GRPO", "Advantage", "Loss", "overlong_penalty"]

Advantage = Literal["grpo", "dr_grpo", "rloo", "remax", "opo", "pass_at_k", "reinforce++"]
"""The way to compare the responses of a group; :mod:`rlmesh.rl.group_advantages` has a function for each."""

Loss = Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo", "sapo"]
"""A published combination of term, clip bounds and aggregation; settings of :class:`GRPO` override parts of it."""


@dataclass(frozen=True)
class _Preset:
    """The settings behind a name of `Loss`."""

    policy_loss: PolicyLoss
    aggregation: Aggregation
    clip_low: float | None = 0.2
    clip_high: float | None = 0.2


PRESETS: Mapping[Loss, _Preset] = {
    "grpo": _Preset("ppo", "sequence-mean"),  # Shao et al. 2024, arXiv:2402.03300
    "dapo": _Preset("ppo", "token-mean", clip_high=0.28),  # Yu et al. 2025, arXiv:2503.14476
    "dr_grpo": _Preset("ppo", "constant"),  # Liu et al. 2025, arXiv:2503.20783
    "gspo": _Preset("gspo", "sequence-mean", 3e-4, 4e-4),  # Zheng et al. 2025, arXiv:2507.18071
    "cispo": _Preset("cispo", "token-mean", None, 4.0),  # MiniMax 2025, arXiv:2506.13585
    "sapo": _Preset("sapo", "sequence-mean", None, None),  # Gao et al. 2025, arXiv:2511.20347
}


@dataclass(frozen=True)
class GRPO(Algorithm):
    """Group-relative policy optimisation.

    Attributes:
        samples: responses per prompt, ≥ 2; for the advantage ``remax`` ≥ 1.
        advantage: how the responses of a group are compared.
        loss: a published variant, which sets the loss term, the clip bounds and the aggregation.
        aggregation, clip_low, clip_high: ``None``: those of the variant.
        dual_clip: see :func:`rlmesh.rl.losses.ppo_clip_loss`; for the term of PPO only.
        kl: weight of the divergence from the reference in the loss; 0 needs no reference.
        kl_estimator: estimator of the value of this divergence; the gradient is unbiased with every estimator.
        correction: importance weights for the difference between engine and trainer: ``None``, a level, or a
            :class:`rlmesh.rl.correction.Correction`.
        entropy: weight of the entropy bonus.
        eps: added to the standard deviation of a group; for the advantage ``grpo`` only.
        k: number of responses, of which one must be right; for the advantage ``pass_at_k`` only.
        constant: divisor per response; for the aggregation ``constant`` only. Usually the most tokens of a response.
        overlong: (token limit, number of tokens before it over which a penalty grows to 1), or ``None``
            (:func:`overlong_penalty`).
        skip_cut_off: responses that a limit cut off take no part in the loss ("overlong filtering").
    """

    samples: int = 8
    advantage: Advantage = "grpo"
    loss: Loss = "dapo"
    aggregation: Aggregation | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    kl: float = 0.0
    kl_estimator: KLEstimator = "k3"
    correction: Level | Correction | None = None
    entropy: float = 0.0
    eps: float = 1e-6
    k: int = 1
    constant: float | None = None
    overlong: tuple[int, int] | None = None
    skip_cut_off: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        faults = [
            *choice_faults("advantage", self.advantage, Advantage),
            *choice_faults("loss", self.loss, Loss),
            *choice_faults("kl_estimator", self.kl_estimator, KLEstimator),
            *number_faults(0, MOST_WEIGHT, kl=self.kl, entropy=self.entropy),
            *correction_faults(self.correction),
            *clip_faults(self.clip_low, self.clip_high, self.dual_clip),
        ]
        if self.aggregation is not None:
            faults += choice_faults("aggregation", self.aggregation, Aggregation)
        if self.samples < 2 and self.advantage != "remax":
            faults.append(f"samples={self.samples}: at least 2 responses per prompt, or there is nothing to compare")
        if next(number_faults(0, 1, eps=self.eps), "") or self.eps == 0:
            faults.append(f"eps={self.eps!r} must be a number > 0 and ≤ 1")
        if self.constant is not None and (next(number_faults(constant=self.constant), "") or self.constant == 0):
            faults.append(f"constant={self.constant!r} must be a number > 0")
        if not faults and (self._aggregation == "constant") != (self.constant is not None):
            faults.append(f"constant={self.constant}: the aggregation 'constant', and no other, takes it (> 0)")
        k: Any = self.k
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= self.samples:
            faults.append(f"k={self.k!r}: a whole number from 1 to samples={self.samples}")
        if not faults:
            faults += self._idle_settings()
        pair: Any = self.overlong
        whole = isinstance(pair, Sequence) and [type(one) for one in pair] == [int, int]
        if pair is not None and not (whole and 0 < pair[1] <= pair[0]):
            faults.append(f"overlong={self.overlong}: (most tokens, tokens before that), with 0 < second ≤ first")
        if faults:
            raise ValueError("GRPO: " + "; ".join(faults))
        if isinstance(self.correction, str):
            object.__setattr__(self, "correction", Correction(self.correction))
        object.__setattr__(self, "policy_loss", PRESETS[self.loss].policy_loss)

    def _idle_settings(self) -> Iterator[str]:
        """One sentence per setting that the chosen loss or advantage does not read."""
        if self.dual_clip is not None and PRESETS[self.loss].policy_loss != "ppo":
            yield f"dual_clip={self.dual_clip}: the loss {self.loss!r} has no dual clip"
        if PRESETS[self.loss].policy_loss == "sapo" and (self.clip_low, self.clip_high) != (None, None):
            yield f"clip_low={self.clip_low}, clip_high={self.clip_high}: the loss {self.loss!r} has a gate and no clip"
        if self.k != 1 and self.advantage != "pass_at_k":
            yield f"k={self.k}: the advantage 'pass_at_k', and no other, takes it; this is {self.advantage!r}"

    @property
    def needs(self) -> frozenset[Need]:
        wanted: list[Need] = []
        if self.kl:
            wanted.append("reference")
        if self.advantage == "remax":
            wanted.append("greedy")
        return frozenset(wanted)

    @property
    def reads_log_probs(self) -> bool:
        return self.correction is not None

    @property
    def policy_options(self) -> Mapping[str, Any]:
        preset = PRESETS[self.loss]
        if preset.policy_loss == "sapo":
            return {}
        options: dict[str, Any] = {
            "clip_low": preset.clip_low if self.clip_low is None else self.clip_low,
            "clip_high": preset.clip_high if self.clip_high is None else self.clip_high,
        }
        return options | ({"dual_clip": self.dual_clip} if preset.policy_loss == "ppo" else {})

    @property
    def entropy_coefficient(self) -> float:
        return self.entropy

    @property
    def divergence_estimator(self) -> KLEstimator:
        return self.kl_estimator

    @property
    def _aggregation(self) -> Aggregation:
        return self.aggregation or PRESETS[self.loss].aggregation

    def weigh(self, batch: Evaluated) -> TokenWeights:
        from rlmesh.rl.correction import correct

        rewards = batch.rewards.double()
        if self.overlong is not None:
            rewards = rewards - overlong_penalty(batch.lengths, *self.overlong)
        advantages = self._advantages(rewards, batch)
        mask = batch.usable
        if self.skip_cut_off and batch.cut_off is not None:
            mask = mask & ~batch.cut_off.unsqueeze(1)
        weights, metrics = mask.double(), {}
        if isinstance(self.correction, Correction):
            corrected = correct(batch.given_log_probs, batch.sampled_log_probs, mask, self.correction)
            metrics = {
                "correction/weight_mean": float(corrected.weights.sum() / corrected.mask.sum().clamp(min=1)),
                "correction/bounded": float(corrected.bounded.sum() / mask.sum().clamp(min=1)),
                "correction/rejected": float((mask & ~corrected.mask).sum() / mask.sum().clamp(min=1)),
            }
            weights, mask = corrected.weights.double(), corrected.mask
        return aggregated(
            batch.mask,
            mask,
            weights,
            self._aggregation,
            self.constant,
            advantages=advantages,
            kl=self.kl,
            metrics=metrics,
        )

    def _advantages(self, rewards: Tensor, batch: Evaluated) -> Tensor:
        from rlmesh.rl import group_advantages as by_group

        groups, valid = batch.groups, batch.valid
        ways: dict[Advantage, Callable[[], Tensor]] = {
            "grpo": lambda: by_group.grpo(rewards, groups, eps=self.eps, valid=valid),
            "dr_grpo": lambda: by_group.dr_grpo(rewards, groups, valid=valid),
            "rloo": lambda: by_group.rloo(rewards, groups, valid=valid),
            "opo": lambda: by_group.opo(rewards, groups, batch.lengths, valid=valid),
            "pass_at_k": lambda: by_group.pass_at_k(rewards > EQUAL, groups, k=self.k, valid=valid),
            "remax": lambda: by_group.remax(rewards, batch.required("greedy_rewards"), valid=valid),
            "reinforce++": lambda: by_group.reinforce_plus_plus_baseline(rewards, groups, batch.mask, valid=valid),
        }
        return ways[self.advantage]()


def aggregated(
    mask: Tensor,
    kept: Tensor,
    weights: Tensor,
    aggregation: Aggregation,
    constant: float | None,
    *,
    advantages: Tensor,
    kl: float,
    metrics: Mapping[str, float],
    returns: Tensor | None = None,
) -> TokenWeights:
    """Weights and normalisers of an aggregation.

    Args:
        mask: ``[episodes, time]``, the policy's tokens.
        kept: ``[episodes, time]``, the tokens that take part.
        weights: ``[episodes, time]``, of each token that takes part.
        aggregation, constant: see :func:`rlmesh.rl.losses.aggregate`.
        advantages: one per episode or per token.
        kl: weight of the divergence component.
    """
    import torch

    lengths, sequences = kept.sum(1, keepdim=True), float(kept.any(1).sum())
    share = 1 / lengths.clamp(min=1).double() if aggregation == "sequence-mean" else torch.ones_like(lengths).double()
    divisor = {
        "token-mean": float(lengths.sum()),
        "sequence-mean": sequences,
        "constant": sequences * (constant or 1.0),
    }[aggregation]
    normalisers = Normalisers(max(divisor, 1.0), 1.0, max(divisor, 1.0))
    return TokenWeights.of(
        mask & kept,
        advantages=advantages,
        policy=weights * share,
        divergence=kept * share * kl,
        normalisers=normalisers,
        returns=returns,
        metrics=metrics,
    )


def overlong_penalty(lengths: Tensor, most: int, before: int) -> Tensor:
    """DAPO's soft penalty of long responses: 0 up to ``most − before`` tokens, then rising to 1 at ``most`` and beyond.

    ``clip((length − (most − before)) / before, 0, 1)`` (Yu et al. 2025, arXiv:2503.14476, equation 13, negated).

    Args:
        lengths: ``[episodes]``.
    """
    return ((lengths.double() - (most - before)) / before).clamp(0, 1)
