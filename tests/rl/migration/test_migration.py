"""Configurations of verl and TRL, read as settings: values with the right units, and no key without a word."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("omegaconf")

from rlmesh.cli.main import main
from rlmesh.errors import UsageError
from rlmesh.rl.algorithms import GRPO
from rlmesh.rl.migration.keys import Conversion, flattened
from rlmesh.rl.migration.reading import converted, load_converted
from rlmesh.rl.trainers.run import Run

# As people write them for verl: nested, with OmegaConf's references, on top of verl's own defaults.
VERL = """
data:
  train_files: {data}
  val_files: [{data}]
  train_batch_size: 8
  max_prompt_length: 16
  max_response_length: 24
  truncation: left
  shuffle: true
actor_rollout_ref:
  model: {{path: {model}, use_remove_padding: true, enable_gradient_checkpointing: false}}
  actor:
    optim: {{lr: 3e-6, lr_warmup_steps_ratio: 0.25, lr_scheduler_type: cosine, min_lr_ratio: 0.1}}
    ppo_mini_batch_size: 4
    ppo_micro_batch_size_per_gpu: 2
    use_kl_loss: true
    kl_loss_coef: 0.001
    kl_loss_type: low_var_kl
    clip_ratio_high: 0.28
    loss_agg_mode: seq-mean-token-sum-norm
    ulysses_sequence_parallel_size: 2
    fsdp_config: {{param_offload: false, optimizer_offload: true}}
  rollout:
    name: vllm
    mode: sync
    n: 4
    tensor_model_parallel_size: 2
    gpu_memory_utilization: 0.6
    log_prob_micro_batch_size_per_gpu: 4
    max_num_seqs: ${{oc.select:data.train_batch_size,256}}
    val_kwargs: {{n: 2, do_sample: true, temperature: 0.6}}
algorithm: {{adv_estimator: grpo, use_kl_in_reward: false, norm_adv_by_std_in_grpo: false}}
trainer:
  n_gpus_per_node: 2
  nnodes: 1
  total_epochs: 3
  save_freq: 5
  test_freq: 10
  logger: [console, swanlab]
  project_name: spell
  resume_mode: auto
  balanced_batch: true
"""
TRL = """
model_name_or_path: {model}
dataset_name: openai/gsm8k
reward_funcs: [accuracy_reward]
output_dir: out
learning_rate: 2.0e-6
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
steps_per_generation: 4
num_processes: 2
num_generations: 8
num_iterations: 2
max_steps: 100
max_completion_length: 64
temperature: 0.9
epsilon_high: 0.28
loss_type: dr_grpo
scale_rewards: none
beta: 0.04
use_vllm: true
vllm_mode: colocate
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
logging_steps: 1
log_completions: true
save_steps: 40
use_peft: false
lora_r: 8
lora_dropout: 0.05
top_entropy_quantile: 0.2
repetition_penalti: 1.1
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [{"prompt": "ab>", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "1"}} for _ in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def written(folder: Path, text: str, **values: Any) -> Path:
    path = folder / "config.yaml"
    path.write_text(text.format(**values))
    return path


def told(c: Conversion) -> dict[str, str]:
    """What the report says about each key that has no counterpart."""
    return {key.partition("=")[0]: advice for key, advice in c.left}


