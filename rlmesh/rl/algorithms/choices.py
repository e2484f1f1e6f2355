"""Choices of algorithms that other modules share. Needs no torch, so that settings are checked quickly."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from rlmesh.rl.faults import CheckedKeywords

__all__ = ["Aggregation", "Correction", "KLEstimator", "Level", "choice_faults", "clip_faults", "number_faults"]

Aggregation = Literal["token-mean", "sequence-mean", "constant"]
"""``token-mean``: all valid tokens have the same weight. ``sequence-mean``: all sequences with a valid token have the
same weight, and so have the tokens within a sequence. ``constant``: all valid tokens have the same weight, and the
divisor is the number of sequences times a constant, independent of their lengths."""

KLEstimator = Literal["k1", "k2", "k3"]
"""See :func:`rlmesh.rl.kl.kl_estimate`."""

Level = Literal["token", "sequence", "geometric"]
"""The scope of an importance weight. ``token``: each token has its own. ``sequence``: the product over the tokens of a
sequence. ``geometric``: the geometric mean over them, which does not grow with the length."""


@dataclass(frozen=True, slots=True)
class Correction(CheckedKeywords):
    """Settings for the weights of an engine's samples, and for the samples that leave the batch.

    Attributes:
        level: scope of a weight.
        upper: upper bound of the weight, ≥ 1; infinity: no bound.
        lower: lower bound in [0, 1], or ``None`` for no bound.
        beyond: action beyond the bounds. ``"truncate"``: the weight is set to the bound (truncated importance
            sampling, Ionides 2008; for engines: Yao et al. 2025). ``"mask"``: the token or sequence leaves the batch.
        reject_below: a sequence in which one token's own ratio is below this leaves the batch (for example 1e-4);
            ``None`` rejects none.
        weigh: False sets all weights to 1, so that the bounds only decide which samples leave the batch.
    """

    level: Level = "token"
    upper: float = 2.0
    lower: float | None = None
    beyond: Literal["truncate", "mask"] = "truncate"
    reject_below: float | None = None
    weigh: bool = True

    def __post_init__(self) -> None:
        if self.level not in get_args(Level):
            raise ValueError(f"unknown level {self.level!r}: use one of {', '.join(get_args(Level))}")
        if self.beyond not in ("truncate", "mask"):
            raise ValueError(f"beyond must be 'truncate' or 'mask', got {self.beyond!r}")
        if not self.upper >= 1 or (self.lower is not None and not 0 <= self.lower <= 1):
            raise ValueError(f"upper must be ≥ 1 and lower in [0, 1] or None, got {self.upper} and {self.lower}")
        if self.reject_below is not None and not 0 < self.reject_below < 1:
            raise ValueError(f"reject_below must be in (0, 1) or None, got {self.reject_below}")


def choice_faults(name: str, value: Any, choices: Any) -> Iterator[str]:
    """A fault if a setting is none of the values of a ``Literal``."""
    if value not in get_args(choices):
        yield f"{name}={value!r}: use one of {', '.join(map(str, get_args(choices)))}"


MOST_WEIGHT = 1_000_000
"""The largest weight of a part of a loss."""


def number_faults(least: float = 0, most: float = math.inf, **numbers: Any) -> Iterator[str]:
    """One sentence per setting that is no finite number from ``least`` to ``most``."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            yield f"{name}={value!r} must be a number"
        elif value < least:
            yield f"{name}={value!r} must be ≥ {least:g}"
        elif value > most:
            yield f"{name}={value!r} must be ≤ {most:g}"


def clip_faults(clip_low: Any, clip_high: Any, dual_clip: Any) -> Iterator[str]:
    """One sentence per bound of the ratio that the loss would refuse; ``None`` is right for each."""
    if clip_low is not None and (next(number_faults(clip_low=clip_low), "") or clip_low >= 1):
        yield f"clip_low={clip_low!r} must be in [0, 1)"
    if clip_high is not None:
        yield from number_faults(clip_high=clip_high)
    if dual_clip is not None and (next(number_faults(1, dual_clip=dual_clip), "") or dual_clip == 1):
        yield f"dual_clip={dual_clip!r} must be a number > 1, or None for none"


def correction_faults(correction: Any) -> Iterator[str]:
    """A fault if a setting is neither a `Correction`, nor None."""
    if correction is not None and not isinstance(correction, Correction | str):  # a text names the level
        yield f"correction={correction!r}: use one of {', '.join(get_args(Level))}, Correction(…), or None for none"
