"""The PPO architecture document: its code runs with the import lines changed, and trains."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("omegaconf")
pytest.importorskip("transformers")

from rlmesh import ResourcePoolManager
from rlmesh.errors import UsageError
from rlmesh.rl.algorithms import GRPO, PPO
from rlmesh.rl.verl import (
    ActorRolloutRefWorker,
    CriticWorker,
    NVMegatronRayWorkerGroup,
    RayPPOTrainer,
    RewardModelWorker,
    Role,
    gsm8k,
)

PROGRAM = Path(__file__).with_name("verl_003") / "main_ppo.py"
ANSWERS = [str(number) for number in range(1, 5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose words are whole answers, such as ``#### 3``; questions about them; and a reward model."""
    import torch
    from datasets import Dataset
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import (
        PreTrainedTokenizerFast,
        SmolLM3Config,
        SmolLM3ForCausalLM,
        SmolLM3ForSequenceClassification,
    )

    root = tmp_path_factory.mktemp("verl")
    words = ["<pad>", "<end>", *(f"q{answer}" for answer in ANSWERS), *(f"#### {answer}" for answer in ANSWERS)]
    tokenizer = Tokenizer(WordLevel({word: place for place, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Split(Regex(";"), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    torch.manual_seed(0)
    labels: dict[str, Any] = {"num_labels": 1}
    config = SmolLM3Config(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        **labels,
    )  # fmt: skip
    for name, kind in (("model", SmolLM3ForCausalLM), ("judge", SmolLM3ForSequenceClassification)):
        kind(config).save_pretrained(root / name)
        fast.save_pretrained(root / name)
    rows = [
        {"prompt": f"q{answer}", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": answer}}
        for answer in ANSWERS * 8
    ]
    Dataset.from_list(rows).to_parquet(root / "train.parquet")
    Dataset.from_list(rows[:4]).to_parquet(root / "test.parquet")
    (root / "ppo.yaml").write_text(
        f"""
data: {{train_files: {root}/train.parquet, val_files: {root}/test.parquet, train_batch_size: 32,
       max_prompt_length: 8, max_response_length: 1, tokenizer: null}}
actor_rollout_ref:
  model: {{path: {root}/model}}
  actor: {{strategy: fsdp, ppo_mini_batch_size: 32, ppo_epochs: 2, optim: {{lr: 0.01}}}}
  rollout: {{name: hf, temperature: 1.0, n: 1}}
critic: {{strategy: fsdp, optim: {{lr: 0.01}}}}
reward_model: {{enable: false, model: {{path: {root}/judge}}}}
algorithm: {{adv_estimator: gae, gamma: 1.0, lam: 1.0, kl_ctrl: {{kl_coef: 0.001}}}}
trainer: {{device: cpu, nnodes: 1, n_gpus_per_node: 1, total_training_steps: 12, save_freq: -1, test_freq: -1,
          experiment_name: seed-003}}
"""
    )
    return root


def run(folder: Path, where: Path, *changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROGRAM), str(folder / "ppo.yaml"), *changes], cwd=where, capture_output=True, text=True,
        timeout=280, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def metrics_of(ended: subprocess.CompletedProcess[str]) -> dict[str, float]:
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    found = re.search(r"^METRICS (.*)$", ended.stdout, re.MULTILINE)
    assert found is not None
    metrics: dict[str, float] = json.loads(found[1])
    return metrics


@pytest.mark.slow
def test_the_document_trains_on_one_pool(folder: Path, tmp_path: Path) -> None:
    """Actor and engine in one process, critic and reference in others, which take turns on one device."""
    metrics = metrics_of(run(folder, tmp_path))
    assert metrics["val/reward/score"] == 1.0, "every answer is right after 12 steps; before, one in ten is"
    assert metrics["val/reward/openai/gsm8k"] == 1.0


@pytest.mark.slow
def test_a_reward_model_trains_and_functions_validate(folder: Path, tmp_path: Path) -> None:
    ended = run(folder, tmp_path, "reward_model.enable=true", "trainer.total_training_steps=2")
    metrics = metrics_of(ended)
    assert "reward/reward_model" in metrics
    assert "val/reward/score" in metrics and "val/reward/reward_model" not in metrics


def config_of(folder: Path, **changes: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.merge(
        OmegaConf.load(folder / "ppo.yaml"),
        OmegaConf.from_dotlist([f"{key}={value}" for key, value in changes.items()]),
    )


def trainer(config: Any, workers: dict[Role, Any] | None = None, pools: Any = None, **options: Any) -> RayPPOTrainer:
    workers = workers or {Role.ActorRolloutRef: ActorRolloutRefWorker, Role.Critic: CriticWorker}
    pools = pools or ResourcePoolManager({"all": [2]}, dict.fromkeys(workers, "all"))
    return RayPPOTrainer(config, None, workers, pools, reward_fn=gsm8k.compute_score, **options)


def test_separate_pools_give_each_role_its_own_devices(folder: Path) -> None:
    workers: dict[Role, Any] = {
        Role.Actor: ActorRolloutRefWorker, Role.Rollout: ActorRolloutRefWorker, Role.Critic: CriticWorker,
        Role.RefPolicy: ActorRolloutRefWorker,
    }  # fmt: skip
    pools = ResourcePoolManager(
        {"train": [2], "sample": [3]},
        {Role.Actor: "train", Role.Critic: "train", Role.Rollout: "sample", Role.RefPolicy: "train"},
    )
    made = trainer(config_of(folder), workers, pools)
    job = made.job()
    assert {name: getattr(one, "total", None) for name, one in job.workloads.items()} == {
        "TRAINER": 1, "ACTOR": 2, "ROLLOUT": 3, "CRITIC": 2, "REFERENCE": 2,
    }  # fmt: skip
    assert (made.run.actor.ranks, made.run.rollout.engines, made.run.critic.ranks) == (2, 3, 2)


def test_settings_come_from_the_keys(folder: Path) -> None:
    made = trainer(config_of(folder)).run
    assert isinstance(made.algorithm, PPO)
    assert (made.algorithm.lam, made.algorithm.kl, made.actor.epochs, made.train) == (1.0, 0.001, 2, "fsdp2")
    assert (made.devices_per_node, made.batch_size, made.rollout.max_tokens, made.critic.lr) == (0, 32, 1, 0.01)
    assert made.critic.epochs == 2, "in verl, the critic has the actor's epochs unless it has its own"
    assert trainer(config_of(folder, **{"critic.ppo_epochs": 3})).run.critic.epochs == 3
    grpo = trainer(
        config_of(
            folder, **{"algorithm.adv_estimator": "grpo", "algorithm.kl_ctrl": "null", "actor_rollout_ref.rollout.n": 5}
        ),
        {Role.ActorRollout: ActorRolloutRefWorker},
    ).run
    assert isinstance(grpo.algorithm, GRPO) and grpo.algorithm.samples == 5


def test_epochs_become_steps(folder: Path) -> None:
    from transformers import AutoTokenizer

    workers: dict[Role, Any] = {Role.ActorRolloutRef: ActorRolloutRefWorker, Role.Critic: CriticWorker}
    made = RayPPOTrainer(
        config_of(folder, **{"trainer.total_training_steps": "null", "trainer.total_epochs": 3}),
        AutoTokenizer.from_pretrained(folder / "model"), workers,
        ResourcePoolManager({"all": [1]}, dict.fromkeys(workers, "all")), reward_fn=gsm8k.compute_score,
    )  # fmt: skip
    assert made.run.steps == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"actor_rollout_ref.actor.strategy": "megatron", "critic.strategy": "megatron"}, "no Megatron-LM engine"),
        ({"actor_rollout_ref.actor.strategy": "tpu", "critic.strategy": "tpu"}, "strategy='tpu'"),
        ({"algorithm.adv_estimator": "astrology"}, "adv_estimator='astrology'"),
        # verl's own: only the best response of a group has an advantage, its distance to the second best.
        ({"algorithm.adv_estimator": "grpo_passk"}, "adv_estimator='grpo_passk'"),
    ],
)
def test_what_there_is_not_is_named(folder: Path, changes: dict[str, str], said: str) -> None:
    with pytest.raises(NotImplementedError, match=said):
        trainer(config_of(folder, **changes))


def test_megatron_groups_say_what_is_missing(folder: Path) -> None:
    with pytest.raises(NotImplementedError, match="NVMegatronRayWorkerGroup: rlmesh has no Megatron-LM engine"):
        trainer(config_of(folder), ray_worker_group_cls=NVMegatronRayWorkerGroup)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"critic.strategy": "ddp"}, "critic.strategy='ddp' must be"),
        ({"actor_rollout_ref.actor.ppo_mini_batch_size": 9}, "ppo_mini_batch_size=9 must divide"),
        ({"data.train_files": "null"}, "data.train_files is missing"),
        ({"trainer.total_training_steps": "null"}, "trainer.total_training_steps is missing"),
        ({"actor_rollout_ref.rollout.name": "sglang"}, "rollout.name='sglang'"),
        ({"reward_model.enable": "true"}, "no Role.RewardModel"),
        ({"actor_rollout_ref.actor.optim.lr": "fast"}, "actor.lr='fast'"),
    ],
)
def test_wrong_configurations_are_refused(folder: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        trainer(config_of(folder, **changes))


def test_wrong_roles_are_refused(folder: Path) -> None:
    workers: dict[Role, Any] = {Role.Actor: ActorRolloutRefWorker, Role.Critic: ActorRolloutRefWorker}
    with pytest.raises(UsageError) as raised:
        trainer(config_of(folder), workers, ResourcePoolManager({"all": [1]}, {Role.Actor: "all"}))
    text = str(raised.value)
    assert "needs Role.ActorRollout" in text and "no pool for Role.Critic" in text
    assert "ActorRolloutRefWorker cannot be Role.Critic" in text


def test_an_estimator_that_needs_a_critic_is_refused_without_one(folder: Path) -> None:
    with pytest.raises(UsageError, match="adv_estimator='gae' needs a critic: add"):
        trainer(config_of(folder), {Role.ActorRollout: ActorRolloutRefWorker})


def test_a_divergence_needs_a_reference(folder: Path) -> None:
    workers: dict[Role, Any] = {Role.ActorRollout: ActorRolloutRefWorker, Role.Critic: CriticWorker}
    with pytest.raises(UsageError, match=r"the KL divergence needs a reference: add Role\.RefPolicy"):
        trainer(config_of(folder), workers)


def test_a_reward_model_is_named_and_switched_on(folder: Path) -> None:
    workers: dict[Role, Any] = {Role.ActorRolloutRef: ActorRolloutRefWorker, Role.Critic: CriticWorker}
    workers[Role.RewardModel] = RewardModelWorker
    with pytest.raises(UsageError, match=r"Role\.RewardModel, but reward_model\.enable is not set"):
        trainer(config_of(folder), workers)
    with pytest.raises(UsageError, match=r"reward_model\.model\.path is missing"):
        trainer(config_of(folder, **{"reward_model.enable": "true", "reward_model.model.path": "null"}), workers)


def test_unread_keys_are_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    changes = {"actor_rollout_ref.actor.fsdp_config.offload": "true", "trainer.default_local_dir": "here"}
    trainer(config_of(folder, **changes))
    assert "change nothing here: data.tokenizer, actor_rollout_ref.actor.fsdp_config.offload" in caplog.text
    assert "trainer.default_local_dir" in caplog.text


def test_plain_objects_are_configurations_too(folder: Path) -> None:
    from omegaconf import OmegaConf

    def objects(given: Any) -> Any:
        return SimpleNamespace(**{k: objects(v) for k, v in given.items()}) if isinstance(given, dict) else given

    config = OmegaConf.to_container(config_of(folder))
    assert trainer(objects(config)).run == trainer(config).run


def test_roles_are_open() -> None:
    role_of: Any = Role
    assert [role.name for role in Role][:7] == [
        "Actor", "Rollout", "ActorRollout", "Critic", "RefPolicy", "RewardModel", "ActorRolloutRef",
    ]  # fmt: skip
    assert (Role.Critic.value, role_of(3), Role["Critic"]) == (3, Role.Critic, Role.Critic)

    class MyRole(Role):
        Judge: Any = 9

    assert MyRole.Actor is Role.Actor and MyRole.Judge.value == 9 and not hasattr(Role, "Judge")
    assert isinstance(MyRole.Judge, Role) and MyRole.Judge in MyRole
    teacher = MyRole.extend("Teacher")
    assert teacher is MyRole["Teacher"] and teacher.value == 10
    with pytest.raises(UsageError, match="has a role 'Teacher' already"):
        MyRole.extend("Teacher")
    assert pickle.loads(pickle.dumps(Role.RefPolicy)) is Role.RefPolicy
    assert {Role.Actor: 1}[Role.Actor] == 1 and Role.Actor != Role.Critic


def test_workers_are_roles() -> None:
    from rlmesh.rl.roles.critic import CriticRole
    from rlmesh.rl.roles.reward import RewardRole

    assert issubclass(CriticWorker, CriticRole) and issubclass(RewardModelWorker, RewardRole)
