"""The job's settings. The module has no torch, since the submitter imports it too."""

from __future__ import annotations

from dataclasses import dataclass

from job_settings import setting

ENGINES = ("fsdp2", "ddp", "zero1", "zero2", "zero3")
PROMPTS = 8**5 - 256
"""All strings of five of eight letters, without those for validation (`data.py`)."""


@dataclass(frozen=True)
class PPOConfig:
    """All settings of the job; ``main.py`` has an option for each."""

    seed: int = setting(0, "determines data, weights and samples", least=0)
    steps: int = setting(150, "steps of PPO", least=1)
    data_dir: str = setting("", "folder of the parquet files, made if missing; empty: in the run's folder")
    warmup_accuracy: float = setting(0.2, "accuracy of the policy at which PPO starts", least=0, most=1)

    rollout_engine: str = setting(
        "transformers",
        "transformers, vllm (in the role's process) or vllm-async",
        choices=("transformers", "vllm", "vllm-async"),
    )
    batch_size: int = setting(512, "prompts per step", least=1, most=PROMPTS)
    max_new_tokens: int = setting(6, "token limit of a response", least=1, most=58)
    temperature: float = setting(1.0, "of sampling, and of the log-probabilities in training", above=0)
    eval_every: int = setting(10, "steps between two validations", least=1)

    init_kl_coef: float = setting(0.01, "weight of the KL penalty per token; 0: no reference role", least=0)
    gamma: float = setting(1.0, "discount per token", least=0, most=1)
    lam: float = setting(0.95, "lambda of generalized advantage estimation", least=0, most=1)

    actor_engine: str = setting(
        "fsdp2", "engine of the actor: fsdp2, ddp, or DeepSpeed's zero1, zero2, zero3", choices=ENGINES
    )
    critic_engine: str = setting("fsdp2", "engine of the critic", choices=ENGINES)
    activation_checkpointing: bool = setting(False, "recompute activations in backward passes: less memory")
    actor_lr: float = setting(5e-4, "peak learning rate of the actor", above=0)
    critic_lr: float = setting(1e-3, "peak learning rate of the critic", above=0)
    lr_warmup_steps: int = setting(10, "steps until the learning rates reach their peak", least=1)
    lr_final_share: float = setting(0.1, "learning rates at the last step, as a share of the peak", least=0, most=1)
    ppo_epochs: int = setting(1, "passes over each batch", least=1)
    minibatches: int = setting(2, "optimizer steps per pass", least=1)
    micro_batch_size: int = setting(256, "rows per forward and backward pass", least=1)
    clip: float = setting(0.2, "bound on the change of the probability ratio", above=0)
    value_clip: float = setting(0.2, "bound on the change of the critic's values", above=0)
    entropy_coef: float = setting(0.0, "weight of the entropy bonus")
    max_grad_norm: float = setting(1.0, "bound on the norm of the gradient", above=0)

    max_log_prob_gap: float = setting(
        0.05, "largest difference between actor and engines before the job stops", least=0
    )
    save_every: int = setting(10, "steps between two checkpoints", least=1)

    def lr_share(self, step: int) -> float:
        """The learning rate after ``step`` steps, as a share of its peak: linear warm-up, then linear decay."""
        up = (step + 1) / self.lr_warmup_steps
        down = 1 - (1 - self.lr_final_share) * step / self.steps
        return min(up, down)
