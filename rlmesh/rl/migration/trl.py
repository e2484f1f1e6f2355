"""A configuration of TRL as settings of a `Run`: arguments of ``trl grpo``, ``trl sft``, ``trl dpo`` or ``trl reward``,
or of its PPO example.

Keys and defaults are those of TRL 1.16 and of transformers' ``TrainingArguments``; those of PPO are of TRL 1.9, the
last version that has it. A key that the configuration leaves out has TRL's default where that differs from `Run`'s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlmesh.rl.migration.keys import ABSENT, Conversion

__all__ = ["KINDS", "convert"]

KINDS = {"grpo": "grpo", "ppo": "ppo", "sft": "sft", "dpo": "dpo", "reward": "reward_modelling"}
"""TRL's trainer → the algorithm."""
LEARNING_RATES = {"grpo": 1e-6, "ppo": 3e-6, "sft": 2e-5, "dpo": 1e-6, "reward": 1e-4}
LOSSES = {
    "grpo": ("grpo", "sequence-mean"), "dapo": ("dapo", "token-mean"), "bnpo": ("dapo", "token-mean"),
    "dr_grpo": ("dr_grpo", "constant"), "cispo": ("cispo", "token-mean"), "sapo": ("sapo", "sequence-mean"),
}  # fmt: skip
"""TRL's ``loss_type`` → the loss and the aggregation."""

HARMLESS = (
    "logging_*", "log_*", "disable_tqdm", "dataloader_*", "ddp_*", "hub_*", "torch_empty_cache_steps", "debug",
    "skip_memory_metrics", "save_on_each_node", "include_*", "remove_unused_columns", "label_names", "project",
    "trackio_*", "liger_kernel_config", "torch_compile*", "gradient_checkpointing_kwargs",
    "ds3_gather_for_generation", "pad_to_multiple_of", "padding_free", "dataset_num_proc", "packing_strategy",
    "num_completions_to_print", "vllm_server_*", "vllm_group_port", "vllm_model_impl", "vllm_enable_sleep_mode",
    "precompute_ref_*", "activation_offloading", "use_cache",
    "attn_implementation", "pad_token", "eval_accumulation_steps", "per_device_eval_batch_size", "eval_packing",
    "prediction_loss_only", "local_rank", "do_train", "do_eval", "do_predict", "bf16_full_eval", "tf32",
    "fp16_full_eval", "batch_eval_metrics", "eval_do_concat_batches", "eval_use_gather_object", "eval_on_start",
    "save_only_model", "restore_callback_states_from_checkpoint", "ignore_data_skip",
    "exp_name", "local_rollout_forward_batch_size", "num_sample_generations", "world_size", "ignore_bias_buffers",
    "use_transformers_*", "transformers_continuous_batching_config", "cache_implementation",
    "ref_model_mixup_alpha", "ref_model_sync_steps", "sapo_temperature_*", "vespo_*",
    "entropy_coef_*", "entropy_target", "vllm_importance_sampling_*", "lora_task_type", "bnb_4bit_*",
    "use_bnb_nested_quant", "hub_token", "push_to_hub", "f_alpha_divergence_coef", "discopop_tau",
    "include_for_metrics", "dataset_streaming", "enable_jit_checkpoint", "length_column_name",
    "activation_checkpointing*", "dataset_train_split",
)  # fmt: skip
"""Patterns of keys that change no numbers here, or belong to a feature that is off."""


def convert(values: dict[str, Any], kind: str, overrides: Mapping[str, Any]) -> Conversion:
    """Convert a configuration.

    Args:
        values: the values by dotted keys.
        kind: one of `KINDS`.
        overrides: see `Conversion`.
    """
    c = Conversion(f"TRL's {kind}", values, overrides=overrides)
    c.settings["algorithm.name"] = KINDS[kind]
    _model_and_data(c, kind)
    processes = c.number(int, "num_processes", 1)
    if not c.has("num_processes"):
        c.advise("num_processes (not given)", "of the accelerate configuration; 1 is assumed. Add it to the file")
    samples, updates = {"grpo": _grpo, "ppo": _ppo}.get(kind, _given)(c, processes)
    _optimizer(c, kind, updates, samples)
    _machines(c, processes, kind)
    _rest(c, kind)
    c.rest(HARMLESS, {})
    return c


