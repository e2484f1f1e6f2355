"""The job's settings. No torch here: the submitter imports this too."""

from __future__ import annotations

from dataclasses import dataclass

from job_settings import setting


@dataclass(frozen=True)
class PPOConfig:
    """All settings of the job; ``main.py`` has an option for each."""

    seed: int = setting(0, "decides data, weights and draws")
    steps: int = setting(150, "steps of PPO")
    data_dir: str = setting("", "folder of the parquet files, made if missing; empty: in the run's folder")
    warmup_accuracy: float = setting(0.25, "how often the policy is right before PPO starts")

    rollout_engine: str = setting("transformers", "transformers, vllm (in the role's process) or vllm-async")
    batch_size: int = setting(512, "prompts per step")
    max_new_tokens: int = setting(6, "longest response, in tokens")
    temperature: float = setting(1.0, "of sampling, and of the log-probabilities in training")
    eval_every: int = setting(10, "steps between two validations")

    init_kl_coef: float = setting(0.01, "weight of the KL penalty per token; 0: no reference role")
    gamma: float = setting(1.0, "discount per token")
    lam: float = setting(0.95, "lambda of generalized advantage estimation")

    actor_engine: str = setting("fsdp2", "what trains the actor: fsdp2, ddp, or DeepSpeed's zero1, zero2, zero3")
    critic_engine: str = setting("fsdp2", "what trains the critic")
    activation_checkpointing: bool = setting(False, "compute activations again in backward passes: less memory")
    actor_lr: float = setting(5e-4, "peak learning rate of the actor")
    critic_lr: float = setting(1e-3, "peak learning rate of the critic")
    lr_warmup_steps: int = setting(10, "steps until the learning rates have risen to their peak")
    lr_final_share: float = setting(0.1, "share of the peak that is left at the last step")
    ppo_epochs: int = setting(1, "passes over each batch")
    minibatches: int = setting(2, "optimizer steps per pass")
    micro_batch_size: int = setting(256, "rows per forward and backward pass")
    clip: float = setting(0.2, "bound on the change of the probability ratio")
    value_clip: float = setting(0.2, "bound on the change of the critic's values")
    entropy_coef: float = setting(0.0, "weight of the entropy bonus")
    max_grad_norm: float = setting(1.0, "bound on the norm of the gradient")

    max_log_prob_gap: float = setting(0.05, "largest difference between actor and engines before the job stops")
    save_every: int = setting(10, "steps between two checkpoints")

    def lr_share(self, step: int) -> float:
        """The learning rate after ``step`` steps, as a share of its peak: up, then down in a straight line."""
        up = (step + 1) / self.lr_warmup_steps
        down = 1 - (1 - self.lr_final_share) * step / self.steps
        return min(up, down)