def other(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value * 4 + 1
    return "other" if isinstance(value, str) else ["other"]


def every_key_is_told(c: Conversion, off: Sequence[str] = ()) -> None:
    """No key is lost: each is without counterpart, changes nothing, or changes the result if its value changes.

    Args:
        c: what was read.
        off: keys that belong to something that is off.
    """
    source = "verl" if c.library == "verl" else f"trl-{c.library.rpartition(' ')[2]}"
    known = {*told(c), *c.idle, *off}
    before = converted(c.given, source)
    lost = []
    for key, value in c.given.items():
        after = converted({**c.given, key: other(value)}, source)
        same = (after.settings, after.faults, after.wanting) == (before.settings, before.faults, before.wanting)
        if key not in known and same and len(after.left) == len(before.left):
            lost.append(key)
    assert lost == []


def test_a_run_of_verl(data: Path, tiny: Path, tmp_path: Path) -> None:
    run, c = load_converted(written(tmp_path, VERL, data=data, model=tiny), "verl")
    algorithm: Any = run.algorithm
    assert (run.model, run.data, run.batch_size, run.max_prompt_tokens) == (str(tiny), str(data), 8, 16)
    assert (run.steps, run.save_every, run.validate_every) == (3 * (20 // 8), 5, 10)
    assert (run.actor.lr, run.actor.minibatches, run.actor.warmup_steps, run.actor.final_lr) == (3e-6, 2, 1, 0.1)
    assert run.actor.weight_decay == 0.01 and run.actor.precision == "bfloat16"  # verl's defaults, not those of Run
    assert run.actor.token_budget == 2 * (16 + 24) and not run.actor.activation_checkpointing
    assert (algorithm.samples, algorithm.advantage, algorithm.kl, algorithm.kl_estimator) == (4, "dr_grpo", 0.001, "k3")
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip) == (0.2, 0.28, 3.0)
    assert (algorithm.aggregation, algorithm.constant) == ("constant", 24.0)
    assert (run.rollout.engine, run.rollout.max_tokens, run.rollout.temperature) == ("vllm", 24, 1.0)
    assert run.rollout.options["gpu_memory_utilization"] == 0.6 and run.rollout.options["max_num_seqs"] == 8
    assert (run.evaluation.samples, run.evaluation.temperature, run.rollout.dtype) == (2, 0.6, "bfloat16")
    assert (run.devices_per_node, run.actor.ranks, run.rollout.engines, run.placement) == (2, 2, 2, "fused")
    assert run.train == "fsdp2" and run.actor.lora.rank == 0
    assert [one.name for one in run.scored] == ["gsm8k", "math"]
    left = told(c)
    assert "trainer.balance_batch" in left["trainer.balanced_batch"]  # the nearest right name
    for key in (
        "data.truncation", "actor_rollout_ref.actor.optim.lr_scheduler_type", "trainer.logger",
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
    ):  # fmt: skip
        assert left[key], key
    assert "actor_rollout_ref.model.use_remove_padding" in c.idle
    # Any mode but "async" is the one that waits for a batch; the project is that of a tracker.
    every_key_is_told(c, off=["actor_rollout_ref.rollout.mode", "trainer.project_name"])


def test_ppo_and_dapo_of_verl(data: Path, tiny: Path) -> None:
    base = {
        "data.train_files": str(data), "data.train_batch_size": 4, "actor_rollout_ref.model.path": str(tiny),
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4, "trainer.total_training_steps": 7, "trainer.device": "cpu",
        "actor_rollout_ref.rollout.name": "hf",
    }  # fmt: skip
    run, _ = load_converted({**base, "algorithm.use_kl_in_reward": True, "critic.optim.lr": 2e-5}, "verl")
    algorithm: Any = run.algorithm
    assert type(algorithm).__name__ == "PPO"
    assert (algorithm.kl, algorithm.lam, algorithm.value_clip, run.critic.lr) == (0.001, 1.0, 0.5, 2e-5)
    assert (run.critic.token_budget, run.steps, run.save_every, run.devices_per_node) == (32768, 7, 7, 0)
    dapo = {
        "algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 4, "algorithm.filter_groups.enable": True,
        "algorithm.filter_groups.max_num_gen_batches": 10, "reward_model.overlong_buffer.enable": True,
        "reward_model.overlong_buffer.len": 128, "reward_model.overlong_buffer.penalty_factor": 1.0,
        "algorithm.rollout_correction.rollout_is": "token",
    }  # fmt: skip
    run, _ = load_converted({**base, **dapo}, "verl")
    algorithm = run.algorithm
    assert run.rollout.dynamic_sampling and run.rollout.refill == 9 and tuple(algorithm.overlong) == (512, 128)
    assert (algorithm.correction.level, algorithm.correction.upper) == ("token", 2.0)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"algorithm.adv_estimator": "gpg"}, "adv_estimator='gpg' has no counterpart"),
        ({"actor_rollout_ref.actor.strategy": "megatron"}, "strategy='megatron' has no counterpart"),
        ({"actor_rollout_ref.actor.ppo_mini_batch_size": 3}, "must divide data.train_batch_size=4"),
        ({"actor_rollout_ref.actor.policy_loss.loss_mode": "clip_cov"}, "loss_mode='clip_cov' has no counterpart"),
        ({"algorithm.adv_estimator": "grpo", "algorithm.use_kl_in_reward": True}, "the divergence is in the loss here"),
        ({"trainer.total_training_steps": None, "data.train_files": "gone.parquet"}, "set steps=NUMBER"),
        ({"actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum"}, "loss_agg_mode='seq-mean-token-sum' has no"),
    ],
)
def test_what_would_train_something_else_is_refused(
    data: Path, tiny: Path, changes: dict[str, Any], fault: str
) -> None:
    values = {
        "data.train_files": str(data), "data.train_batch_size": 4, "actor_rollout_ref.model.path": str(tiny),
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4, "trainer.total_training_steps": 7, "trainer.device": "cpu",
        "actor_rollout_ref.rollout.n": 2, **changes,
    }  # fmt: skip
    with pytest.raises(UsageError, match=fault):
        load_converted(values, "verl")


