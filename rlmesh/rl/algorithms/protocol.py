"""`Algorithm`: computes the per-token weights of the loss from the episodes of a batch.

The trainer is independent of the algorithm. Each token of the policy has a weight in three components of the loss:

``policy``
    The clipped ratio: raises or lowers the probability of the token, by its advantage.
``likelihood``
    Cross-entropy: raises the probability of the token.
``divergence``
    The divergence from a reference policy or a teacher.

The loss is the sum over the components of ``Σ weight · term / normaliser``, over all micro-batches and ranks. PPO, GRPO
and its relatives, supervised fine-tuning, behaviour cloning and distillation are different weights of the same step.

A custom algorithm is a class with `weigh`::

    @dataclass(frozen=True)
    class BestOnly(Algorithm):
        samples: int = 8

        def weigh(self, batch: Evaluated) -> TokenWeights:
            best = batch.rewards == group_max(batch)
            return TokenWeights.of(batch.mask, likelihood=best)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rlmesh.rl.algorithms.choices import KLEstimator
from rlmesh.rl.faults import CheckedKeywords

if TYPE_CHECKING:
    from torch import Tensor

    from rlmesh.rl.losses import PolicyTerms

__all__ = [
    "Algorithm", "Evaluated", "Need", "Normalisers", "PolicyLoss", "Responses", "TokenWeights", "policy_terms",
]  # fmt: skip

Need = Literal["critic", "reference", "greedy"]
"""An input that an algorithm needs besides rewards: values of a critic, log-probabilities of the reference policy, or
the reward of a greedy response to each prompt."""

Responses = Literal["sampled", "given", "pairs", "ranked"]
"""Origins of responses. ``sampled``: from the engines. The others are in the data: ``given``, one per prompt;
``pairs``, the chosen and the rejected one; ``ranked``, a pair of which only the values of whole responses count."""

PolicyLoss = Literal["ppo", "gspo", "cispo", "sapo"]
"""The term of the policy component: :mod:`rlmesh.rl.losses` has one function for each."""

ASKED_BY = {
    "log_probs": "reads_log_probs must be True", "values": "needs must contain 'critic'",
    "ref_log_probs": "needs must contain 'reference'", "greedy_rewards": "needs must contain 'greedy'",
}  # fmt: skip
"""The way in which an algorithm asks for each input that not all batches have."""


@dataclass(frozen=True, slots=True, eq=False)
class Evaluated:
    """A batch with the results of all roles. The axis ``time`` has all tokens of an episode, the prompt included.

    Attributes:
        mask: ``[episodes, time]``, True at the tokens that the policy sampled.
        groups: ``[episodes]``, equal for episodes of one prompt.
        rewards: ``[episodes]``, float64; undefined where not valid.
        valid: ``[episodes]``, False where the reward failed or abstained.
        log_probs: ``[episodes, time]``, by the trainer's weights before the step; ``None`` if the algorithm does not
            read them (`Algorithm.reads_log_probs`).
        sampled_log_probs: ``[episodes, time]``, by the engine when it sampled, of the whole vocabulary.
        ref_log_probs: ``[episodes, time]``, by the reference policy, if the algorithm needs it.
        values: ``[episodes, time]``, before each token was sampled, if the algorithm needs a critic.
        greedy_rewards: ``[episodes]``, rewards of greedy responses, if the algorithm needs them.
        cut_off: ``[episodes]``, True where the episode was ended by a limit.
        current: ``[episodes]``, True where the weights before the step sampled the whole episode; ``None``: all.
    """

    mask: Tensor
    groups: Tensor
    rewards: Tensor
    valid: Tensor
    log_probs: Tensor | None
    sampled_log_probs: Tensor
    ref_log_probs: Tensor | None = None
    values: Tensor | None = None
    greedy_rewards: Tensor | None = None
    cut_off: Tensor | None = None
    current: Tensor | None = None

    @property
    def usable(self) -> Tensor:
        """``[episodes, time]``, the policy's tokens of episodes that have a reward."""
        return self.mask & self.valid.unsqueeze(1)

    @property
    def given_log_probs(self) -> Tensor:
        """``log_probs``, for an algorithm that reads them."""
        return self.required("log_probs")

    def required(self, name: str) -> Tensor:
        """The tensor of this name, for an algorithm that needs it.

        Raises:
            ValueError: the batch has none.
        """
        found: Tensor | None = getattr(self, name)
        if found is None:
            raise ValueError(f"the batch has no {name}: the algorithm's {ASKED_BY[name]}")
        return found

    @property
    def lengths(self) -> Tensor:
        """``[episodes]``, the number of tokens that the policy sampled."""
        return self.mask.sum(1)


class Normalisers(NamedTuple):
    """The divisor of each component for the whole batch over all ranks; 1 if the component is empty."""

    policy: float
    likelihood: float
    divergence: float


