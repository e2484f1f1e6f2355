"""Algorithms without a reward: supervised fine-tuning, behaviour cloning, distillation on policy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlmesh.rl.algorithms.choices import number_faults
from rlmesh.rl.algorithms.protocol import Algorithm, Evaluated, Need, Normalisers, Responses, TokenWeights
from rlmesh.rl.types import EQUAL

__all__ = ["SFT", "BehaviourCloning", "OnPolicyDistillation"]


@dataclass(frozen=True)
class SFT(Algorithm):
    """Supervised fine-tuning: cross-entropy of the responses in the data, whose rows have ``response``; every token has
    the same weight."""

    @property
    def responses(self) -> Responses:
        return "given"

    @property
    def reads_log_probs(self) -> bool:
        return False

    def weigh(self, batch: Evaluated) -> TokenWeights:
        return TokenWeights.of(batch.mask, likelihood=1.0)


@dataclass(frozen=True)
class BehaviourCloning(Algorithm):
    """Cross-entropy of the policy's own responses whose reward reaches a threshold (rejection sampling).

    Attributes:
        at_least: the least reward of a response that is imitated.
    """

    samples: int = 8
    at_least: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if fault := next(number_faults(-math.inf, at_least=self.at_least), ""):
            raise ValueError(f"BehaviourCloning: {fault}, which rewards can reach")

    @property
    def reads_log_probs(self) -> bool:
        return False

    def weigh(self, batch: Evaluated) -> TokenWeights:
        good = batch.valid & (batch.rewards >= self.at_least - EQUAL)
        return TokenWeights.of(batch.mask, likelihood=good, metrics={"imitated": float(good.double().mean())})


@dataclass(frozen=True)
class OnPolicyDistillation(Algorithm):
    """Distillation: the reverse divergence from a teacher on the student's own samples, as a policy gradient.

    The teacher takes the place of the reference policy; rewards are not used
    (:func:`rlmesh.rl.distillation.sampled_reverse_kl_advantages`). ``Run(reference=ReferenceSettings(model=…))`` names
    the teacher.
    """

    @property
    def rewarded(self) -> bool:
        return False

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset(["reference"])

    def weigh(self, batch: Evaluated) -> TokenWeights:
        from rlmesh.rl.distillation import sampled_reverse_kl_advantages

        given, teacher = batch.required("log_probs"), batch.required("ref_log_probs")
        advantages = sampled_reverse_kl_advantages(given, teacher, batch.mask)
        tokens = max(float(batch.mask.sum()), 1.0)
        metrics = {"teacher_kl": -float(advantages.sum()) / tokens}
        return TokenWeights.of(
            batch.mask, advantages=advantages, policy=1.0, normalisers=Normalisers(tokens, 1.0, 1.0), metrics=metrics
        )
