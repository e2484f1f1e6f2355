"""The job's settings. No torch here: the submitter imports this too."""

from __future__ import annotations

from dataclasses import dataclass

from job_settings import setting


@dataclass(frozen=True)
class GRPOConfig:
    """All settings of the job; ``main.py`` has an option for each."""

    seed: int = setting(0, "decides tasks and draws")
    steps: int = setting(8, "steps of GRPO")
    task: str = setting("chain_sum", "a data set of reasoning-gym")
    prompts: int = setting(4, "tasks per step")
    samples: int = setting(8, "answers per task")
    heldout: int = setting(32, "tasks that are never trained on")
    max_new_tokens: int = setting(12, "longest answer, in tokens")
    temperature: float = setting(1.0, "of sampling, and of the log-probabilities in training")
    lr: float = setting(3e-5, "learning rate")
    clip: float = setting(0.2, "bound on the change of the probability ratio")
    micro_batch_size: int = setting(8, "rows per forward and backward pass")
    save_every: int = setting(2, "steps between two checkpoints")
