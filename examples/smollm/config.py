"""The job's settings. The module has no torch, since the submitter imports it too."""

from __future__ import annotations

from dataclasses import dataclass

from job_settings import setting


@dataclass(frozen=True)
class GRPOConfig:
    """All settings of the job; ``main.py`` has an option for each."""

    seed: int = setting(0, "determines tasks and samples", least=0)
    steps: int = setting(8, "steps of GRPO", least=1)
    task: str = setting("chain_sum", "a data set of reasoning-gym")
    prompts: int = setting(4, "tasks per step", least=1)
    samples: int = setting(8, "answers per task", least=2)
    heldout: int = setting(32, "tasks that are never trained on", least=1)
    max_new_tokens: int = setting(12, "token limit of an answer", least=1)
    temperature: float = setting(1.0, "of sampling, and of the log-probabilities in training", above=0)
    lr: float = setting(3e-5, "learning rate", above=0)
    clip: float = setting(0.2, "bound on the change of the probability ratio", above=0)
    micro_batch_size: int = setting(8, "rows per forward and backward pass", least=1)
    save_every: int = setting(2, "steps between two checkpoints", least=1)
