"""Settings of validation, of the samples that a run keeps, and of the alarm about rewards that are exploited."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlmesh.rl.faults import CheckedKeywords, too_small

__all__ = ["COLDEST", "HOTTEST", "RewardAlarmSettings", "SampleSettings", "ValidationSettings"]

COLDEST, HOTTEST = 0.01, 100
"""Temperatures of sampling: below, the softmax overflows; above, all tokens are as likely as each other."""


@dataclass(frozen=True)
class ValidationSettings(CheckedKeywords):
    """Settings of validation: how responses are sampled and counted.

    Attributes:
        samples: responses per prompt.
        temperature: temperature of sampling; null: 0 (greedy) for one response per prompt, else
            ``rollout.temperature``.
        right: the least reward of a response that counts as right, for pass@k.
        background: validate while the next step trains, if the engines share no device with others. False: the step
            waits for it.
    """

    samples: int = 1
    temperature: float | None = None
    right: float = 1.0
    background: bool = True

    def faults(self) -> Iterator[str]:
        """One sentence per fault."""
        yield from too_small(self, 1, "samples")
        yield from too_small(self, 0, "temperature")
        if self.temperature is not None and self.temperature > 0 and not COLDEST <= self.temperature <= HOTTEST:
            yield f"temperature={self.temperature} must be in [{COLDEST}, {HOTTEST}], or 0 for greedy responses"
        if self.samples > 1 and self.temperature == 0:
            yield f"temperature=0 gives {self.samples} equal responses: set samples=1, or a temperature > 0"

    def temperature_of(self, sampling: float) -> float:
        """The temperature, given that of training."""
        return self.temperature if self.temperature is not None else (0.0 if self.samples == 1 else sampling)


@dataclass(frozen=True)
class SampleSettings(CheckedKeywords):
    """The samples that a run keeps as Parquet files, for ``rlmesh samples``.

    Attributes:
        every: the samples of every so many steps are kept, those of validations included; 0: no samples are kept.
        most_mib: the size of all files together. Above it, the samples of every second step are removed.
    """

    every: int = 1
    most_mib: int = 4096

    def faults(self) -> Iterator[str]:
        """One sentence per fault."""
        yield from too_small(self, 0, "every")
        yield from too_small(self, 1, "most_mib")


@dataclass(frozen=True)
class RewardAlarmSettings(CheckedKeywords):
    """Thresholds of the alarm that the policy seems to exploit a reward (`rlmesh.rl.rewards.hacking.RewardAlarm`).

    The last steps are compared with the first ones. A threshold of 0 turns its check off.

    Attributes:
        baseline: number of first steps; 0: no check at all.
        window: number of last steps.
        length: alarm if the mean length of responses changes by this factor, and reward and length are correlated.
        correlation: the least correlation of reward and trait within a group that counts for ``length`` and
            ``repetition``, in (0, 1].
        repetition: alarm if this share of a response's sequences of four tokens repeats earlier ones, at least twice as
            much as in the first steps, and reward and repetition are correlated.
        components: alarm if one reward rises, and another falls, by this number of standard deviations of its scores.
    """

    baseline: int = 5
    window: int = 5
    length: float = 2.0
    correlation: float = 0.5
    repetition: float = 0.4
    components: float = 0.5

    @property
    def on(self) -> bool:
        """True if there is any check."""
        return bool(self.baseline and (self.length or self.repetition or self.components))

    def faults(self) -> Iterator[str]:
        """One sentence per fault."""
        yield from too_small(self, 0, "baseline", "components")
        yield from too_small(self, 1, "window")
        if self.length != 0 and self.length <= 1:
            yield f"length={self.length} must be > 1, a factor; 0: no check"
        if not 0 < self.correlation <= 1:
            yield f"correlation={self.correlation} must be in (0, 1]"
        if not 0 <= self.repetition <= 1:
            yield f"repetition={self.repetition} must be in [0, 1], a share; 0: no check"
