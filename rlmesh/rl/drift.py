"""Comparison of the log-probs of an engine and the trainer, to detect that they have different weights.

Both compute the same function with different kernels, so there is always a gap; the allowed gap depends on the coarser
of their dtypes. A larger gap means different weights, another temperature, or a fault of the engine; the ratios in
policy-gradient losses are then wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
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
    """The gap over the tokens of one batch, in nats.

    Attributes:
        mean_abs: mean of ``|d|``, with d = log p_trainer − log p_engine of a token.
        max_abs: the largest ``|d|``.
        k3: mean of ``e^d − 1 − d``, an estimate of KL(engine ‖ trainer) from the engine's own samples, unbiased and
            never negative (J. Schulman, "Approximating KL divergence", 2020).
        tokens: the number of tokens.
    """

    mean_abs: float
    max_abs: float
    k3: float
    tokens: int


@dataclass(frozen=True, slots=True)
class DriftLimits:
    """The largest mean gaps that rounding alone explains. There is no limit for the gap of a single token, which may be
    large where its probability is tiny."""

    mean_abs: float
    k3: float


LIMITS = {
    "float32": DriftLimits(1e-3, 1e-5),
    "float16": DriftLimits(1e-2, 1e-3),
    "bfloat16": DriftLimits(5e-2, 1e-2),
    "float8_e4m3fn": DriftLimits(0.2, 0.1),
}
"""Limits, by the coarser of the dtypes of engine and trainer.

A type with s significant bits rounds by 2^-s of a value, so logits of size 10 are off by 10 · 2^-s: 6e-7 in float32,
5e-3 in float16, 0.04 in bfloat16. Errors of layers add up and partly cancel; 1e-5 to 1e-4 was measured in float32. k3
is about half the mean square of the gap.
"""


def drift(trainer: Tensor, engine: Tensor, mask: Tensor) -> Drift:
    """Compare log-probs of the same tokens, at the same temperature.

    Args:
        trainer: log-probs by the trainer's weights, ``[batch, time]``, without gradient.
        engine: log-probs that the engine reported when it sampled, ``[batch, time]``.
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
    """Reports gaps beyond the limits, for each batch as a warning in the log and as a metric. The first report of
    several in a row also raises an alarm among the job's events, which ``rlmesh status`` shows::

        alarm = DriftAlarm("float32")
        …
        metrics |= alarm.check(drift(log_probs, sampled_log_probs, mask), version=version)

    Args:
        limits: the name of one of `LIMITS`, or your own.
        patience: report from this many consecutive batches beyond the limits on.
        stop: raise instead of only reporting.
    """

    def __init__(self, limits: str | DriftLimits, *, patience: int = 1, stop: bool = False) -> None:
        if isinstance(limits, str):
            if limits not in LIMITS:
                known = ", ".join(LIMITS)
                raise ValueError(f"no limits are known for {limits!r}: use one of {known}, or DriftLimits(…)")
            limits = LIMITS[limits]
        self.limits, self.patience, self.stop = limits, patience, stop
        self.beyond = 0
        """The number of consecutive batches beyond the limits."""

    def state(self) -> dict[str, int]:
        """The number of consecutive batches beyond the limits, for a checkpoint."""
        return {"beyond": self.beyond}

    def restore(self, state: Mapping[str, int]) -> None:
        """Take over a state."""
        self.beyond = state["beyond"]

    def check(self, found: Drift, *, version: int, who: str = "the rollout engines") -> dict[str, float]:
        """Compare with the limits; returns metrics: the gaps, and ``drift_alarm``, 1 while it reports.

        Raises:
            RuntimeError: the gap is beyond the limits and ``stop`` is set.
        """
        too_far = found.mean_abs > self.limits.mean_abs or found.k3 > self.limits.k3
        self.beyond = self.beyond + 1 if too_far else 0
        alarmed = self.beyond >= self.patience
        if alarmed:
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
                with suppress(UsageError):  # outside of a job there are no alarms
                    current_worker().alarm(text)
        return {
            "log_prob_gap": found.max_abs,
            "log_prob_gap_mean": found.mean_abs,
            "log_prob_k3": found.k3,
            "drift_alarm": float(alarmed),
        }