def _model_and_data(c: Conversion, kind: str) -> None:
    if kind == "ppo" and c.has("sft_model_path"):
        c.move("sft_model_path", "model")
        c.leave("model_name_or_path", "the model is sft_model_path")
    else:
        c.move("model_name_or_path", "model")
    c.move("train_dataset", "data")
    c.move("eval_dataset", "validation")
    for key in ("dataset_name", "datasets", "dataset_config", "dataset_test_split"):
        c.leave(key, "give files of rows: --set data=FILE.parquet", unless="test")
    c.leave("model_revision", "download that revision, and name its folder as model", unless="main")
    c.leave("cast_lm_head_to_fp32", "the head computes in the precision of passes: actor.precision", unless=False)
    c.leave("train_sampling_strategy", "rows are shuffled, by seed and epoch", unless="random")
    c.leave("trust_remote_code", "models run no code of their own here", unless=False)
    c.leave("model_init_kwargs", "the model is loaded in float32 from its folder")
    c.leave("dtype", "weights in training are float32; actor.precision is that of passes", unless=("float32", "auto"))
    c.leave(("chat_template_path", "eos_token"), "save it with the tokenizer in the folder of the model")
    if c.get("chat_template_kwargs"):
        c.move("chat_template_kwargs", "template")
    for key in c.starting("chat_template_kwargs."):
        c.move(key, f"template.{key.partition('.')[2]}")


def _batch(c: Conversion, processes: int) -> int:
    rows, passes = c.number(int, "per_device_train_batch_size", 8), c.number(int, "gradient_accumulation_steps", 1)
    return rows * passes * processes


def _grpo(c: Conversion, processes: int) -> tuple[int, int]:
    _grpo_loss(c)
    _grpo_advantage(c)
    _grpo_rewards(c)
    _vllm(c)
    _grpo_sampling(c)
    return _grpo_batch(c, processes)


def _grpo_batch(c: Conversion, processes: int) -> tuple[int, int]:
    """Prompts per step, and optimizer steps per step of the run."""
    samples = c.number(int, "num_generations", 8)
    c.set("algorithm.samples", samples, "num_generations")
    each = c.number(int, "per_device_train_batch_size", 8) * processes
    passes = c.number(int, "gradient_accumulation_steps", 1)
    generations = c.number(int, "generation_batch_size", 0) or None
    steps = c.number(int, "steps_per_generation", passes) if generations is None else generations // each
    whole = each * steps if generations is None else generations
    if (
        min(samples, passes, steps) < 1
        or whole % samples
        or steps % passes
        or (generations is not None and whole % each)
    ):
        c.faults.append(
            f"{whole} completions per generation must be divisible by num_generations={samples}, and their {steps} "
            f"passes by gradient_accumulation_steps={passes}"
        )
        return 1, 1
    prompts, minibatches = whole // samples, steps // passes
    c.set(
        "batch_size", prompts, "per_device_train_batch_size", "steps_per_generation", "generation_batch_size",
        "gradient_accumulation_steps",
    )  # fmt: skip
    if prompts % minibatches:
        c.faults.append(f"{minibatches} optimizer steps per generation must divide its {prompts} prompts")
    c.set("actor.minibatches", minibatches, "steps_per_generation", "gradient_accumulation_steps")
    epochs = c.number(int, "num_iterations", 1)
    c.set("actor.epochs", epochs, "num_iterations")
    return prompts, minibatches * epochs


def _grpo_sampling(c: Conversion) -> None:
    if c.is_null("max_completion_length"):
        c.faults.append("max_completion_length=null: a response has a limit here; give a number")
    c.move("max_completion_length", "rollout.max_tokens", 512)
    c.move("max_prompt_length", "max_prompt_tokens")
    if not c.has("max_prompt_length"):
        c.advise("max_prompt_length (not given)", "prompts of more than max_prompt_tokens=1024 are left out")
    for key in ("temperature", "top_p", "top_k", "min_p"):
        c.move(key, f"rollout.{key}")
    several = "num_generations_eval" if c.has("num_generations_eval") else "num_generations"
    c.set("evaluation.samples", c.number(int, several, 8), several)
    c.set("evaluation.temperature", c.number(float, "temperature", 1.0), "temperature")
    c.move("beta", "algorithm.kl", 0.0)
    c.leave("use_bias_correction_kl", "the gradient of the divergence is unbiased", unless=True)
    c.move("entropy_coef", "algorithm.entropy")
    for key, harmless, advice in (
        ("repetition_penalty", 1.0, "a penalty changes the policy that samples; leave it out"),
        ("generation_kwargs", {}, "rollout.options gives arguments to the engine"),
        ("top_entropy_quantile", 1.0, "all tokens take part in the loss"),
        ("off_policy_mask_threshold", ABSENT, "algorithm.correction={reject_below: …} rejects samples"),
        ("use_adaptive_entropy", False, "the weight of the entropy is fixed"),
        ("sync_ref_model", False, "the reference stays as it is"),
        ("max_tool_calling_iterations", ABSENT, "episode.max_turns, with Run(tools=…)"),
        ("router_aux_loss_coef", ABSENT, "there is no loss of mixtures of experts"),
        ("disable_dropout", True, "a policy is trained without dropout"),
        ("vllm_structured_outputs_regex", ABSENT, "responses are not constrained"),
    ):
        c.leave(key, advice, unless=harmless)


