"""A configuration of verl (``ppo_trainer.yaml`` with its overrides) as settings of a `Run`.

Keys and defaults are those of verl's ``ppo_trainer`` of August 2026, and the older names of the keys that moved. A
key that the configuration leaves out has verl's default where that differs from the one of `Run`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlmesh.rl.migration.keys import Conversion
from rlmesh.rl.migration.verl_keys import ACTOR, HARMLESS, MODEL, ROLLOUT, UNSUPPORTED

__all__ = ["convert"]

STRATEGIES = {"fsdp": "fsdp2", "fsdp2": "fsdp2"}
AGGREGATIONS = {
    "token-mean": "token-mean", "seq-mean-token-mean": "sequence-mean", "seq-mean-token-sum": "constant",
    "seq-mean-token-sum-norm": "constant",
}  # fmt: skip
ESTIMATORS = {
    "grpo": "grpo", "grpo_vectorized": "grpo", "rloo": "rloo", "rloo_vectorized": "rloo", "opo": "opo",
    "remax": "remax", "reinforce_plus_plus_baseline": "reinforce++",
}  # fmt: skip
KL_TYPES = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
GSM8K, MATH = ["openai/gsm8k"], ["lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"]


def convert(values: dict[str, Any], overrides: Mapping[str, Any]) -> Conversion:
    """Convert a configuration.

    Args:
        values: the values by dotted keys.
        overrides: see `Conversion`.
    """
    c = Conversion("verl", values, overrides=overrides)
    _model_and_data(c)
    batch = _batch(c)
    algorithm = _algorithm(c)
    _rewards(c)
    _section(c, "actor", ACTOR, batch, lr=1e-6)
    if algorithm == "ppo":
        _section(c, "critic", "critic", batch, lr=1e-5)
        c.move("critic.model.path", "critic.model")
        c.leave("critic.model.lora_rank", "the critic has no adapter: all of it is trained", unless=0)
    _sampling(c)
    _machines(c)
    _trainer(c, batch)
    _oddities(c)
    c.rest(HARMLESS, UNSUPPORTED)
    return c


def _model_and_data(c: Conversion) -> None:
    c.move(f"{MODEL}.path", "model")
    c.move("data.train_files", "data")
    c.move("data.val_files", "validation")
    c.move("data.max_prompt_length", "max_prompt_tokens", 512)
    c.move("data.max_response_length", "rollout.max_tokens", 512)
    c.move("data.prompt_key", "prompt_key")
    c.move("data.seed", "seed")
    if c.get("data.apply_chat_template_kwargs"):
        c.move("data.apply_chat_template_kwargs", "template")
    for key in c.starting("data.apply_chat_template_kwargs."):
        c.move(key, f"template.{key.rpartition('.')[2]}")
    c.leave("data.shuffle", "prompts are always shuffled, by seed and epoch", unless=True)
    c.leave("data.truncation", "longer prompts are left out and not cut", unless="error")
    for key in ("data.train_max_samples", "data.val_max_samples"):
        c.leave(key, "write the rows that you want into a file of their own", unless=-1)
    c.leave(("data.custom_cls.path", "data.custom_cls.name"), "give Run(data=…) rows that your class makes")
    for key in ("data.tokenizer", f"{MODEL}.tokenizer_path", f"{MODEL}.hf_config_path"):
        c.leave(key, "the tokenizer and the configuration are those in the folder of the model")
    for key in (f"{MODEL}.trust_remote_code", "data.trust_remote_code"):
        c.leave(key, "models run no code of their own here", unless=False)
    c.leave((f"{MODEL}.external_lib", f"{MODEL}.custom_chat_template"), "save the model's folder with it")
    c.leave(c.starting(f"{MODEL}.override_config"), "change config.json in the folder of the model", unless=({}, None))


def _batch(c: Conversion) -> int:
    batch = c.number(int, "data.train_batch_size", 1024)
    c.set("batch_size", batch, "data.train_batch_size")
    c.leave("data.gen_batch_size", "rollout.oversampling=FACTOR samples more prompts than a step needs", unless=batch)
    return batch


def _section(c: Conversion, name: str, place: str, batch: int, *, lr: float) -> None:
    c.move(f"{place}.optim.lr", f"{name}.lr", lr)
    c.move(f"{place}.optim.weight_decay", f"{name}.weight_decay", 0.01)
    clip = f"{place}.grad_clip" if c.has(f"{place}.grad_clip") else f"{place}.optim.clip_grad"
    c.move(clip, f"{name}.max_grad_norm", 1.0)
    c.skip(f"{place}.optim.clip_grad")
    c.move(f"{place}.ppo_epochs", f"{name}.epochs", c.get(f"{ACTOR}.ppo_epochs", 1))
    key = f"{place}.ppo_mini_batch_size" if c.has(f"{place}.ppo_mini_batch_size") else f"{ACTOR}.ppo_mini_batch_size"
    mini = c.number(int, key, 256)
    if mini < 1 or mini > batch or batch % mini:
        c.faults.append(f"{key}={mini} must divide data.train_batch_size={batch}: a pass has equal optimizer steps")
    else:
        c.set(f"{name}.minibatches", batch // mini, key)
    schedule = f"{place}.optim.lr_scheduler_type"
    kind = c.get(f"{place}.optim.warmup_style", c.get(schedule, "constant"))
    least = c.number(float, f"{place}.optim.min_lr_ratio", 0.0)
    if kind != "constant":
        c.advise(f"{schedule}={kind}", f"the rate falls linearly, to {name}.final_lr={least:g} of its peak")
        c.set(f"{name}.final_lr", least, f"{place}.optim.min_lr_ratio")
    ratio, steps = (
        c.number(float, f"{place}.optim.lr_warmup_steps_ratio", 0.0),
        c.number(int, f"{place}.optim.lr_warmup_steps", -1),
    )
    if steps > 0:
        c.set(f"{name}.warmup_steps", steps, f"{place}.optim.lr_warmup_steps")
    elif ratio:
        c.settings[f"{name}.warmup_steps"] = ratio  # a share of the steps, which `_trainer` knows
    c.leave(f"{place}.optim.betas", "AdamW has the betas 0.9 and 0.999", unless=[0.9, 0.999])
    c.leave(f"{place}.optim.optimizer", "the optimizer is AdamW", unless="AdamW")
    c.leave(f"{place}.optim.override_optimizer_config", "the optimizer is AdamW without further arguments")
    c.leave(f"{place}.shuffle", "minibatches follow the order of the prompts, which is shuffled already", unless=False)
    model = MODEL if name == "actor" else "critic.model"
    c.move(f"{model}.enable_gradient_checkpointing", f"{name}.activation_checkpointing", True)
    dtype = c.get(f"{place}.fsdp_config.dtype" if name == "actor" else "critic.fsdp.dtype", "bfloat16")
    precision = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}.get(str(dtype))
    if precision is None:
        c.faults.append(f"{place}.fsdp_config.dtype={dtype!r}: there is bfloat16 and float32")
    else:
        c.set(f"{name}.precision", precision, f"{place}.fsdp_config.dtype" if name == "actor" else "critic.fsdp.dtype")
    c.move(f"{model}.use_liger", f"{name}.use_liger_kernel")
    dtypes = f"{place}.fsdp_config.model_dtype" if name == "actor" else "critic.fsdp.model_dtype"
    c.leave(dtypes, f"weights in training are float32; {name}.precision is that of passes", unless=("fp32", "float32"))
    _token_budget(c, name, place)
    for key in (f"{place}.ulysses_sequence_parallel_size", f"{place}.fsdp_config.ulysses_sequence_parallel_size"):
        c.leave(key, f"a sequence is on one rank: lower {name}.token_budget, or use more ranks", unless=1)


def _token_budget(c: Conversion, name: str, place: str) -> None:
    rows = c.get(f"{place}.ppo_micro_batch_size_per_gpu", c.get(f"{place}.ppo_micro_batch_size"))
    if c.get(f"{place}.use_dynamic_bsz", c.get(f"{ACTOR}.use_dynamic_bsz", False)) or rows is None:
        c.move(f"{place}.ppo_max_token_len_per_gpu", f"{name}.token_budget", 16384 if name == "actor" else 32768)
        return
    longest = c.number(int, "data.max_prompt_length", 512) + c.number(int, "data.max_response_length", 512)
    key = f"{place}.ppo_micro_batch_size_per_gpu"
    each = c.number(int, key if c.has(key) else f"{place}.ppo_micro_batch_size", 1)
    c.set(f"{name}.token_budget", each * longest, key)


def _algorithm(c: Conversion) -> str:
    estimator = str(c.get("algorithm.adv_estimator", "gae"))
    in_loss = c.number(float, f"{ACTOR}.kl_loss_coef", 0.001) if c.get(f"{ACTOR}.use_kl_loss", False) else 0.0
    in_reward = 0.0
    if c.get("algorithm.use_kl_in_reward", False):
        in_reward = c.number(float, "algorithm.kl_ctrl.kl_coef", 0.001)
        c.leave("algorithm.kl_ctrl.type", "the weight of the penalty is fixed", unless="fixed")
        c.leave("algorithm.kl_penalty", "the penalty in rewards is log π − log π_ref (k1)", unless=("kl", "k1"))
    c.move(f"{ROLLOUT}.n", "algorithm.samples", 1)
    c.set("algorithm.entropy", c.number(float, f"{ACTOR}.entropy_coeff", 0.0), f"{ACTOR}.entropy_coeff")
    _correction(c)
    if estimator in ("gae", "reinforce_plus_plus"):
        name = "ppo" if estimator == "gae" else "reinforce++"
        c.set("algorithm.name", name, "algorithm.adv_estimator")
        c.move("algorithm.gamma", "algorithm.gamma", 1.0)
        c.set("algorithm.kl", in_reward, "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef")
        c.set("algorithm.kl_loss", in_loss, f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef")
        if name == "ppo":
            c.move("algorithm.lam", "algorithm.lam", 1.0)
            c.move("critic.cliprange_value", "algorithm.value_clip", 0.5)
    elif estimator in ESTIMATORS:
        name = "grpo"
        advantage = ESTIMATORS[estimator]
        if advantage == "grpo" and not c.get("algorithm.norm_adv_by_std_in_grpo", True):
            advantage = "dr_grpo"
        c.set("algorithm.name", "grpo", "algorithm.adv_estimator")
        c.set("algorithm.advantage", advantage, "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo")
        c.set("algorithm.kl", in_loss, f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef")
        if in_reward:
            c.faults.append(
                f"algorithm.use_kl_in_reward with adv_estimator={estimator!r}: the divergence is in the loss here: "
                f"algorithm.use_kl_in_reward=False, {ACTOR}.use_kl_loss=True and {ACTOR}.kl_loss_coef"
            )
    else:
        name = ""
        known = ", ".join(["gae", "reinforce_plus_plus", *ESTIMATORS])
        c.faults.append(f"algorithm.adv_estimator={estimator!r} has no counterpart: there is {known}")
    if in_loss:
        kind = str(c.get(f"{ACTOR}.kl_loss_type", "low_var_kl"))
        if kind not in KL_TYPES:
            c.faults.append(f"{ACTOR}.kl_loss_type={kind!r} has no counterpart: there is {', '.join(KL_TYPES)}")
        else:
            c.set("algorithm.kl_estimator", KL_TYPES[kind], f"{ACTOR}.kl_loss_type")
            c.advise(f"{ACTOR}.kl_loss_type={kind}", "the gradient of the divergence is unbiased here, whichever")
    c.skip(f"{ACTOR}.kl_loss_type")
    _loss(c, name)
    return name


def _loss(c: Conversion, name: str) -> None:
    mode = str(c.get(f"{ACTOR}.policy_loss.loss_mode", "vanilla"))
    losses = {"vanilla": "grpo", "gspo": "gspo", "cispo": "cispo", "sapo": "sapo"}
    if mode not in losses or (mode != "vanilla" and name != "grpo"):
        known = ", ".join(losses) if name == "grpo" else "vanilla"
        c.faults.append(f"{ACTOR}.policy_loss.loss_mode={mode!r} has no counterpart: there is {known}")
        mode = "vanilla"
    if name == "grpo":
        c.set("algorithm.loss", losses[mode], f"{ACTOR}.policy_loss.loss_mode")
    used = mode != "sapo" and (c.is_null(f"{ACTOR}.clip_ratio_low") or c.is_null(f"{ACTOR}.clip_ratio_high"))
    for side in ("low", "high") if mode != "sapo" else ():
        key, sources = f"{ACTOR}.clip_ratio_{side}", [f"{ACTOR}.clip_ratio_{side}"]
        # verl's own configuration sets both to 0.2; clip_ratio counts only where one of them is null.
        if c.is_null(key):
            sources.append(f"{ACTOR}.clip_ratio")
        c.set(f"algorithm.clip_{side}", c.number(float, sources[-1], 0.2), *sources)
    if not used:
        c.leave(
            f"{ACTOR}.clip_ratio", "verl reads clip_ratio_low and clip_ratio_high, which are 0.2 unless set: set these",
            unless=0.2,
        )  # fmt: skip
    if mode == "vanilla" and name:
        c.move(f"{ACTOR}.clip_ratio_c", "algorithm.dual_clip", 3.0)
    else:
        c.leave(f"{ACTOR}.clip_ratio_c", "dual clipping is for the loss of PPO")
    taus = (c.get(f"{ACTOR}.tau_pos", 1.0), c.get(f"{ACTOR}.tau_neg", 1.05))
    if mode == "sapo" and taus != (1.0, 1.05):
        c.faults.append(f"{ACTOR}.tau_pos, tau_neg={taus}: SAPO has the temperatures 1.0 and 1.05")
    for key in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta"):
        c.skip(f"{ACTOR}.policy_loss.{key}")
        if c.has(f"{ACTOR}.policy_loss.{key}"):
            c.idle.append(f"{ACTOR}.policy_loss.{key}")
    given = str(c.get(f"{ACTOR}.loss_agg_mode", "token-mean"))
    if mode in ("gspo", "sapo"):
        # verl aggregates these losses per sequence; loss_agg_mode is for the divergence only.
        c.set("algorithm.aggregation", "sequence-mean", f"{ACTOR}.policy_loss.loss_mode")
        if c.has(f"{ACTOR}.loss_agg_mode") or c.get(f"{ACTOR}.use_kl_loss", False):
            c.advise(
                f"{ACTOR}.loss_agg_mode={given}",
                f"in verl it is for the divergence only, since {mode} has seq-mean-token-mean; here both are so",
            )
        return
    aggregation = AGGREGATIONS.get(given)
    if aggregation is None or (aggregation == "constant" and name != "grpo"):
        c.faults.append(f"{ACTOR}.loss_agg_mode={given!r} has no counterpart for {name or 'this algorithm'}")
        return
    c.set("algorithm.aggregation", aggregation, f"{ACTOR}.loss_agg_mode")
    if aggregation == "constant":
        longest = c.number(float, f"{ACTOR}.loss_scale_factor", c.number(float, "data.max_response_length", 512))
        c.set("algorithm.constant", longest if given.endswith("norm") else 1.0, f"{ACTOR}.loss_scale_factor")
    else:
        c.leave(f"{ACTOR}.loss_scale_factor", "of the aggregation seq-mean-token-sum-norm")


def _correction(c: Conversion) -> None:
    place = "algorithm.rollout_correction"
    level = c.get(f"{place}.rollout_is")
    if level in ("token", "sequence"):
        key = f"{place}.rollout_is_threshold"
        bounds: dict[str, Any] = {}
        low, pair, high = str(c.get(key, 2.0)).partition("_")
        try:
            bounds = {"beyond": "mask", "lower": float(low), "upper": float(high)} if pair else {"upper": float(low)}
        except ValueError:
            c.faults.append(f"{key}={c.get(key)!r} must be a number, or LOWER_UPPER, beyond which samples are masked")
        c.set("algorithm.correction", {"level": level, **bounds}, f"{place}.rollout_is", key)
    elif level is not None:
        c.faults.append(f"{place}.rollout_is={level!r}: there is token and sequence")
    c.skip(f"{place}.rollout_is_threshold")
    c.leave(f"{place}.rollout_rs", "algorithm.correction={level: …, beyond: mask, weigh: false} rejects samples")
    c.leave(f"{place}.bypass_mode", "ratios are measured from the trainer's log-probabilities", unless=False)
    c.leave(f"{place}.rollout_is_batch_normalize", "weights are not normalised over the batch", unless=False)


def _rewards(c: Conversion) -> None:
    made: list[dict[str, Any]] = []
    custom = False
    for place in ("reward.custom_reward_function", "custom_reward_function"):
        path, name = c.get(f"{place}.path"), c.get(f"{place}.name", "compute_score")
        if path is None:
            continue
        file = Path(str(path)).expanduser()
        c.folders.append(str(file.resolve().parent))
        options = {key.rpartition(".")[2]: c.get(key) for key in c.given if key.startswith(f"{place}.reward_kwargs.")}
        made.append({"function": f"{file.stem}:{name}"} | ({"options": options} if options else {}))
        c.set("rewards", made, f"{place}.path", f"{place}.name")
        custom = True
        break
    else:
        made = [{"function": "gsm8k", "sources": GSM8K}, {"function": "math", "sources": MATH}]
        c.set("rewards", made, "data.reward_fn_key")
    for place, model in (("reward.reward_model", "model_path"), ("reward_model", "model.path")):
        if c.get(f"{place}.enable", False) and custom:
            c.skip(f"{place}.{model}")
            c.advise(f"{place}.enable=True", "verl's function asks this model; name the judge in a reward of your own")
        elif c.get(f"{place}.enable", False):
            c.set("rewards", [{"model": c.get(f"{place}.{model}")}], f"{place}.enable", f"{place}.{model}")
    c.move("reward.num_workers", "reward_workers")
    for key in ("reward.reward_manager.name", "reward_model.reward_manager"):
        c.leave(key, "rewards are scored one by one, as by verl's naive manager", unless=("naive", "dapo"))
    for place in ("reward.reward_kwargs", "reward_model.reward_kwargs", "reward_model", "reward"):
        buffer = f"{place}.overlong_buffer" if place in ("reward_model", "reward") else f"{place}.overlong_buffer_cfg"
        if c.get(f"{buffer}.enable", False):
            longest = c.number(int, "data.max_response_length", 512)
            c.set(
                "algorithm.overlong", [longest, c.number(int, f"{buffer}.len", 0)], f"{buffer}.enable", f"{buffer}.len"
            )
            c.leave(f"{buffer}.penalty_factor", "the penalty rises to 1", unless=1.0)


def _sampling(c: Conversion) -> None:
    c.move(f"{ROLLOUT}.temperature", "rollout.temperature", 1.0)
    c.move(f"{ROLLOUT}.top_p", "rollout.top_p")
    top_k = c.number(int, f"{ROLLOUT}.top_k", -1)
    c.set("rollout.top_k", 0 if top_k < 0 else top_k, f"{ROLLOUT}.top_k")
    name, mode = str(c.get(f"{ROLLOUT}.name", "vllm")), c.get(f"{ROLLOUT}.mode", "async")
    if name == "hf":
        c.set("rollout.engine", "transformers", f"{ROLLOUT}.name")
    else:
        c.set("rollout.engine", "vllm-async" if mode == "async" else "vllm", f"{ROLLOUT}.name", f"{ROLLOUT}.mode")
        if name != "vllm":
            c.advise(f"{ROLLOUT}.name={name}", "there is no such engine; vLLM is used instead")
        c.move(f"{ROLLOUT}.gpu_memory_utilization", "rollout.options.gpu_memory_utilization", 0.5)
        for key in ("max_num_seqs", "max_num_batched_tokens", "enforce_eager", "max_model_len"):
            c.move(f"{ROLLOUT}.{key}", f"rollout.options.{key}")
        c.move(f"{ROLLOUT}.dtype", "rollout.dtype", "bfloat16")
    for key in ("enable_chunked_prefill", "enable_prefix_caching", "cudagraph_capture_sizes"):
        c.leave(f"{ROLLOUT}.{key}", f"rollout.options={{{key}: …}} gives it to vLLM", unless=True)
    for key in c.starting(f"{ROLLOUT}.engine_kwargs."):
        c.leave(key, f"rollout.options={{{key.rpartition('.')[2]}: …}} gives it to the engine", unless=({}, None))
    one_device = "an engine of a run has one device, which must hold the whole model"
    c.leave(f"{ROLLOUT}.tensor_model_parallel_size", one_device, unless=1)
    for key in ("data_parallel_size", "expert_parallel_size", "pipeline_model_parallel_size"):
        c.leave(f"{ROLLOUT}.{key}", "rollout.engines is the number of engines, each on one device", unless=1)
    c.leave(f"{ROLLOUT}.ignore_eos", "a response ends with the model's end token", unless=False)
    c.leave(f"{ROLLOUT}.do_sample", "a policy is trained on what it samples", unless=True)
    c.leave(f"{ROLLOUT}.over_sample_rate", "rollout.oversampling=FACTOR, with rollout.dynamic_sampling", unless=0)
    c.leave(f"{ROLLOUT}.seed", "sampling follows from Run(seed=…)", unless=42)
    c.leave(f"{ROLLOUT}.quantization", "engines serve the weights as they are trained")
    c.leave(f"{ROLLOUT}.full_determinism", "with engines of transformers, two runs have the same bits", unless=False)
    if c.get(f"{ROLLOUT}.multi_turn.enable", False):
        c.advise(f"{ROLLOUT}.multi_turn.enable=True", "episodes of several turns: Run(tools=…) or Run(environment=…)")
    _validation(c, only_temperature=name != "hf" and mode == "async")
    if c.get("algorithm.filter_groups.enable", False):
        c.set("rollout.dynamic_sampling", True, "algorithm.filter_groups.enable")
        batches = c.number(int, "algorithm.filter_groups.max_num_gen_batches", 0)
        if batches > 0:
            c.set("rollout.refill", float(batches - 1), "algorithm.filter_groups.max_num_gen_batches")
        else:
            c.advise("algorithm.filter_groups.max_num_gen_batches=0", "there is always a limit: rollout.refill (2)")
        c.leave(
            "algorithm.filter_groups.metric",
            "groups are compared by their rewards",
            unless=("score", "seq_reward", "seq_final_reward"),
        )


def _validation(c: Conversion, *, only_temperature: bool) -> None:
    """Read the sampling of validations; ``only_temperature``: the engine does not read ``do_sample``."""
    kwargs = f"{ROLLOUT}.val_kwargs"
    c.move(f"{kwargs}.n", "evaluation.samples", 1)
    warm, sources = c.number(float, f"{kwargs}.temperature", 0.0), [f"{kwargs}.temperature"]
    if not only_temperature:
        sources.append(f"{kwargs}.do_sample")
        warm = warm if c.get(f"{kwargs}.do_sample", False) else 0.0
    c.set("evaluation.temperature", warm, *sources)
    for key, kind, whole in (("top_p", float, 1.0), ("top_k", int, 0)):
        # verl has -1 for all tokens of top_k, and validates without the truncation of training unless told otherwise.
        wanted, used = (max(c.number(kind, f"{place}.{key}", whole), 0) for place in (kwargs, ROLLOUT))
        if warm and wanted != used:
            c.advise(f"{kwargs}.{key}={wanted:g}", f"validation samples as training does, with rollout.{key}={used:g}")
        elif c.has(f"{kwargs}.{key}"):
            c.idle.append(f"{kwargs}.{key}")


def _machines(c: Conversion) -> None:
    strategy = str(c.get(f"{ACTOR}.strategy", "fsdp"))
    if strategy in STRATEGIES:
        c.set("train", STRATEGIES[strategy], f"{ACTOR}.strategy")
    else:
        c.faults.append(f"{ACTOR}.strategy={strategy!r} has no counterpart: there is {', '.join(STRATEGIES)}")
    c.skip("critic.strategy")
    nodes, each = c.number(int, "trainer.nnodes", 1), c.number(int, "trainer.n_gpus_per_node", 8)
    if nodes != 1:
        c.set("nodes", nodes, "trainer.nnodes")
    if c.get("trainer.device", "cuda") == "cpu":
        c.set("devices_per_node", 0, "trainer.device")
        return
    c.set("devices_per_node", each, "trainer.n_gpus_per_node")
    for setting in ("actor.ranks", "rollout.engines", *(["critic.ranks"] if "critic.lr" in c.settings else [])):
        c.set(setting, nodes * each, "trainer.nnodes", "trainer.n_gpus_per_node")
    c.set("placement", "fused", "actor_rollout_ref.hybrid_engine")
    rank = c.number(int, f"{MODEL}.lora_rank", 0)
    if rank:
        c.set("actor.lora.rank", rank, f"{MODEL}.lora_rank")
        c.set("actor.lora.alpha", c.number(float, f"{MODEL}.lora_alpha", 16), f"{MODEL}.lora_alpha")
        c.move(f"{MODEL}.target_modules", "actor.lora.target_modules")
    for key in ("lora_alpha", "target_modules"):
        c.skip(f"{MODEL}.{key}")
    c.leave(f"{MODEL}.exclude_modules", "actor.lora.target_modules names the layers that get an adapter")
    c.leave(f"{MODEL}.lora_adapter_path", "add the adapter to the model first, or restore=CHECKPOINT")


def _trainer(c: Conversion, batch: int) -> None:
    steps = c.get("trainer.total_training_steps")
    if steps is not None:
        c.set("steps", c.number(int, "trainer.total_training_steps", 1), "trainer.total_training_steps")
        c.skip("trainer.total_epochs")
    else:
        c.set_steps("trainer.total_epochs", c.number(int, "trainer.total_epochs", 30), batch)
    for name in ("actor", "critic"):
        share = c.settings.get(f"{name}.warmup_steps")
        if isinstance(share, float):
            place = ACTOR if name == "actor" else "critic"
            key, whole = f"{place}.optim.lr_warmup_steps_ratio", c.steps()
            if whole is None:
                del c.settings[f"{name}.warmup_steps"]
                c.wanting.setdefault("steps", f"{key}={share:g} is a share of the steps: set steps=NUMBER")
            else:
                c.set(f"{name}.warmup_steps", int(share * whole), key)
    every = c.number(int, "trainer.save_freq", -1)
    if every > 0:
        c.set("save_every", every, "trainer.save_freq")
    elif (last := c.steps()) is not None:
        c.set("save_every", last, "trainer.save_freq")
    c.set("validate_every", max(c.number(int, "trainer.test_freq", -1), 0), "trainer.test_freq")
    c.move("trainer.max_actor_ckpt_to_keep", "keep_last")
    c.trackers("trainer.logger", ("console", "tensorboard"), c.get("trainer.project_name"))
    c.leave("trainer.resume_mode", "resume=must, or resume=never in a new run directory", unless="auto")
    c.leave("trainer.resume_from_path", "restore=CHECKPOINT begins with the weights of another run")
    c.leave("trainer.experiment_name", "rlmesh train --name NAME")
    c.leave("trainer.default_local_dir", "rlmesh train --run-dir FOLDER")
    c.leave("trainer.val_only", "rlmesh evaluate CONFIG", unless=False)
    c.leave("trainer.critic_warmup", "the actor learns from the first step on", unless=0)
    modes = {"colocate_async": "one-step-off", "separate_async": "async(staleness=…)"}
    if (mode := c.get("trainer.v1.trainer_mode", "sync")) != "sync":
        c.advise(f"trainer.v1.trainer_mode={mode}", f"pipeline={modes.get(mode, 'one-step-off')}, placement=separate")


def _oddities(c: Conversion) -> None:
    for key in ("algorithm.use_pf_ppo", "distillation.enabled", f"{MODEL}.mtp.enable", "transfer_queue.enable"):
        c.leave(key, "there is no counterpart: leave it out", unless=False)
    c.leave(f"{ACTOR}.freeze_vision_tower", "models of text only", unless=False)
    c.leave(f"{MODEL}.enable_activation_offload", "actor.activation_checkpointing saves memory", unless=False)
    for place in (f"{ACTOR}.fsdp_config", "critic.fsdp"):
        for key in ("param_offload", "optimizer_offload", "offload_policy"):
            c.leave(f"{place}.{key}", "roles that share devices are offloaded while they wait", unless=False)
