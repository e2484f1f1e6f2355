"""`run_settings_of`: the settings of a `Run` from a configuration with verl's keys."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlmesh.errors import UsageError
from rlmesh.rl.algorithms.grpo import GRPO
from rlmesh.rl.algorithms.ppo import PPO, ReinforcePlusPlus
from rlmesh.rl.algorithms.protocol import Algorithm

__all__ = ["MEGATRON", "read", "run_settings_of"]

logger = logging.getLogger(__name__)

MEGATRON = (
    "rlmesh has no Megatron-LM engine yet: strategy 'fsdp' (FSDP2), or Run(train=…) with 'ddp' or 'zero1' to 'zero3'"
)
ENGINES = {"fsdp": "fsdp2", "fsdp2": "fsdp2", "ddp": "ddp", "zero1": "zero1", "zero2": "zero2", "zero3": "zero3"}
ROLLOUTS = {"hf": "transformers", "transformers": "transformers", "vllm": "vllm", "vllm-async": "vllm-async"}
ACTOR, CRITIC, ROLLOUT = "actor_rollout_ref.actor", "critic", "actor_rollout_ref.rollout"
BATCH = 16
"""Prompts per step if the configuration does not say it: the default of `Run`."""
SECTION = {
    "optim.lr": "lr",
    "optim.lr_warmup_steps": "warmup_steps",
    "optim.weight_decay": "weight_decay",
    "grad_clip": "max_grad_norm",
    "ppo_epochs": "epochs",
    "ppo_max_token_len_per_gpu": "token_budget",
}
KEYS = {
    "actor_rollout_ref.model.path": "model",
    "data.train_files": "data",
    "data.val_files": "validation",
    "data.train_batch_size": "batch_size",
    "data.max_prompt_length": "max_prompt_tokens",
    "data.max_response_length": "rollout.max_tokens",
    "data.seed": "seed",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "actor.activation_checkpointing",
    "actor_rollout_ref.model.use_liger": "actor.use_liger_kernel",
    f"{ROLLOUT}.temperature": "rollout.temperature",
    f"{ROLLOUT}.top_p": "rollout.top_p",
    f"{ROLLOUT}.top_k": "rollout.top_k",
    "critic.model.path": "critic.model",
    "critic.model.enable_gradient_checkpointing": "critic.activation_checkpointing",
    "trainer.total_training_steps": "steps",
    "trainer.nnodes": "nodes",
    **{f"{ACTOR}.{name}": f"actor.{own}" for name, own in SECTION.items()},
    **{f"{CRITIC}.{name}": f"critic.{own}" for name, own in SECTION.items()},
}
"""verl's key → the setting of `Run`."""
READ_ELSEWHERE = (
    f"{ACTOR}.strategy", "critic.strategy", "reward_model.enable", "reward_model.model.path", "trainer.n_gpus_per_node",
    "trainer.device", "trainer.save_freq", "trainer.test_freq", "trainer.total_epochs", "trainer.experiment_name",
    f"{ROLLOUT}.name", f"{ROLLOUT}.n",
    f"{ACTOR}.ppo_mini_batch_size", f"{CRITIC}.ppo_mini_batch_size", f"{ACTOR}.clip_ratio", f"{ACTOR}.entropy_coeff",
    f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef", f"{CRITIC}.cliprange_value", "algorithm.adv_estimator",
    "algorithm.gamma", "algorithm.lam", "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef",
)  # fmt: skip


def read(config: Any, key: str, default: Any = None) -> Any:
    """The value of a dotted key in mappings, OmegaConf's containers or objects with attributes."""
    for name in key.split("."):
        config = (
            config.get(name) if isinstance(config, Mapping) or hasattr(config, "keys") else getattr(config, name, None)
        )
        if config is None:
            return default
    return config