def _grpo_loss(c: Conversion) -> None:
    kind, level = str(c.get("loss_type", "dapo")), str(c.get("importance_sampling_level", "token"))
    if kind not in LOSSES or level not in ("token", "sequence") or (level == "sequence" and kind in ("cispo", "sapo")):
        c.faults.append(f"loss_type={kind!r} with importance_sampling_level={level!r} has no counterpart")
        return
    loss, aggregation = LOSSES[kind]
    c.set("algorithm.loss", "gspo" if level == "sequence" else loss, "loss_type", "importance_sampling_level")
    c.set("algorithm.aggregation", aggregation, "loss_type")
    if kind == "bnpo":
        c.advise("loss_type=bnpo", "tokens are averaged over the whole batch, as with dapo, not over a device's")
    if aggregation == "constant":
        c.set("algorithm.constant", c.number(float, "max_completion_length", 512), "max_completion_length")
    low = c.number(float, "epsilon", 0.2)
    high = c.number(float, "epsilon_high", low)
    if loss == "cispo":
        if high < 1:
            c.faults.append(f"epsilon_high={high}: with cispo it is the largest ratio, ≥ 1")
        c.set("algorithm.clip_high", high - 1, "epsilon_high")  # TRL gives the ratio, rlmesh its distance from 1
        c.skip("epsilon")
    elif loss != "sapo":
        c.set("algorithm.clip_low", low, "epsilon")
        c.set("algorithm.clip_high", high, "epsilon_high", "epsilon")
        if level == "sequence":
            c.leave("delta", "the ratio of a sequence is not bounded by delta: leave it out")
        else:
            c.move("delta", "algorithm.dual_clip")
    taus = c.number(float, "sapo_temperature_pos", 1.0), c.number(float, "sapo_temperature_neg", 1.05)
    if loss == "sapo" and taus != (1.0, 1.05):
        c.faults.append(f"sapo_temperature_pos and _neg={taus}: SAPO has the temperatures 1.0 and 1.05")


def _grpo_advantage(c: Conversion) -> None:
    scale = str(c.get("scale_rewards", "group"))
    names = {"group": "grpo", "True": "grpo", "none": "dr_grpo", "False": "dr_grpo"}
    if scale in names:
        c.set("algorithm.advantage", names[scale], "scale_rewards")
    else:
        c.faults.append(f"scale_rewards={scale!r} has no counterpart: there is group and none")
    if names.get(scale) == "grpo":
        c.set("algorithm.eps", 1e-4)
    c.move("mask_truncated_completions", "algorithm.skip_cut_off")


def _grpo_rewards(c: Conversion) -> None:
    models = c.get("reward_model_name_or_path")
    if models is not None:
        c.set("rewards", [{"model": models}], "reward_model_name_or_path")
    c.leave(
        "reward_funcs", "name them as module:function with the parameters of rlmesh (responses instead of "
        "completions): --set 'rewards=[\"module:function\"]'",
    )  # fmt: skip
    c.leave("reward_weights", "rewards=[{function: …, weight: …}]")
    c.leave("multi_objective_aggregation", "rewards are summed by their weights", unless="sum_then_normalize")


