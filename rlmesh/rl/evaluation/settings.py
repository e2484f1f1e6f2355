"""Settings of validation, and of the samples that a run keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["SampleSettings", "ValidationSettings"]


@dataclass(frozen=True)
class ValidationSettings:
    """Settings of validation: how prompts are answered and counted.

    Attributes:
        samples: responses per prompt.
        temperature: of sampling; null: 0 (greedy) for one response per prompt, else ``rollout.temperature``.
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
        if self.samples < 1:
            yield f"samples={self.samples} must be ≥ 1"
        if self.temperature is not None and self.temperature < 0:
            yield f"temperature={self.temperature} must be ≥ 0"
        if self.samples > 1 and self.temperature == 0:
            yield f"temperature=0 gives {self.samples} equal responses: set samples=1, or a temperature > 0"

    def temperature_of(self, sampling: float) -> float:
        """The temperature, given that of training."""
        return self.temperature if self.temperature is not None else (0.0 if self.samples == 1 else sampling)


@dataclass(frozen=True)
class SampleSettings:
    """The samples that a run keeps as Parquet files, for ``rlmesh samples``.

    Attributes:
        every: steps between those whose samples are kept; 0: none, also of validations.
        most_mib: the size of all files together. Above it, the samples of every second step are removed.
    """

    every: int = 1
    most_mib: int = 4096

    def faults(self) -> Iterator[str]:
        """One sentence per fault."""
        if self.every < 0:
            yield f"every={self.every} must be ≥ 0"
        if self.most_mib < 1:
            yield f"most_mib={self.most_mib} must be ≥ 1"
