"""Whether an engine and the trainer still hold the same weights: their log-probs of the same tokens, compared.

Both compute the same function by different kernels, so a gap is always there; how large a one is allowed depends on the
type that the coarser of the two computes in. A gap beyond that means other weights, another temperature, or a fault of
an engine, and it spoils the ratio of every policy-gradient loss.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmesh import current_worker
from rlmesh.errors import UsageError
from rlmesh.rl.kl import kl_estimate
from rlmesh.rl.masking import deferred_checks, keep, masked_mean

__all__ = ["LIMITS", "Drift", "DriftAlarm", "DriftLimits", "drift"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Drift:
    """Over the tokens of one batch, in nats.

    Attributes:
        mean_abs: mean of ``|d|``, with d = log p_trainer − log p_engine of a token.
        max_abs: the largest ``|d|``.
        k3: mean of ``e^d − 1 − d``, an estimate of KL(engine ‖ trainer) from the engine's own samples, unbiased and
            never negative (J. Schulman, "Approximating KL divergence", 2020).
        tokens: how many.
    """

    mean_abs: float
    max_abs: float
    k3: float
    tokens: int


@dataclass(frozen=True, slots=True)
class DriftLimits:
    """What numerics allow for the means. One token may be far off where its probability is tiny, so there is no limit
    for the largest gap."""

    mean_abs: float
    k3: float


LIMITS = {
    "float32": DriftLimits(1e-3, 1e-5),
    "float16": DriftLimits(1e-2, 1e-3),
    "bfloat16": DriftLimits(5e-2, 1e-2),
    "float8_e4m3fn": DriftLimits(0.2, 0.1),
}
"""By the coarser of the types that the two compute in.

A type with s significant bits rounds by 2^-s of a value, so logits of size 10 are off by 10 · 2^-s: 6e-7 in float32,
5e-3 in float16, 0.04 in bfloat16. Layers add to that, signs take away; 1e-5 to 1e-4 was seen in float32. k3 is about
half the mean square of the gap.
"""


def drift(trainer: Tensor, engine: Tensor, mask: Tensor) -> Drift:
    """Compare log-probs of the same tokens, at the same temperature.

    Args:
        trainer: by the weights that are trained, ``[batch, time]``, without gradient.
        engine: as the engine gave them when it sampled, ``[batch, time]``.
        mask: ``[batch, time]``, True at the tokens that the engine sampled.

    Raises:
        ValueError: shapes differ.
        FloatingPointError: a valid slot is not finite.
    """
    wide = torch.promote_types(torch.promote_types(trainer.dtype, engine.dtype), torch.float32)
    mine, theirs = trainer.detach().to(wide), engine.detach().to(wide)
    if not mine.numel():
        return Drift(0.0, 0.0, 0.0, 0)
    with deferred_checks():
        gap = (keep(mine, mask, name="trainer") - keep(theirs, mask, name="engine")).abs()
        k3 = kl_estimate(theirs, mine, mask, "k3")
        found = torch.stack([masked_mean(gap, mask), gap.max(), masked_mean(k3, mask), (mask != 0).sum().to(wide)])
    mean_abs, max_abs, mean_k3, count = found.tolist()
    return Drift(mean_abs, max_abs, mean_k3, int(count))


class DriftAlarm:
    """Speaks when the gap is larger than numerics allow: a warning in the log, a metric for the report, and when it
    begins an alarm among the job's events, which ``rlmesh status`` shows::

        alarm = DriftAlarm("float32")
        …
        metrics |= alarm.check(drift(log_probs, sampled_log_probs, mask), version=version)

    Args:
        limits: of one of `LIMITS`, by its name, or of your own.
        patience: how many batches in a row must be beyond before it speaks.
        stop: raise instead of going on.
    """

    def __init__(self, limits: str | DriftLimits, *, patience: int = 1, stop: bool = False) -> None:
        if isinstance(limits, str):
            if limits not in LIMITS:
                raise ValueError(f"no limits are known for {limits!r}: use one of {', '.join(LIMITS)}, or Limits(…)")
            limits = LIMITS[limits]
        self.limits, self.patience, self.stop = limits, patience, stop
        self.beyond = 0
        """How many batches in a row were."""

    def check(self, found: Drift, *, version: int, who: str = "the rollout engines") -> dict[str, float]:
        """Compare with the limits; gives metrics: the gaps, and ``drift_alarm``, 1 while it speaks.

        Raises:
            RuntimeError: the gap is beyond the limits and ``stop`` is set.
        """
        too_far = found.mean_abs > self.limits.mean_abs or found.k3 > self.limits.k3
        self.beyond = self.beyond + 1 if too_far else 0
        speaks = self.beyond >= self.patience
        if speaks:
            most = self.limits
            text = (
                f"log-probs of trainer and {who} differ by {found.mean_abs:.3g} on average over {found.tokens} tokens "
                f"of version {version} (limit {most.mean_abs:g}; largest {found.max_abs:.3g}; k3 {found.k3:.3g}, limit "
                f"{most.k3:g}), in {self.beyond} batches in a row: they do not hold the same weights, or "
                "not the same temperature. Compare engine.log_probs(tokens) with the trainer's right after a push"
            )
            if self.stop:
                raise RuntimeError(text)
            logger.warning("%s", text)
            if self.beyond == self.patience:
                with suppress(UsageError):  # outside of a job the log is all there is
                    current_worker().alarm(text)
        return {
            "log_prob_gap": found.max_abs,
            "log_prob_gap_mean": found.mean_abs,
            "log_prob_k3": found.k3,
            "drift_alarm": float(speaks),
        }