def _vllm(c: Conversion) -> None:
    if not c.get("use_vllm", False):
        c.set("rollout.engine", "transformers", "use_vllm")
        c.skip(*c.starting("vllm_"))  # keys of an engine that is not used
        return
    c.set("rollout.engine", "vllm", "use_vllm")
    c.move("vllm_gpu_memory_utilization", "rollout.options.gpu_memory_utilization", 0.3)
    c.move("vllm_max_model_length", "rollout.options.max_model_len")
    c.leave("vllm_tensor_parallel_size", "an engine of a run has one device, which must hold the whole model", unless=1)
    if not c.get("vllm_importance_sampling_correction", True):
        return
    mode = str(c.get("vllm_importance_sampling_mode", "sequence_mask"))
    level, _, beyond = mode.partition("_")
    if level not in ("token", "sequence") or beyond not in ("mask", "truncate"):
        c.faults.append(f"vllm_importance_sampling_mode={mode!r} has no counterpart")
        return
    # In TRL, the older name has precedence, and null means no upper bound.
    highest = "vllm_importance_sampling_clip_max"
    key = "vllm_importance_sampling_cap" if c.has("vllm_importance_sampling_cap") else highest
    upper = 1e30 if c.is_null(key) else c.number(float, key, 3.0)
    correction = {"level": level, "beyond": beyond, "upper": upper}
    if beyond == "mask":
        c.advise(
            f"vllm_importance_sampling_mode={mode}",
            "what is masked leaves the mean of the loss and the divergence; TRL sets its weight to 0 and counts it",
        )
    if c.has("vllm_importance_sampling_clip_min"):
        correction["lower"] = c.number(float, "vllm_importance_sampling_clip_min", 0.0)
    c.set(
        "algorithm.correction", correction, "vllm_importance_sampling_mode", key, "vllm_importance_sampling_clip_min",
        "vllm_importance_sampling_correction",
    )  # fmt: skip


def _ppo(c: Conversion, processes: int) -> tuple[int, int]:
    prompts, minibatches = _batch(c, processes), c.number(int, "num_mini_batches", 1)
    c.set("batch_size", prompts, "per_device_train_batch_size", "gradient_accumulation_steps")
    if prompts % minibatches:
        c.faults.append(f"num_mini_batches={minibatches} must divide the batch of {prompts}")
    for role in ("actor", "critic"):
        c.set(f"{role}.minibatches", minibatches, "num_mini_batches")
        c.set(f"{role}.epochs", c.number(int, "num_ppo_epochs", 4), "num_ppo_epochs")
    for key, setting, default in (
        ("kl_coef", "algorithm.kl", 0.05), ("cliprange", "algorithm.clip_low", 0.2), ("gamma", "algorithm.gamma", 1.0),
        ("cliprange_value", "algorithm.value_clip", 0.2), ("lam", "algorithm.lam", 0.95),
        ("response_length", "rollout.max_tokens", 53), ("temperature", "rollout.temperature", 0.7),
    ):  # fmt: skip
        c.move(key, setting, default)
    if c.has("reward_model_path"):
        c.set("rewards", [{"model": c.get("reward_model_path")}], "reward_model_path")
        c.set("critic.model", c.get("reward_model_path"), "reward_model_path")
    if c.has("stop_token_id"):
        c.set("rollout.stop_token_ids", [c.number(int, "stop_token_id", 0)], "stop_token_id")
    c.leave("stop_token", "a response ends with the model's end token", unless="eos")
    c.leave("kl_estimator", "the penalty in rewards is log π − log π_ref (k1)", unless="k1")
    c.leave("vf_coef", "the critic has an optimizer of its own: critic.lr")
    c.leave("missing_eos_penalty", "a reward function subtracts it where sample.finish_reason is 'length'")
    c.leave("whiten_rewards", "advantages are whitened, rewards are not", unless=False)
    if c.has("total_episodes"):
        c.set("steps", math.ceil(c.number(int, "total_episodes", 1) / prompts), "total_episodes")
    return prompts, minibatches * c.number(int, "num_ppo_epochs", 4)