def run_settings_of(config: Any, tokenizer: Any) -> dict[str, Any]:
    """The arguments of `Run` without rewards. The log names keys that are not read.

    Args:
        config: mappings, OmegaConf's containers or objects with attributes.
        tokenizer: the model's tokenizer. It counts the prompts that are short enough, if the length of the run is given
            in epochs.

    Raises:
        NotImplementedError: the strategy or the advantage estimator does not exist here; the message names it.
        UsageError: lists all other faults.
    """
    from rlmesh.rl.trainers.settings import ActorSettings, CriticSettings, RolloutSettings

    found = {own: value for key, own in KEYS.items() if (value := read(config, key)) is not None}
    if found.get("rollout.top_k") == -1:  # in verl, -1 stands for all tokens
        found["rollout.top_k"] = 0
    faults = [*_faults(config)]
    for key, own in (("trainer.save_freq", "save_every"), ("trainer.test_freq", "validate_every")):
        if (value := read(config, key)) is not None and int(value) > 0:
            found[own] = int(value)
    if (engine := read(config, f"{ROLLOUT}.name")) is not None:
        if engine in ROLLOUTS:
            found["rollout.engine"] = ROLLOUTS[engine]
        else:
            faults.append(f"{ROLLOUT}.name={engine!r}: there is {', '.join(ROLLOUTS)}")
    if faults:
        raise UsageError("RayPPOTrainer: " + "\n  ".join(faults))
    for name, place in (("actor", ACTOR), ("critic", CRITIC)):
        mini = read(config, f"{place}.ppo_mini_batch_size", read(config, f"{ACTOR}.ppo_mini_batch_size"))
        found[f"{name}.minibatches"] = int(found.get("batch_size", BATCH)) // int(mini) if mini else 1
    # In verl, the critic makes as many passes as the actor unless its own section says otherwise.
    if "critic.epochs" not in found and "actor.epochs" in found:
        found["critic.epochs"] = found["actor.epochs"]
    on_cpu = read(config, "trainer.device", "cuda") == "cpu"
    settings: dict[str, Any] = {name: value for name, value in found.items() if "." not in name}
    sections: dict[str, type[Any]] = {"actor": ActorSettings, "critic": CriticSettings, "rollout": RolloutSettings}
    for name, section in sections.items():
        given = {key.partition(".")[2]: value for key, value in found.items() if key.startswith(f"{name}.")}
        settings[name] = section(**given)
    settings["data"], settings["validation"] = map(_files, (settings.get("data"), settings.get("validation")))
    if "steps" not in settings:
        settings["steps"] = _steps(settings, int(read(config, "trainer.total_epochs")), tokenizer)
    _report_unread(config)
    return {
        **settings,
        "algorithm": _algorithm(config),
        "train": _strategy(config),
        "devices_per_node": 0 if on_cpu else int(read(config, "trainer.n_gpus_per_node", 8)),
    }


