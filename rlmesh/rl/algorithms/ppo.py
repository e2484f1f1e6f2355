"""PPO: one response per prompt, and a critic that estimates the expected reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
from rlmesh.rl.algorithms.grpo import aggregated
from rlmesh.rl.algorithms.protocol import Algorithm, Evaluated, Need, TokenWeights

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PPO", "ReinforcePlusPlus"]


@dataclass(frozen=True)
class _TokenLevel(Algorithm):
    """The common part of PPO and REINFORCE++: rewards per token, which include a KL penalty.

    Attributes:
        samples: responses per prompt.
        gamma: discount per token, in [0, 1].
        kl: weight of the KL penalty in the rewards, ≥ 0; 0 needs no reference.
        kl_loss: weight of the divergence in the loss, ≥ 0.
        kl_estimator: estimator of the divergence in the loss. The gradient is unbiased with every estimator.
        clip_low, clip_high: distances from 1 at which the ratio is clipped; ``clip_high=None``: as ``clip_low``.
        dual_clip: see :func:`rlmesh.rl.losses.ppo_clip_loss`.
        aggregation: mean over tokens; ``token-mean`` or ``sequence-mean``.
        correction: as in :class:`rlmesh.rl.algorithms.GRPO`.
        entropy: weight of the entropy bonus.
    """

    samples: int = 1
    gamma: float = 1.0
    kl: float = 0.0
    kl_loss: float = 0.0
    kl_estimator: KLEstimator = "k3"
    clip_low: float = 0.2
    clip_high: float | None = None
    dual_clip: float | None = None
    aggregation: Aggregation = "token-mean"
    correction: Level | Correction | None = None
    entropy: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.correction, str):
            object.__setattr__(self, "correction", Correction(self.correction))
        faults = [
            *choice_faults("kl_estimator", self.kl_estimator, KLEstimator),
            *number_faults(0, MOST_WEIGHT, kl=self.kl, kl_loss=self.kl_loss, entropy=self.entropy),
            *correction_faults(self.correction),
            *clip_faults(self.clip_low, self.clip_high, self.dual_clip),
        ]
        if next(number_faults(gamma=self.gamma), "") or self.gamma > 1:
            faults.append(f"gamma={self.gamma}: in [0, 1]")
        if self.aggregation not in ("token-mean", "sequence-mean"):
            faults.append(f"aggregation={self.aggregation!r}: 'token-mean' or 'sequence-mean'")
        if faults:
            raise ValueError(f"{type(self).__name__}: " + "; ".join(faults))

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset(["reference"]) if self.kl or self.kl_loss else frozenset()

    @property
    def reads_log_probs(self) -> bool:
        return "reference" in self.needs or self.correction is not None

    @property
    def policy_options(self) -> Mapping[str, Any]:
        return {"clip_low": self.clip_low, "clip_high": self.clip_high, "dual_clip": self.dual_clip}

    @property
    def entropy_coefficient(self) -> float:
        return self.entropy

    @property
    def divergence_estimator(self) -> KLEstimator:
        return self.kl_estimator

    def _advantages(self, rewards: Tensor, batch: Evaluated) -> tuple[Tensor, Tensor | None]:
        """Advantages and, with a critic, returns from rewards per token; each ``[episodes, time]``."""
        raise TypeError(f"{type(self).__name__} defines no advantages")

    def weigh(self, batch: Evaluated) -> TokenWeights:
        import torch

        from rlmesh.rl.correction import correct
        from rlmesh.rl.kl import kl_estimate, token_rewards
        from rlmesh.rl.masking import masked_mean

        mask, metrics = batch.usable, {}
        kl = torch.zeros_like(mask, dtype=torch.float64)
        if batch.ref_log_probs is not None:
            kl = kl_estimate(batch.given_log_probs.double(), batch.ref_log_probs.double(), mask, "k1")
            metrics["kl"] = float(masked_mean(kl, mask))
        rewards = token_rewards(batch.rewards.double(), kl, mask, coefficient=self.kl)
        advantages, returns = self._advantages(rewards, batch)
        weights = mask.double()
        if isinstance(self.correction, Correction):
            corrected = correct(batch.given_log_probs, batch.sampled_log_probs, mask, self.correction)
            weights, mask = corrected.weights.double(), corrected.mask
        return aggregated(
            batch.mask,
            mask,
            weights,
            self.aggregation,
            None,
            advantages=advantages,
            kl=self.kl_loss,
            metrics=metrics,
            returns=returns,
        )


@dataclass(frozen=True)
class PPO(_TokenLevel):
    """Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347) with a critic and GAE.

    Attributes:
        lam: λ of GAE, in [0, 1].
        whiten: scale the advantages of the batch to mean 0 and variance 1.
        value_clip: clip range of the critic's loss (:func:`rlmesh.rl.losses.value_clip_loss`); ``None``: no clipping.
    """

    lam: float = 0.95
    whiten: bool = True
    value_clip: float | None = 0.2

    @property
    def needs(self) -> frozenset[Need]:
        return super().needs | {"critic"}

    def __post_init__(self) -> None:
        super().__post_init__()
        clips = self.value_clip is None or not (next(number_faults(clip=self.value_clip), "") or self.value_clip == 0)
        if next(number_faults(lam=self.lam), "") or self.lam > 1 or not clips:
            raise ValueError(f"PPO: lam={self.lam} in [0, 1], and value_clip={self.value_clip} > 0 or None")

    def _advantages(self, rewards: Tensor, batch: Evaluated) -> tuple[Tensor, Tensor | None]:
        from rlmesh.rl.advantages import gae
        from rlmesh.rl.masking import masked_whiten

        mask = batch.usable
        advantages, returns = gae(rewards, batch.required("values").double(), mask, gamma=self.gamma, lam=self.lam)
        return (masked_whiten(advantages, mask) if self.whiten else advantages), returns


@dataclass(frozen=True)
class ReinforcePlusPlus(_TokenLevel):
    """REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): discounted returns whitened over the batch, no critic."""

    def _advantages(self, rewards: Tensor, batch: Evaluated) -> tuple[Tensor, Tensor | None]:
        from rlmesh.rl.advantages import reinforce_plus_plus

        return reinforce_plus_plus(rewards, batch.usable, gamma=self.gamma), None