def _given(c: Conversion, processes: int) -> tuple[int, int]:
    rows = _batch(c, processes)
    c.set("batch_size", rows, "per_device_train_batch_size", "gradient_accumulation_steps")
    longest = c.number(int, "max_length", 1024)
    c.set("rollout.max_tokens", longest, "max_length")
    c.set("max_prompt_tokens", longest, "max_length")
    c.advise(f"max_length={longest}", "prompts and responses are cut or left out each at this length, not together")
    c.leave("packing", "batch_size counts rows; with packing, TRL's batch counts rows of max_length", unless=False)
    c.leave("truncation_mode", "longer responses are cut at their end, longer prompts left out", unless="keep_start")
    c.leave("disable_dropout", "SFT alone trains with the dropout of the model", unless=True)
    c.leave("router_aux_loss_coef", "there is no loss of mixtures of experts")
    c.leave("dataset_kwargs", "rows have prompt and response")
    if c.library.endswith("sft"):
        c.leave("dataset_text_field", "rows have prompt and response; only responses are trained on")
        for key, advice in (
            ("completion_only_loss", "only responses are trained on, as TRL does with prompt and completion"),
            ("assistant_only_loss", "only the last message is trained on; TRL trains on all tokens without it"),
        ):
            c.skip(key)
            told = f"={c.get(key)}" if c.has(key) else " (not given)"
            if c.get(key) is not True or key == "assistant_only_loss":
                c.advise(f"{key}{told}", advice)
        c.leave("loss_type", "the loss is −log π of each token", unless=("nll", "chunked_nll"))
    if c.library.endswith("dpo"):
        c.move("beta", "algorithm.beta", 0.1)
        kinds = c.get("loss_type", ["sigmoid"])
        if kinds not in ("sigmoid", ["sigmoid"]):
            c.faults.append(f"loss_type={kinds!r} has no counterpart: the loss of pairs is sigmoid")
        for key, harmless in (
            ("label_smoothing", 0.0), ("f_divergence_type", "reverse_kl"), ("use_weighting", False),
            ("sync_ref_model", False), ("loss_weights", ABSENT), ("ld_alpha", ABSENT),
        ):  # fmt: skip
            c.leave(key, "the loss of pairs is that of Rafailov et al. 2023", unless=harmless)
    c.leave("center_rewards_coefficient", "the loss of pairs has no further term")
    return rows, 1


def _optimizer(c: Conversion, kind: str, updates: int, batch: int) -> None:
    roles = ("actor", "critic") if kind == "ppo" else ("actor",)
    steps = c.number(int, "max_steps", -1)
    if steps > 0 and kind != "ppo":
        c.set("steps", math.ceil(steps / updates), "max_steps")
        c.skip("num_train_epochs")
    elif "steps" not in c.settings:
        c.set_steps("num_train_epochs", c.number(float, "num_train_epochs", 3.0), batch)
    schedule = str(c.get("lr_scheduler_type", "linear"))
    warm = c.number(float, "warmup_steps", 0.0)
    share = c.number(float, "warmup_ratio", 0.0) or (warm if warm < 1 else 0.0)
    warmup = math.ceil(_of_steps(c, "warmup_ratio", share) if share else warm / updates)
    for role in roles:
        c.move("learning_rate", f"{role}.lr", LEARNING_RATES[kind])
        c.move("weight_decay", f"{role}.weight_decay")
        c.move("max_grad_norm", f"{role}.max_grad_norm")
        if not schedule.startswith("constant"):
            c.set(f"{role}.final_lr", 0.0, "lr_scheduler_type")
        if warmup:
            c.set(f"{role}.warmup_steps", warmup, "warmup_steps", "warmup_ratio")
        bf16 = c.get("bf16", not c.get("fp16", False))
        c.set(f"{role}.precision", "bfloat16" if bf16 else "float32", "bf16")
        c.move("gradient_checkpointing", f"{role}.activation_checkpointing", True)
        c.move("use_liger_kernel", f"{role}.use_liger_kernel")
    if schedule not in ("linear", "constant", "constant_with_warmup"):
        c.advise(f"lr_scheduler_type={schedule}", "the rate falls linearly to 0")
    elif schedule == "linear" and warmup:
        c.advise("lr_scheduler_type=linear", "with a warm-up, the fall begins at the first step, not after it")
    c.leave("lr_scheduler_kwargs", "the rate falls linearly")
    c.leave("fp16", "passes are in bfloat16 or float32", unless=False)
    c.leave("optim", "the optimizer is AdamW", unless=("adamw_torch", "adamw_torch_fused", "adamw_hf"))
    c.leave("optim_args", "the optimizer is AdamW without further arguments")
    for key, usual in (("adam_beta1", 0.9), ("adam_beta2", 0.999), ("adam_epsilon", 1e-8)):
        c.leave(key, "AdamW has the betas 0.9 and 0.999, and eps 1e-8", unless=usual)
    c.move("seed", "seed", 42)
    c.leave("data_seed", "the order of the data follows from seed")
    c.leave("full_determinism", "two runs on CPUs have the same bits", unless=False)
    strategy = str(c.get("eval_strategy", "no"))
    if strategy == "steps":
        key = "eval_steps" if c.has("eval_steps") else "logging_steps"
        every = c.number(float, key, 10.0)
        c.set("validate_every", max(1, round(_of_steps(c, key, every) if every < 1 else every / updates)), key)
    elif strategy == "epoch":
        c.advise("eval_strategy=epoch", "validate_every=STEPS")
    c.skip("eval_steps", "eval_delay")
    if str(c.get("save_strategy", "steps")) == "steps":
        every = c.number(float, "save_steps", 500)
        whole = _of_steps(c, "save_steps", every) if every < 1 else every / updates
        c.set("save_every", max(1, round(whole)), "save_steps")
    else:
        c.advise(f"save_strategy={c.get('save_strategy')}", "save_every=STEPS")
        c.skip("save_steps")
    c.move("save_total_limit", "keep_last")