def test_a_run_of_trl(data: Path, tiny: Path, tmp_path: Path) -> None:
    path = written(tmp_path, TRL, model=tiny)
    run, c = load_converted(path, "trl-grpo", [f"data={data}", 'rewards=["gsm8k"]'])
    algorithm: Any = run.algorithm
    # 8 rows × 2 processes × 4 passes are 64 completions, of 8 prompts, in 2 optimizer steps; each twice.
    assert (run.batch_size, run.actor.minibatches, run.actor.epochs, algorithm.samples) == (8, 2, 2, 8)
    assert (run.steps, run.save_every, run.actor.warmup_steps) == (25, 10, 3)  # optimizer steps ÷ 4
    assert (run.actor.lr, run.actor.final_lr, run.actor.precision, run.seed) == (2e-6, 0.0, "bfloat16", 42)
    assert (algorithm.loss, algorithm.aggregation, algorithm.constant) == ("dr_grpo", "constant", 64.0)
    assert (algorithm.advantage, algorithm.kl, algorithm.clip_low, algorithm.clip_high) == ("dr_grpo", 0.04, 0.2, 0.28)
    assert (algorithm.correction.level, algorithm.correction.beyond, algorithm.correction.upper) == (
        "sequence",
        "mask",
        3,
    )
    assert (run.rollout.max_tokens, run.rollout.temperature, run.rollout.engine) == (64, 0.9, "vllm")
    assert (run.actor.lora.rank, run.placement, run.devices_per_node) == (0, "fused", 2)
    left = told(c)
    assert "repetition_penalty" in left["repetition_penalti"]
    for key in (
        "dataset_name",
        "reward_funcs",
        "top_entropy_quantile",
        "lr_scheduler_type",
        "output_dir",
    ):
        assert left[key], key
    assert {"logging_steps", "log_completions", "lora_r"} <= {*c.idle}
    every_key_is_told(c)


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        ({"loss_type": "grpo"}, ("grpo", "sequence-mean", 0.2, 0.2)),
        ({"loss_type": "dapo"}, ("dapo", "token-mean", 0.2, 0.2)),  # TRL's bounds, not those of the paper
        ({"loss_type": "cispo", "epsilon_high": 5.0}, ("cispo", "token-mean", None, 4.0)),
        (
            {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4},
            ("gspo", "sequence-mean", 3e-4, 4e-4),
        ),
    ],
)
def test_losses_of_trl(data: Path, tiny: Path, loss: dict[str, Any], found: tuple[Any, ...]) -> None:
    values = {"model_name_or_path": str(tiny), "max_steps": 3, "use_cpu": True, **loss}
    run, _ = load_converted(values, "trl-grpo", [f"data={data}", 'rewards=["gsm8k"]'])
    algorithm: Any = run.algorithm
    assert (algorithm.loss, algorithm.aggregation, algorithm.clip_low, algorithm.clip_high) == found
    assert (algorithm.eps, algorithm.correction, run.batch_size) == (1e-4, None, 1)