@dataclass(frozen=True, slots=True, eq=False)
class TokenWeights:
    """The weights of one training step.

    Attributes:
        advantages: ``[episodes, time]``, of the policy component.
        policy, likelihood, divergence: ``[episodes, time]``, ≥ 0, 0 where a token takes no part.
        normalisers: of the three components.
        returns: ``[episodes, time]``, targets of the critic.
        metrics: numbers for the report.
    """

    advantages: Tensor
    policy: Tensor
    likelihood: Tensor
    divergence: Tensor
    normalisers: Normalisers
    returns: Tensor | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        mask: Tensor,
        *,
        advantages: Tensor | None = None,
        policy: Tensor | float = 0.0,
        likelihood: Tensor | float = 0.0,
        divergence: Tensor | float = 0.0,
        normalisers: Normalisers | None = None,
        returns: Tensor | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> TokenWeights:
        """Expand weights that are given as one number, one per episode, or one per token.

        Args:
            mask: ``[episodes, time]``; outside of it every weight is 0.
            advantages: one per episode or per token.
            policy, likelihood, divergence: a number, ``[episodes]`` or ``[episodes, time]``.
            normalisers: ``None``: of each component the sum of its weights, at least 1.
            returns, metrics: stored unchanged.

        Raises:
            TypeError: a weight is neither a number nor a tensor.
            ValueError: a tensor has neither one number per episode nor one per token.
        """
        import torch

        from rlmesh.rl.group_advantages import spread

        wide = torch.float64

        def full(name: str, weight: Tensor | float) -> Tensor:
            if not isinstance(weight, torch.Tensor):
                if not isinstance(weight, int | float):
                    raise TypeError(f"{name} of TokenWeights is a {type(weight).__name__}: give a number or a tensor")
                return mask.to(wide) * weight
            # Other shapes might be broadcast to wrong weights.
            if weight.shape not in (mask.shape, mask.shape[:1], torch.Size()):
                shape, (episodes, time) = tuple(weight.shape), mask.shape
                raise ValueError(
                    f"{name} of TokenWeights has shape {shape}: expected one number per episode, ({episodes},), or "
                    f"one per token, ({episodes}, {time})"
                )
            return spread(weight.to(wide), mask) if weight.ndim == 1 else torch.where(mask, weight.to(wide), 0.0)

        parts = full("policy", policy), full("likelihood", likelihood), full("divergence", divergence)
        return cls(
            full("advantages", 0.0 if advantages is None else advantages),
            policy=parts[0],
            likelihood=parts[1],
            divergence=parts[2],
            normalisers=normalisers or Normalisers(*(max(float(part.sum()), 1.0) for part in parts)),
            returns=returns,
            metrics=dict(metrics or {}),
        )


@dataclass(frozen=True)
class Algorithm(CheckedKeywords):
    """Base class of algorithms; subclasses define `weigh`.

    Attributes:
        samples: responses per prompt.
    """

    samples: int = 1

    policy_loss: PolicyLoss = field(default="ppo", init=False)
    """The term of the policy component."""

    @property
    def needs(self) -> frozenset[Need]:
        """The inputs that the algorithm reads from `Evaluated` besides rewards and log-probabilities."""
        return frozenset()

    @property
    def responses(self) -> Responses:
        """The origin of the responses."""
        return "sampled"

    @property
    def rewarded(self) -> bool:
        """True if `weigh` reads rewards, so that a run needs at least one."""
        return self.responses == "sampled"

    @property
    def reads_log_probs(self) -> bool:
        """True if `weigh` reads the trainer's log-probabilities, which takes a forward pass before the step.

        If False, the step's own forward pass gives the old log-probabilities of the ratio. A step with several
        minibatches needs the pass nevertheless, since all ratios refer to the weights before its first optimizer
        step."""
        return True

    @property
    def policy_options(self) -> Mapping[str, Any]:
        """Keyword arguments of the policy component's term."""
        return {}

    @property
    def entropy_coefficient(self) -> float:
        """The weight of the entropy bonus, on the tokens of the policy component."""
        return 0.0

    @property
    def divergence_estimator(self) -> KLEstimator:
        """The estimator of the divergence component."""
        return "k3"

    def weigh(self, batch: Evaluated) -> TokenWeights:
        """The weights of one step.

        It must be a pure function: the same batch gives the same weights, and the trainer may call it in any process.
        """
        raise TypeError(f"{type(self).__name__} is no algorithm: it defines no weigh(batch) that gives TokenWeights")

    def __post_init__(self) -> None:
        samples: Any = self.samples
        if isinstance(samples, bool) or not isinstance(samples, int):
            raise ValueError(f"{type(self).__name__}(samples={samples!r}): a whole number of responses per prompt")
        if samples < 1:
            raise ValueError(f"{type(self).__name__}(samples={self.samples}): at least 1 response per prompt")
        if samples > 1 and self.responses != "sampled":
            raise ValueError(f"{type(self).__name__}(samples={samples}): the data has the responses; leave samples out")


def weighed(algorithm: Algorithm, batch: Evaluated) -> TokenWeights:
    """The weights of one step.

    Raises:
        TypeError: the algorithm's ``weigh`` returns something else.
    """
    weights: Any = algorithm.weigh(batch)
    if not isinstance(weights, TokenWeights):
        name = type(algorithm).__name__
        raise TypeError(f"{name}.weigh(batch) returned {type(weights).__name__}: return TokenWeights.of(batch.mask, …)")
    return weights


def policy_terms(
    kind: PolicyLoss,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    rows: Tensor,
    options: Mapping[str, Any],
) -> PolicyTerms:
    """The term of the policy component at each target of a pack, ``[targets]`` each.

    Args:
        log_probs: with gradient.
        old_log_probs, advantages: without.
        rows: ``[targets]``, the episode of each target: packs hold whole episodes, which sequence-level ratios need.
        options: of the loss function.
    """
    import torch

    from rlmesh.rl.losses import cispo_loss, gspo_loss, ppo_clip_loss, sapo_loss

    every = torch.ones_like(log_probs, dtype=torch.bool)
    if kind == "gspo":
        return gspo_loss(log_probs, old_log_probs, advantages, every, rows=rows, **options)
    if kind == "cispo":
        return cispo_loss(log_probs, old_log_probs, advantages, every, **options)
    if kind == "sapo":
        return sapo_loss(log_probs, old_log_probs, advantages, every, **options)
    return ppo_clip_loss(log_probs, old_log_probs, advantages, every, **options)
