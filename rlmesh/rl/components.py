"""The loss of a training step on packs: three components with per-token weights, each with its own normaliser.

:mod:`rlmesh.rl.algorithms.protocol` defines the components; an algorithm computes the weights. The shares of all packs
and ranks *add up* to the loss of the whole batch, however it is split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlmesh.rl.algorithms.protocol import Algorithm, Evaluated, Normalisers, TokenWeights, policy_terms
from rlmesh.rl.head import TokenTerms
from rlmesh.rl.kl import kl_estimate
from rlmesh.rl.losses import value_clip_loss
from rlmesh.rl.packing import Pack

__all__ = ["Columns", "policy_share", "value_share"]


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The inputs of the loss for each target of a pack, ``[targets]`` each, on the device of the model.

    Attributes:
        rows: the episode of each target.
        old_log_probs: log-probabilities of the old policy, for the ratio; ``None``: the pass's own, so that the ratio
            is 1.
        advantages: advantages for the policy component.
        policy, likelihood, divergence: weights of the components.
        ref_log_probs: log-probabilities of the reference, for the divergence component.
        old_values, returns: values before the step, and returns, for a critic.
    """

    rows: Tensor
    old_log_probs: Tensor | None
    advantages: Tensor
    policy: Tensor
    likelihood: Tensor
    divergence: Tensor
    ref_log_probs: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None

    @classmethod
    def of(
        cls, pack: Pack, batch: Evaluated, weights: TokenWeights, device: torch.device | str, dtype: torch.dtype
    ) -> Columns:
        """Select a pack's targets from tensors ``[episodes, time]`` (time counts an episode's tokens)."""
        rows, places = torch.from_numpy(pack.rows), torch.from_numpy(pack.places)

        def take(matrix: Tensor | None) -> Tensor | None:
            return None if matrix is None else matrix[rows, places].to(device, dtype)

        def required(matrix: Tensor) -> Tensor:
            return matrix[rows, places].to(device, dtype)

        return cls(
            rows.to(device),
            old_log_probs=take(batch.log_probs),
            advantages=required(weights.advantages),
            policy=required(weights.policy),
            likelihood=required(weights.likelihood),
            divergence=required(weights.divergence),
            ref_log_probs=take(batch.ref_log_probs),
            old_values=take(batch.values),
            returns=take(weights.returns),
        )


def policy_share(
    terms: TokenTerms, columns: Columns, normalisers: Normalisers, algorithm: Algorithm
) -> tuple[Tensor, dict[str, Tensor]]:
    """A pack's share of the policy's loss, and of statistics over the tokens that the policy or the likelihood trains.

    ``Σ policy · term / N_policy − Σ likelihood · log π / N_likelihood + Σ divergence · kl / N_divergence − entropy ·
    Σ policy · H / N_policy``.

    Args:
        terms: log-probabilities and entropy of the pack's targets, with gradient.
        columns: columns of the same targets.
        normalisers: normalisers of the whole batch.
        algorithm: defines the term of the policy component, the entropy bonus and the estimator of the divergence.

    Returns:
        a scalar with gradient, and scalars without: ``tokens``, the number of targets with a weight in the policy or
        the likelihood component, and the sums of ``ratio``, ``clipped``, ``entropy`` and ``kl`` over these targets.
        ``kl`` is the k3 estimate of KL(old policy ‖ new policy).

    Raises:
        FloatingPointError: a log-probability or a ratio is not finite.
        ValueError: a divergence has weight but no reference.
    """
    log_probs = terms.log_probs
    old_log_probs = log_probs.detach() if columns.old_log_probs is None else columns.old_log_probs
    trained = policy_terms(
        algorithm.policy_loss,
        log_probs,
        old_log_probs,
        columns.advantages,
        rows=columns.rows,
        options=algorithm.policy_options,
    )
    share = (columns.policy * trained.loss).sum() / normalisers.policy
    share = share - (columns.likelihood * log_probs).sum() / normalisers.likelihood
    if algorithm.entropy_coefficient:
        share = share - algorithm.entropy_coefficient * (columns.policy * terms.entropy).sum() / normalisers.policy
    every = torch.ones_like(log_probs, dtype=torch.bool)
    if columns.ref_log_probs is not None:
        estimator = algorithm.divergence_estimator
        kl = kl_estimate(log_probs, columns.ref_log_probs, every, estimator, unbiased_gradient=True)
        share = share + (columns.divergence * kl).sum() / normalisers.divergence
    with torch.no_grad():
        counted = (columns.policy > 0) | (columns.likelihood > 0)
        moved = kl_estimate(old_log_probs, log_probs, every, "k3")
        statistics = {
            name: torch.where(counted, value.to(log_probs.dtype), 0.0).sum()
            for name, value in {
                "tokens": counted,
                "ratio": trained.ratio,
                "clipped": trained.clipped,
                "entropy": terms.entropy,
                "kl": moved,
            }.items()
        }
    return share, statistics


def value_share(
    values: Tensor, columns: Columns, *, tokens: float, clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """A pack's share of the critic's loss: the mean over the tokens of :func:`rlmesh.rl.losses.value_clip_loss`.

    Args:
        values: values before each target was chosen, ``[targets]``, with gradient.
        columns: columns with ``old_values`` and ``returns``.
        tokens: number of tokens of the whole batch, over all ranks, with a weight in the policy component.
        clip: the argument of `value_clip_loss`.

    Returns:
        a scalar with gradient, and scalars without: ``tokens``, the number of this pack's targets with a weight in the
        policy component, and the sums of ``clipped`` and of the squared ``error`` over these targets.
    """
    if columns.old_values is None or columns.returns is None:
        raise ValueError("the batch has no values or no returns: the algorithm gives returns where it needs a critic")
    counted = columns.policy > 0
    terms = value_clip_loss(values, columns.old_values, columns.returns, counted, clip=clip)
    share = terms.loss.sum() / max(tokens, 1.0)
    with torch.no_grad():
        error = torch.where(counted, (values - columns.returns).square(), 0.0)
        clipped = terms.clipped & counted
        statistics = {"tokens": counted.sum(), "clipped": clipped.sum(), "error": error.sum()}
    return share, {name: value.to(values.dtype) for name, value in statistics.items()}