def test_what_of_trl_is_refused(tiny: Path, data: Path) -> None:
    values = {"model_name_or_path": str(tiny), "use_cpu": True}
    with pytest.raises(UsageError) as raised:
        load_converted(
            {**values, "loss_type": "vespo", "scale_rewards": "batch", "per_device_train_batch_size": 6}, "trl-grpo"
        )
    for fault in ("'vespo'", "scale_rewards='batch'", "6 completions", "steps=NUMBER", "data is missing"):
        assert fault in str(raised.value)
    with pytest.raises(UsageError, match="did you mean 'trl-grpo'"):
        converted(values, "trl-gpro")
    with pytest.raises(UsageError, match="loss_type='ipo' has no counterpart"):
        load_converted({**values, "loss_type": "ipo", "max_steps": 1}, "trl-dpo", [f"data={data}"])


def test_sft_dpo_rewards_and_ppo_of_trl(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text((json.dumps({"prompt": "a>", "response": "b", "chosen": "b", "rejected": "c"}) + "\n") * 32)
    common = {
        "model_name_or_path": str(tiny), "train_dataset": str(path), "use_cpu": True, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2, "num_train_epochs": 2, "max_length": 32,
    }  # fmt: skip
    for kind, name, lr in (("sft", "SFT", 2e-5), ("dpo", "DPO", 1e-6), ("reward", "RewardModelling", 1e-4)):
        run, c = load_converted(common, f"trl-{kind}")
        assert (type(run.algorithm).__name__, run.actor.lr, run.batch_size, run.steps) == (name, lr, 8, 8)
        assert (run.rollout.max_tokens, run.actor.final_lr) == (32, 0.0)
        every_key_is_told(c)
    run, c = load_converted(
        {
            "sft_model_path": str(tiny), "reward_model_path": str(tiny), "train_dataset": str(path), "use_cpu": True,
            "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_mini_batches": 2,
            "total_episodes": 80, "missing_eos_penalty": 1.0, "vf_coef": 0.2, "num_ppo_epochs": 3,
        },
        "trl-ppo",
    )  # fmt: skip
    algorithm: Any = run.algorithm
    assert (run.batch_size, run.steps, run.actor.minibatches, run.critic.epochs) == (8, 10, 2, 3)
    assert (algorithm.kl, algorithm.lam, algorithm.value_clip, run.rollout.temperature) == (0.05, 0.95, 0.2, 0.7)
    assert {"missing_eos_penalty", "vf_coef"} <= {*told(c)}


def test_a_dataclass_of_arguments(tiny: Path, data: Path) -> None:
    @dataclass
    class Arguments:
        model_name_or_path: str = str(tiny)
        max_steps: int = 4
        use_cpu: bool = True
        report_to: list[str] = field(default_factory=lambda: ["none"])
        learning_rate: float = 5e-6

    run = Run.from_config(Arguments(), [f"data={data}", 'rewards=["gsm8k"]'], source="trl-grpo")
    assert (run.actor.lr, run.steps, run.trackers) == (5e-6, 4, ())


def test_a_reward_function_of_verl_in_a_file(tiny: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "spelling_reward.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):\n    return bonus\n"
    )
    values = {
        "data.train_files": str(data), "data.train_batch_size": 4, "actor_rollout_ref.model.path": str(tiny),
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4, "trainer.total_training_steps": 7, "trainer.device": "cpu",
        "actor_rollout_ref.rollout.name": "hf",
        "reward.custom_reward_function.path": str(tmp_path / "spelling_reward.py"),
        "reward.custom_reward_function.name": "score", "reward.custom_reward_function.reward_kwargs.bonus": 0.5,
    }  # fmt: skip
    run, c = load_converted(values, "verl")
    (reward,) = run.scored
    assert (reward.name, dict(reward.options)) == ("score", {"bonus": 0.5})
    every_key_is_told(c)


def test_the_command_lists_every_key(
    tiny: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, TRL.replace("use_vllm: true", "use_cpu: true"), model=tiny)
    words = [
        f"data={data}",
        'rewards=["gsm8k"]',
        "batch_size=4",
        "actor.ranks=1",
        "rollout.engines=1",
        "rollout.max_tokens=32",
    ]
    code = main(
        ["train", str(path), "--from", "trl-grpo", "--check", *(part for one in words for part in ("--set", one))]
    )
    out = capsys.readouterr()
    assert code == 0, out.err
    assert "keys have no counterpart" in out.out and "actor.lr=2e-06  ← learning_rate=2e-06" in out.out
    assert "the run can start" in out.out
    assert main(["train", str(path), "--from", "tlr-grpo", "--check"]) == 2
    assert "did you mean 'trl-grpo'" in capsys.readouterr().err


def test_adapters_and_trackers() -> None:
    place = "actor_rollout_ref.model"
    values = {f"{place}.lora_rank": 4, "trainer.logger": ["console", "wandb"], "trainer.project_name": "spell"}
    found = converted(values, "verl").settings
    assert (found["actor.lora.rank"], found["actor.lora.alpha"], found["trackers"]) == (4, 16.0, ["wandb:spell"])
    c = converted({"use_peft": True, "lora_r": 8, "lora_dropout": 0.05, "report_to": "wandb"}, "trl-sft")
    found = c.settings
    assert (found["actor.lora.rank"], found["actor.lora.alpha"], found["trackers"]) == (8, 32.0, ["wandb"])
    assert told(c)["lora_dropout"]


def test_dotted_and_nested_keys_are_the_same() -> None:
    assert dict(flattened({"a": {"b": 1, "c": {}}, "d.e": 2})) == {"a.b": 1, "a.c": {}, "d.e": 2}


def of_verl(data: Path, tiny: Path, changes: dict[str, Any], *overrides: str) -> tuple[Any, Conversion]:
    values = {
        "data.train_files": str(data), "data.train_batch_size": 4, "actor_rollout_ref.model.path": str(tiny),
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4, "trainer.total_training_steps": 7, "trainer.device": "cpu",
        "actor_rollout_ref.rollout.name": "hf", "actor_rollout_ref.rollout.n": 2, "algorithm.adv_estimator": "grpo",
        **changes,
    }  # fmt: skip
    return load_converted(values, "verl", overrides)


def of_trl(data: Path, tiny: Path, changes: dict[str, Any], *overrides: str) -> tuple[Any, Conversion]:
    values = {"model_name_or_path": str(tiny), "use_cpu": True, "max_steps": 3, **changes}
    return load_converted(values, "trl-grpo", [f"data={data}", 'rewards=["gsm8k"]', *overrides])


@pytest.mark.parametrize("mode", ["gspo", "sapo"])
@pytest.mark.parametrize("given", [{}, {"actor_rollout_ref.actor.loss_agg_mode": "token-mean"}])
def test_verl_aggregates_some_losses_per_sequence_whatever_it_is_told(
    data: Path, tiny: Path, mode: str, given: dict[str, str]
) -> None:
    run, c = of_verl(data, tiny, {"actor_rollout_ref.actor.policy_loss.loss_mode": mode, **given})
    assert (run.algorithm.loss, run.algorithm.aggregation) == (mode, "sequence-mean")
    assert ("actor_rollout_ref.actor.loss_agg_mode" in told(c)) == bool(given)


def test_shares_are_of_the_steps_that_the_run_has(data: Path, tiny: Path) -> None:
    shares = {"warmup_ratio": 0.1, "save_steps": 0.1, "eval_strategy": "steps", "eval_steps": 0.2}
    run, _ = of_trl(data, tiny, {"max_steps": -1, **shares}, "steps=500")
    assert (run.actor.warmup_steps, run.save_every, run.validate_every) == (50, 50, 100)
    run, _ = of_trl(data, tiny, {"max_steps": 30, **shares}, "steps=500")
    assert run.actor.warmup_steps == 50
    ratio = {"actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": 0.1, "trainer.total_training_steps": None}
    unknown = {**ratio, "data.train_files": "gone.parquet"}
    run, _ = of_verl(data, tiny, unknown, "steps=200", f"data={data}")
    assert (run.actor.warmup_steps, run.save_every) == (20, 200)
    run, _ = of_verl(data, tiny, {**ratio, "trainer.total_epochs": 4}, f"data={data}")
    assert (run.steps, run.actor.warmup_steps) == (20, 2)
    run, _ = of_verl(data, tiny, {**ratio, "trainer.total_epochs": 10}, f"data={data}", "batch_size=10")
    assert (run.steps, run.actor.warmup_steps) == (20, 2)
    with pytest.raises(UsageError, match="set steps=NUMBER"):
        of_verl(data, tiny, unknown)


@pytest.mark.parametrize(
    ("clips", "found", "left"),
    [
        ({"clip_ratio": 0.3}, (0.2, 0.2), True),
        ({"clip_ratio": 0.3, "clip_ratio_low": None, "clip_ratio_high": None}, (0.3, 0.3), False),
        ({"clip_ratio": 0.3, "clip_ratio_low": 0.1, "clip_ratio_high": None}, (0.1, 0.3), False),
        ({"clip_ratio": 0.2, "clip_ratio_high": 0.28}, (0.2, 0.28), False),
    ],
)
def test_clip_ratios_of_verl(data: Path, tiny: Path, clips: dict[str, Any], found: Any, left: bool) -> None:
    run, c = of_verl(data, tiny, {f"actor_rollout_ref.actor.{key}": value for key, value in clips.items()})
    assert (run.algorithm.clip_low, run.algorithm.clip_high) == found
    assert ("actor_rollout_ref.actor.clip_ratio" in told(c)) == left


def test_a_reward_function_of_verl_wins_over_a_reward_model(data: Path, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "judging_reward.py").write_text("def compute_score(data_source, solution_str):\n    return 0.0\n")
    both = {
        "reward.custom_reward_function.path": str(tmp_path / "judging_reward.py"), "reward.reward_model.enable": True,
        "reward.reward_model.model_path": str(tiny),
    }  # fmt: skip
    run, c = of_verl(data, tiny, both)
    assert [one.name for one in run.scored] == ["judging_reward"] and "reward.reward_model.enable" in told(c)


@pytest.mark.parametrize(
    ("engine", "mode", "found"), [("vllm", "async", 0.6), ("vllm", "sync", 0.0), ("hf", "async", 0.0)]
)
def test_a_validation_of_verl_samples_at_its_temperature(engine: str, mode: str, found: float) -> None:
    rollout = {"name": engine, "mode": mode, "val_kwargs.temperature": 0.6, "val_kwargs.n": 4}
    c = converted({f"actor_rollout_ref.rollout.{key}": value for key, value in rollout.items()}, "verl")
    assert c.settings["evaluation.temperature"] == found


@pytest.mark.parametrize(
    ("rollout", "left"),
    [
        ({"top_p": 0.9, "val_kwargs.temperature": 1.0}, "val_kwargs.top_p=1"),
        ({"top_k": 50, "val_kwargs.temperature": 1.0}, "val_kwargs.top_k=0"),
        ({"val_kwargs.top_p": 0.7, "val_kwargs.temperature": 1.0}, "val_kwargs.top_p=0.7"),
        ({"top_p": 0.9, "val_kwargs.top_p": 0.9, "val_kwargs.temperature": 1.0}, ""),
        ({"top_p": 0.9, "top_k": 50}, ""),
        ({"top_k": 0, "val_kwargs.top_k": -1, "val_kwargs.temperature": 1.0}, ""),
    ],
)
def test_a_validation_of_verl_that_leaves_out_other_tokens_than_training_is_told(
    rollout: dict[str, Any], left: str
) -> None:
    c = converted({f"actor_rollout_ref.rollout.{key}": value for key, value in rollout.items()}, "verl")
    told = [key.removeprefix("actor_rollout_ref.rollout.") for key, _ in c.left if "val_kwargs" in key]
    assert told == ([left] if left else [])


def test_numbers_and_bounds_of_verl(data: Path, tiny: Path) -> None:
    place = "algorithm.rollout_correction"
    run, _ = of_verl(data, tiny, {f"{place}.rollout_is": "token", f"{place}.rollout_is_threshold": "0.5_5.0"})
    correction = run.algorithm.correction
    assert (correction.beyond, correction.lower, correction.upper) == ("mask", 0.5, 5.0)
    for key, value in (
        ("trainer.nnodes", "two"), ("data.train_batch_size", "many"), ("actor_rollout_ref.actor.entropy_coeff", "low"),
        ("trainer.total_training_steps", 2.5),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=f"{key}={value!r} must be a"):
            of_verl(data, tiny, {key: value})
    with pytest.raises(UsageError, match="LOWER_UPPER"):
        of_verl(data, tiny, {f"{place}.rollout_is": "token", f"{place}.rollout_is_threshold": "low_5.0"})
    with pytest.raises(UsageError, match="num_generations='some' must be a whole number"):
        of_trl(data, tiny, {"num_generations": "some"})


def test_delta_of_trl(data: Path, tiny: Path) -> None:
    run, _ = of_trl(data, tiny, {"delta": 2.0})
    assert run.algorithm.dual_clip == 2.0
    run, c = of_trl(data, tiny, {"delta": 2.0, "importance_sampling_level": "sequence"})
    assert run.algorithm.loss == "gspo" and run.algorithm.dual_clip is None and "delta" in told(c)
    with pytest.raises(ValueError, match="the loss 'gspo' has no dual clip"):
        GRPO(loss="gspo", dual_clip=2.0)


@pytest.mark.parametrize(
    ("given", "upper"), [({}, 3.0), ({"clip_max": None}, 1e30), ({"clip_max": 2.0, "cap": 4.0}, 4.0)]
)
def test_bounds_of_the_correction_of_trl(data: Path, tiny: Path, given: dict[str, Any], upper: float) -> None:
    bounds = {f"vllm_importance_sampling_{key}": value for key, value in {"clip_min": 0.5, **given}.items()}
    run, _ = of_trl(data, tiny, {"use_vllm": True, **bounds})
    assert (run.algorithm.correction.upper, run.algorithm.correction.lower) == (upper, 0.5)


def test_a_null_of_trl_that_is_no_default(data: Path, tiny: Path) -> None:
    with pytest.raises(UsageError, match="max_completion_length=null: a response has a limit"):
        of_trl(data, tiny, {"max_completion_length": None})


def test_keys_of_trl_that_change_what_is_trained(data: Path, tiny: Path) -> None:
    changes = {"model_revision": "v2", "cast_lm_head_to_fp32": True, "use_liger_kernel": False}
    run, c = of_trl(data, tiny, changes)
    assert {"model_revision", "cast_lm_head_to_fp32"} <= {*told(c)} and run.actor.use_liger_kernel is False
    assert (run.evaluation.samples, run.evaluation.temperature) == (8, 1.0)
    sft = {"model_name_or_path": str(tiny), "max_steps": 1, "train_dataset": str(data)}
    assert {"completion_only_loss (not given)", "assistant_only_loss (not given)"} <= {*told(converted(sft, "trl-sft"))}


def test_keys_of_verl_that_change_what_is_trained(data: Path, tiny: Path) -> None:
    dtype, liger = "actor_rollout_ref.actor.fsdp_config.model_dtype", "actor_rollout_ref.model.use_liger"
    run, c = of_verl(data, tiny, {dtype: "bf16", liger: False})
    assert dtype in told(c) and run.actor.use_liger_kernel is False
    run, c = of_verl(data, tiny, {"algorithm.adv_estimator": "gae", "critic.model.lora_rank": 32})
    assert "critic.model.lora_rank" in told(c)


def test_secrets_are_not_told() -> None:
    place = "reward.custom_reward_function"
    values = {
        f"{place}.path": "judge.py", f"{place}.reward_kwargs.api_key": "hidden", "trainer.wandb_api_key": "hidden",
        "hub_token": "hidden",
    }  # fmt: skip
    report = converted(values, "verl").report(whole=True)
    assert "wandb_api_key=…" in report and "hidden" not in report
