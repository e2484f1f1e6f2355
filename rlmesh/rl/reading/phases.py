"""`StepPhases`: measures the time of each phase of a training step; `memory_share`: the memory in use."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

__all__ = ["StepPhases", "memory_share"]


class StepPhases:
    """Measures the phases of a step, one after the other, in seconds.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._began: float | None = None
        self._last: float | None = None

    def begin(self) -> None:
        """Begin a step. The time since the report of the step before counts as ``between``: the validation that the
        step waited for, the report itself, and sampling that the trainer's thread does."""
        now = self._clock()
        self._seconds = {} if self._last is None else {"between": now - self._last}
        self._began = self._last = now

    def end(self, phase: str) -> None:
        """End a phase, which began at the end of the phase before it."""
        now = self._clock()
        last = now if self._last is None else self._last
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - last
        self._last = now

    def report(self) -> dict[str, float]:
        """``time/PHASE_s`` of each phase, and ``step_time_s``, the whole step without the time between steps."""
        self._last = now = self._clock()
        whole = now - (now if self._began is None else self._began)
        return {f"time/{name}_s": seconds for name, seconds in self._seconds.items()} | {"step_time_s": whole}


def memory_share(device: torch.device) -> float | None:
    """The share of a GPU's memory, or of the machine's, that is in use by all processes; ``None`` if unknown.

    On a GPU this is close to the peak, since torch keeps what it has allocated.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return 1 - free / total
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        values = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        return 1 - values["MemAvailable"] / values["MemTotal"]
    except (OSError, KeyError, ValueError, IndexError):
        return None
