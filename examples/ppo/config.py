"""The job's settings. No torch here: the submitter imports this too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class PPOConfig:
    """All settings of the job; ``main.py`` has an option for each."""

    seed: int = _setting(0, "decides data, weights and draws")
    steps: int = _setting(150, "steps of PPO")
    data_dir: str = _setting("", "folder of the parquet files, made if missing; empty: in the run's folder")
    warmup_accuracy: float = _setting(0.25, "how often the policy is right before PPO starts")

    rollout_engine: str = _setting("transformers", "transformers, vllm (in the role's process) or vllm-async")
    batch_size: int = _setting(512, "prompts per step")
    max_new_tokens: int = _setting(6, "longest response, in tokens")
    temperature: float = _setting(1.0, "of sampling, and of the log-probabilities in training")
    eval_every: int = _setting(10, "steps between two validations")

    init_kl_coef: float = _setting(0.01, "weight of the KL penalty per token; 0: no reference role")
    gamma: float = _setting(1.0, "discount per token")
    lam: float = _setting(0.95, "lambda of generalized advantage estimation")

    actor_engine: str = _setting("fsdp2", "what trains the actor: fsdp2, ddp, or DeepSpeed's zero1, zero2, zero3")
    critic_engine: str = _setting("fsdp2", "what trains the critic")
    activation_checkpointing: bool = _setting(False, "compute activations again in backward passes: less memory")
    actor_lr: float = _setting(5e-4, "peak learning rate of the actor")
    critic_lr: float = _setting(1e-3, "peak learning rate of the critic")
    lr_warmup_steps: int = _setting(10, "steps until the learning rates have risen to their peak")
    lr_final_share: float = _setting(0.1, "share of the peak that is left at the last step")
    ppo_epochs: int = _setting(1, "passes over each batch")
    minibatches: int = _setting(2, "optimizer steps per pass")
    micro_batch_size: int = _setting(256, "rows per forward and backward pass")
    clip: float = _setting(0.2, "bound on the change of the probability ratio")
    value_clip: float = _setting(0.2, "bound on the change of the critic's values")
    entropy_coef: float = _setting(0.0, "weight of the entropy bonus")
    max_grad_norm: float = _setting(1.0, "bound on the norm of the gradient")

    max_log_prob_gap: float = _setting(0.05, "largest difference between actor and engines before the job stops")
    save_every: int = _setting(10, "steps between two checkpoints")

    def lr_share(self, step: int) -> float:
        """The learning rate after ``step`` steps, as a share of its peak: up, then down in a straight line."""
        up = (step + 1) / self.lr_warmup_steps
        down = 1 - (1 - self.lr_final_share) * step / self.steps
        return min(up, down)