def _of_steps(c: Conversion, key: str, share: float) -> float:
    """A number of steps that is given as a share of the run's steps, which must be known."""
    steps = c.steps()
    if steps is None:
        c.wanting.setdefault("steps", f"{key}={share:g} is a share of the steps: set steps=NUMBER")
    return share * (steps or 0)


def _machines(c: Conversion, processes: int, kind: str) -> None:
    sharded = c.get("deepspeed"), c.get("fsdp")
    if sharded[0] is not None:
        c.advise("deepspeed", "train=zero1, zero2 or zero3, as the stage in that file")
    if sharded[1]:
        c.set("train", "fsdp2", "fsdp")
    c.leave(c.starting(("deepspeed.", "fsdp_config")), "train=zero1, zero2, zero3 or fsdp2", unless=({}, None))
    if c.get("use_cpu", False):
        c.set("devices_per_node", 0, "use_cpu")
    else:
        c.set("devices_per_node", processes, "num_processes")
    c.set("actor.ranks", processes, "num_processes")
    if kind == "ppo":
        c.set("critic.ranks", processes, "num_processes")
    if kind in ("grpo", "ppo"):
        c.set("rollout.engines", processes, "num_processes")
        if not c.get("use_cpu", False) and c.get("vllm_mode", "colocate") == "colocate":
            c.set("placement", "fused", "vllm_mode")
        c.leave(
            "vllm_mode", "engines are members of the job: rollout.engines, on devices of their own", unless="colocate"
        )
    if c.get("use_peft", False):
        c.move("lora_r", "actor.lora.rank", 16)
        c.set("actor.lora.alpha", c.number(float, "lora_alpha", 32), "lora_alpha")
        c.move("lora_target_modules", "actor.lora.target_modules")
        c.leave("lora_dropout", "an adapter has no dropout", unless=0.0)
        for key in ("lora_modules_to_save", "lora_target_parameters", "use_rslora", "use_dora"):
            c.leave(key, "an adapter is of linear layers, scaled by alpha ÷ rank", unless=False)
    else:
        for key in [key for key in c.given if key.startswith("lora_") or key in ("use_rslora", "use_dora")]:
            c.skip(key)
            c.idle.append(key)
    c.leave(("load_in_4bit", "load_in_8bit"), "weights are not quantised", unless=False)


def _rest(c: Conversion, kind: str) -> None:
    c.trackers("report_to", ("none", "all", "tensorboard"))
    c.leave("output_dir", "rlmesh train --run-dir FOLDER")
    c.leave("run_name", "rlmesh train --name NAME")
    c.leave("resume_from_checkpoint", "a run goes on by itself in its run directory (resume=auto)", unless=False)
    c.leave("load_best_model_at_end", "keep_best=METRIC keeps the best checkpoint", unless=False)
    c.leave(("metric_for_best_model", "greater_is_better"), "keep_best=METRIC keeps the best checkpoint")
    c.leave("shuffle_dataset", "rows are always shuffled, by seed and epoch", unless=True)
    c.leave("average_tokens_across_devices", "losses are means over the whole batch", unless=True)
    c.leave("auto_find_batch_size", "rlmesh train CONFIG --fit prints the largest actor.token_budget", unless=False)
    c.leave("label_smoothing_factor", "the losses have no label smoothing", unless=0.0)
    c.leave(("neftune_noise_alpha", "optim_target_modules"), "there is no counterpart: leave it out")
    c.leave("accelerator_config", "there is no accelerate", unless={})
    c.leave("parallelism_config", "a sequence is on one rank")
    c.leave(c.starting("accelerator_config."), "there is no accelerate")
