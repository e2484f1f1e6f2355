"""Algorithms on pairs of given responses: direct preference optimisation, and the training of a reward model."""

from __future__ import annotations

from dataclasses import dataclass

from rlmesh.rl.algorithms.choices import number_faults
from rlmesh.rl.algorithms.protocol import Algorithm, Evaluated, Need, Normalisers, Responses, TokenWeights

__all__ = ["DPO", "RewardModelling"]

MOST_BETA = 1000


@dataclass(frozen=True)
class DPO(Algorithm):
    """Direct preference optimisation (:func:`rlmesh.rl.algorithms.preference.dpo`). Rows have ``chosen`` and
    ``rejected``.

    Attributes:
        beta: weight of the divergence from the reference.
    """

    beta: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if next(number_faults(0, MOST_BETA, beta=self.beta), "") or self.beta == 0:
            raise ValueError(f"DPO: beta={self.beta} must be > 0 and ≤ {MOST_BETA}")

    @property
    def responses(self) -> Responses:
        return "pairs"

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset(["reference"])

    def weigh(self, batch: Evaluated) -> TokenWeights:
        from rlmesh.rl.algorithms.preference import dpo

        terms = dpo(batch.required("log_probs"), batch.required("ref_log_probs"), batch.mask, beta=self.beta)
        return TokenWeights.of(
            batch.mask, advantages=terms.tokens, policy=1.0, normalisers=Normalisers(len(terms.margins), 1.0, 1.0),
            metrics={f"dpo/{name}": value for name, value in terms.metrics.items()},
        )  # fmt: skip


@dataclass(frozen=True)
class RewardModelling(Algorithm):
    """Training of a reward model on pairs (:func:`rlmesh.rl.algorithms.preference.ranked_returns`). Rows have
    ``chosen`` and ``rejected``; the run leaves a model for :class:`rlmesh.rl.rewards.model.RewardModel`."""

    value_clip = None
    """The critic's error is not clipped."""

    @property
    def responses(self) -> Responses:
        return "ranked"

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset(["critic"])

    @property
    def reads_log_probs(self) -> bool:
        return False

    def weigh(self, batch: Evaluated) -> TokenWeights:
        from rlmesh.rl.algorithms.preference import ranked_returns

        terms = ranked_returns(batch.required("values"), batch.mask)
        return TokenWeights.of(batch.mask, policy=1.0, returns=terms.tokens, metrics=terms.metrics)
