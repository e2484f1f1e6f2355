"""`Run`: its settings, their faults, and a training from the first to the last step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlmesh.errors import UsageError
from rlmesh.rl.algorithms import GRPO, PPO
from rlmesh.rl.rewards import Reward
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import ActorSettings, RolloutSettings, apply_overrides
from tests.rl import run_job
from tests.rl.run_job import ROWS, is_a


def settings(**changes: Any) -> dict[str, Any]:
    return {"model": "nowhere", "data": "nowhere.jsonl", "rewards": [is_a], "algorithm": GRPO(samples=4), **changes}


def test_all_faults_of_the_settings_come_in_one_message() -> None:
    with pytest.raises(UsageError) as raised:
        Run(
            **settings(
                steps=0, batch_size="16", pipeline="one-step-off", train="fsdp", rewards=[],
                actor=ActorSettings(lr=-1.0, ranks=0), rollout=RolloutSettings(temperature=0.0),
            )
        )  # fmt: skip
    text = str(raised.value)
    for fault in (
        "steps=0 must be", "batch_size='16' must be a whole number", "pipeline='one-step-off': there is 'sync'",
        "train='fsdp'", "at least one reward", "actor.lr=-1.0", "actor.ranks=0", "rollout.temperature=0.0",
    ):  # fmt: skip
        assert fault in text


def test_an_algorithm_that_needs_a_critic_is_refused() -> None:
    with pytest.raises(UsageError, match="PPO needs a critic, which Run does not start yet"):
        Run(**settings(algorithm=PPO()))


def test_overrides_change_settings_and_sections() -> None:
    run = apply_overrides(
        Run(**settings(rollout="transformers")),
        ["actor.lr=2e-6", "steps=7", "train=fsdp2", "rollout.max_tokens=9", "algorithm.samples=6", "actor.ranks=2"],
    )
    assert (run.actor.lr, run.steps, run.train, run.rollout.max_tokens) == (2e-6, 7, "fsdp2", 9)
    assert (run.algorithm.samples, run.actor.ranks) == (6, 2)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "actor.learning_rte=1",
            "there is no setting 'actor.learning_rte'; did you mean actor.lr, which is learning_rate",
        ),
        ("actor.warmup_step=1", "did you mean actor.warmup_steps?"),
        ("lr=1", "did you mean actor.lr?"),
        ("rollout.n=0", "did you mean algorithm.samples, which is rollout.n elsewhere?"),
        ("steps=many", "steps='many' must be a whole number"),
        ("actor.lr=true", "actor.lr=True must be a number"),
        ("train=megatron", "train='megatron' must be one of 'ddp'"),
        ("steps", "'steps' is no setting: write section.key=value"),
        ("algorithm.samples=0", "GRPO(samples=0)"),
    ],
)
def test_overrides_that_are_wrong_name_the_right_key(override: str, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        apply_overrides(Run(**settings()), [override])
    assert said in str(raised.value)


def test_from_args_reads_the_command_line() -> None:
    run = Run.from_args(["--set", "steps=3", "--set", "actor.lr=0.5"], **settings())
    assert (run.steps, run.actor.lr) == (3, 0.5)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers and its tokenizer of letters."""
    pytest.importorskip("transformers")
    import torch
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    words = ["<pad>", "<end>", *"abcdefgh", ">"]
    tokenizer = Tokenizer(WordLevel({word: place for place, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def small(tiny: Path, **changes: Any) -> Run:
    return Run(
        **settings(
            model=str(tiny), data=ROWS[:32], batch_size=8, steps=4, algorithm=GRPO(samples=4),
            actor=ActorSettings(lr=1e-2), rollout=RolloutSettings(max_tokens=4),
        )
        | changes
    )  # fmt: skip


def test_a_right_run_passes_its_check_and_is_a_job(tiny: Path) -> None:
    run = small(
        tiny, algorithm=GRPO(samples=4, kl=0.1), actor=ActorSettings(ranks=2), rollout=RolloutSettings(engines=3)
    )
    run.check()
    job = run.job()
    assert {name: getattr(one, "total", None) for name, one in job.workloads.items()} == {
        "TRAINER": 1, "ACTOR": 2, "ROLLOUT": 3, "REFERENCE": 1,
    }  # fmt: skip


def wrong_length(responses: list[str]) -> list[float]:
    return [0.0] * (len(responses) + 1)


def raises(response: str) -> float:
    raise KeyError("answer")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "/nowhere/model"}, "model='/nowhere/model'"),
        ({"data": "/nowhere.parquet"}, "data: "),
        ({"data": ROWS[:30], "max_prompt_tokens": 1}, "30 too long"),
        ({"data": ROWS[:3], "batch_size": 4}, "3 prompts are too few for a batch of 4"),
        ({"data": [{"prompt": [{"role": "user", "content": "a"}]}]}, "template"),
        ({"data": [{"text": "a"}]}, "row 0 has no column 'prompt'"),
        ({"rewards": [wrong_length]}, "returned list of length 2 for 1 responses"),
        ({"rewards": [raises]}, "reward 'raises' fails on row 0"),
        ({"rewards": [Reward(is_a), raises], "validation": "/nowhere"}, "validation: "),
    ],
)
def test_faults_are_told_before_any_process_starts(tiny: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as raised:
        small(tiny, **changes).submit()
    assert said in str(raised.value) and "the run cannot start" in str(raised.value)


def test_a_model_without_a_tokenizer_is_told(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    with pytest.raises(UsageError, match="has no tokenizer"):
        small(tmp_path).check()


def reported(run_dir: Path) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if "reward_mean" in entry.get("metrics", entry):
            found[entry["step"]] = entry.get("metrics", entry)
    return found


@pytest.mark.slow
def test_a_run_learns_and_leaves_its_policy(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.chdir(tmp_path)
    run = small(tiny, steps=12, actor=ActorSettings(lr=1e-2, ranks=2), validation=ROWS[:6], algorithm=GRPO(8, kl=0.001))
    result = run.submit("learns", view="plain")
    steps = reported(result.run_dir)
    assert sorted(steps) == list(range(1, 13))
    assert steps[12]["reward_mean"] > steps[1]["reward_mean"] + 0.2
    assert all(step["drift_alarm"] == 0 and abs(step["ratio_mean"] - 1) < 1e-3 for step in steps.values())
    assert result.metrics["val/reward_mean"] > 0.5
    model = AutoModelForCausalLM.from_pretrained(result.model)
    tokenizer = AutoTokenizer.from_pretrained(result.model)
    ids = tokenizer("bb>", return_tensors="pt").input_ids
    text = tokenizer.decode(model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :])
    assert text.count("a") >= 2, text


def curve(tiny: Path, folder: Path, *options: str) -> dict[int, float]:
    """The mean reward of each step of ``run_job.py``, launched with these options."""
    folder.mkdir()
    command = [sys.executable, "-m", "rlmesh.cli.main", "launch", "--view", "plain", "--run-dir", "run", *options]
    done = subprocess.run(
        [*command, run_job.__file__, str(tiny)], cwd=folder, capture_output=True, text=True, timeout=240,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return {step: metrics["reward_mean"] for step, metrics in reported(folder / "run").items()}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["ACTOR:0", "ROLLOUT:0", "TRAINER:0"])
def test_a_killed_member_costs_steps_and_changes_nothing(tiny: Path, tmp_path: Path, target: str) -> None:
    calm = curve(tiny, tmp_path / "calm")
    killed = curve(tiny, tmp_path / "killed", "--chaos", f"{target}@step=5")
    assert sorted(calm) == sorted(killed) == list(range(1, 9))
    # Sampling and training are functions of the step, so the curve goes on as if nothing had happened.
    assert killed == pytest.approx(calm, abs=1e-6)
