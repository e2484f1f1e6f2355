"""The job's settings. No torch here: the submitter imports this too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class GRPOConfig:
    """All settings of the job; ``main.py`` has an option for each."""

    seed: int = _setting(0, "decides tasks and draws")
    steps: int = _setting(6, "steps of GRPO")
    task: str = _setting("chain_sum", "a data set of reasoning-gym")
    prompts: int = _setting(4, "tasks per step")
    samples: int = _setting(8, "answers per task")
    heldout: int = _setting(32, "tasks that are never trained on")
    max_new_tokens: int = _setting(12, "longest answer, in tokens")
    temperature: float = _setting(1.0, "of sampling, and of the log-probabilities in training")
    lr: float = _setting(1e-5, "learning rate")
    clip: float = _setting(0.2, "bound on the change of the probability ratio")
    micro_batch_size: int = _setting(8, "rows per forward and backward pass")
