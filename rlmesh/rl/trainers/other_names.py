"""Names that verl, OpenRLHF and TRL have for settings, and the setting of `Run` that each one means.

Messages about an unknown key use them, and docs/coming-from.md lists them.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["ELSEWHERE"]

ELSEWHERE: Mapping[str, str] = {
    # what is trained
    "actor_rollout_ref.model.path": "model",
    "pretrain": "model",
    "model_name_or_path": "model",
    "train_files": "data",
    "prompt_data": "data",
    "train_dataset": "data",
    "val_files": "validation",
    "eval_dataset": "validation",
    "max_prompt_length": "max_prompt_tokens",
    "prompt_max_len": "max_prompt_tokens",
    "custom_reward_function": "rewards",
    "remote_rm_url": "rewards",
    "reward_funcs": "rewards",
    "reward_weights": "rewards",
    # steps
    "total_training_steps": "steps",
    "max_steps": "steps",
    "train_batch_size": "batch_size",
    "rollout_batch_size": "batch_size",
    "test_freq": "validate_every",
    "eval_steps": "validate_every",
    "save_freq": "save_every",
    "save_steps": "save_every",
    # sampling
    "rollout.n": "algorithm.samples",
    "n_samples_per_prompt": "algorithm.samples",
    "num_generations": "algorithm.samples",
    "max_response_length": "rollout.max_tokens",
    "generate_max_len": "rollout.max_tokens",
    "max_completion_length": "rollout.max_tokens",
    "max_new_tokens": "rollout.max_tokens",
    "rollout.name": "rollout.engine",
    "use_vllm": "rollout.engine",
    "vllm_num_engines": "rollout.engines",
    "gpu_memory_utilization": "rollout.options",
    "vllm_gpu_memory_utilization": "rollout.options",
    # algorithm
    "adv_estimator": "algorithm.advantage",
    "advantage_estimator": "algorithm.advantage",
    "loss_type": "algorithm.loss",
    "loss_mode": "algorithm.loss",
    "loss_agg_mode": "algorithm.aggregation",
    "kl_loss_coef": "algorithm.kl",
    "init_kl_coef": "algorithm.kl",
    "kl_coef": "algorithm.kl",
    "beta": "algorithm.kl",
    "kl_loss_type": "algorithm.kl_estimator",
    "entropy_coeff": "algorithm.entropy",
    "entropy_loss_coef": "algorithm.entropy",
    "clip_ratio": "algorithm.clip_low",
    "clip_ratio_low": "algorithm.clip_low",
    "eps_clip": "algorithm.clip_low",
    "epsilon": "algorithm.clip_low",
    "clip_ratio_high": "algorithm.clip_high",
    "epsilon_high": "algorithm.clip_high",
    "clip_ratio_c": "algorithm.dual_clip",
    "rollout_is": "algorithm.correction",
    "enable_vllm_is_correction": "algorithm.correction",
    "vllm_importance_sampling_correction": "algorithm.correction",
    "overlong_buffer": "algorithm.overlong",
    "mask_truncated_completions": "algorithm.skip_cut_off",
    # optimiser and memory
    "learning_rate": "actor.lr",
    "optim.lr": "actor.lr",
    "actor_learning_rate": "actor.lr",
    "lr_warmup_steps": "actor.warmup_steps",
    "grad_clip": "actor.max_grad_norm",
    "max_norm": "actor.max_grad_norm",
    "ppo_epochs": "actor.epochs",
    "max_epochs": "actor.epochs",
    "num_iterations": "actor.epochs",
    "ppo_max_token_len_per_gpu": "actor.token_budget",
    "train_max_tokens_per_gpu": "actor.token_budget",
    "ppo_micro_batch_size_per_gpu": "actor.token_budget",
    "micro_train_batch_size": "actor.token_budget",
    "per_device_train_batch_size": "actor.token_budget",
    "enable_gradient_checkpointing": "actor.activation_checkpointing",
    "gradient_checkpointing": "actor.activation_checkpointing",
    "bf16": "actor.precision",
    "strategy": "train",
    "zero_stage": "train",
    "n_gpus_per_node": "devices_per_node",
    "actor_num_gpus_per_node": "devices_per_node",
    "nnodes": "nodes",
}
"""Their names, with so much of their section as makes them unique, and ours."""