def _steps(settings: Mapping[str, Any], epochs: int, tokenizer: Any) -> int:
    from rlmesh.rl.data.dataset import RLHFDataset

    limit = {"max_prompt_tokens": settings["max_prompt_tokens"]} if "max_prompt_tokens" in settings else {}
    return epochs * (len(RLHFDataset(settings["data"], tokenizer, **limit)) // int(settings.get("batch_size", BATCH)))


def _strategy(config: Any) -> str:
    strategy = read(config, f"{ACTOR}.strategy", "fsdp")
    if strategy == "megatron":
        raise NotImplementedError(f"{ACTOR}.strategy='megatron': {MEGATRON}")
    if strategy not in ENGINES:
        raise NotImplementedError(f"{ACTOR}.strategy={strategy!r}: there is {', '.join(ENGINES)}")
    return ENGINES[strategy]


def _faults(config: Any) -> Iterator[str]:
    strategy, critic = read(config, f"{ACTOR}.strategy", "fsdp"), read(config, "critic.strategy")
    if critic is not None and critic != strategy:
        yield f"critic.strategy={critic!r} must be {ACTOR}.strategy={strategy!r}"
    for key in ("actor_rollout_ref.model.path", "data.train_files"):
        if read(config, key) is None:
            yield f"{key} is missing"
    batch = read(config, "data.train_batch_size", BATCH)
    for section in (ACTOR, CRITIC):
        mini = read(config, f"{section}.ppo_mini_batch_size", batch)
        if not isinstance(mini, int) or mini < 1 or (isinstance(batch, int) and batch % mini):
            yield f"{section}.ppo_mini_batch_size={mini!r} must divide data.train_batch_size={batch}"
    if read(config, "trainer.total_training_steps") is None and read(config, "trainer.total_epochs") is None:
        yield "trainer.total_training_steps is missing (or trainer.total_epochs)"


def _algorithm(config: Any) -> Algorithm:
    """The algorithm that ``algorithm.adv_estimator`` names.

    Raises:
        NotImplementedError: there is none of this name.
    """
    name = str(getattr(chosen := read(config, "algorithm.adv_estimator", "gae"), "value", chosen))
    clip, entropy = float(read(config, f"{ACTOR}.clip_ratio", 0.2)), float(read(config, f"{ACTOR}.entropy_coeff", 0.0))
    samples = int(read(config, f"{ROLLOUT}.n", 1))
    in_loss = float(read(config, f"{ACTOR}.kl_loss_coef", 0.001)) if read(config, f"{ACTOR}.use_kl_loss") else 0.0
    in_reward = 0.0
    if read(config, "algorithm.use_kl_in_reward", read(config, "algorithm.kl_ctrl.kl_coef") is not None):
        in_reward = float(read(config, "algorithm.kl_ctrl.kl_coef", 0.001))
    token_level: dict[str, Any] = {
        "samples": samples, "gamma": float(read(config, "algorithm.gamma", 1.0)), "kl": in_reward, "kl_loss": in_loss,
        "clip_low": clip, "clip_high": clip, "entropy": entropy,
    }  # fmt: skip
    if name == "gae":
        value_clip = float(read(config, f"{CRITIC}.cliprange_value", 0.5))
        return PPO(**token_level, lam=float(read(config, "algorithm.lam", 1.0)), value_clip=value_clip)
    if name == "reinforce_plus_plus":
        return ReinforcePlusPlus(**token_level)
    advantages: dict[str, Any] = {"grpo": "grpo", "rloo": "rloo", "opo": "opo"}
    if name not in advantages:
        there = ", ".join(["gae", "reinforce_plus_plus", *advantages])
        raise NotImplementedError(f"algorithm.adv_estimator={name!r}: there is {there}")
    if in_reward:
        raise UsageError(
            f"algorithm.kl_ctrl.kl_coef with adv_estimator={name!r}: the divergence is in the loss here. Set "
            f"algorithm.use_kl_in_reward=False, and {ACTOR}.use_kl_loss=True with {ACTOR}.kl_loss_coef"
        )
    return GRPO(
        samples, advantages[name], "grpo", "token-mean", clip_low=clip, clip_high=clip, kl=in_loss, entropy=entropy
    )


def _files(given: Any) -> Any:
    """File names as a text or a plain list: OmegaConf's lists are no Python lists, so they are converted."""
    return given if given is None or isinstance(given, str) else list(given)


def _report_unread(config: Any) -> None:
    known = {*KEYS, *READ_ELSEWHERE}
    if unread := [key for key in _leaves(config) if key not in known]:
        logger.warning("%d keys of the configuration change nothing here: %s", len(unread), ", ".join(unread))


def _leaves(config: Any, before: str = "") -> Iterator[str]:
    if isinstance(config, Mapping) or hasattr(config, "keys"):
        items: Sequence[tuple[Any, Any]] = [(name, config[name]) for name in config]
    else:
        items = list(vars(config).items()) if hasattr(config, "__dict__") and not isinstance(config, type) else []
    if not items and before:
        yield before[:-1]
    for name, value in items:
        yield from _leaves(value, f"{before}{name}.")
