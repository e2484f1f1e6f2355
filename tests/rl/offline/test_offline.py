"""Trainings on given responses, and distillation from a teacher: what is wrong is said, and the examples learn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

from rlmesh.errors import UsageError
from rlmesh.rl.algorithms import DPO, GRPO, PPO, SFT, OnPolicyDistillation, RewardModelling
from rlmesh.rl.checkpoints.store import saved_step
from rlmesh.rl.data.dataset import Prompt
from rlmesh.rl.data.loader import Drawn
from rlmesh.rl.offline.responses import offline_groups, response_texts
from rlmesh.rl.trainers.run import Run, RunResult
from rlmesh.rl.trainers.settings import ActorSettings, CriticSettings, LoraSettings, ReferenceSettings, RolloutSettings
from tests.rl.checkpoints.runs import make_model
from tests.rl.run_job import ROWS, is_a

EXAMPLES = Path(__file__).parents[3] / "examples" / "trainings"
PAIRS = [{"prompt": "ab>", "chosen": "a", "rejected": "b"}] * 4


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    for name in ("sft", "dpo", "reward_model", "distillation", "behaviour_cloning", "tiny_model"):
        sys.modules.pop(name, None)


def make(model: Path, **changes: Any) -> Run:
    settings: dict[str, Any] = {"model": str(model), "data": PAIRS, "algorithm": DPO(), "batch_size": 2, "steps": 2}
    return Run(**settings | changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rewards": [is_a]}, "rewards: DPO learns from the responses of the data, which are not scored"),
        ({"actor": ActorSettings(epochs=2, minibatches=2)}, "actor.epochs and actor.minibatches must be 1"),
        ({"placement": "fused"}, "DPO samples nothing"),
        ({"algorithm": GRPO()}, "rewards: give at least one reward"),
        (
            {"rollout": RolloutSettings(temperature=0.7)},
            "rollout.temperature=0.7: DPO samples nothing, and its loss is",
        ),
        ({"reference": "big"}, "reference='big' must be"),
        (
            {"algorithm": GRPO(), "rewards": [is_a], "reference": ReferenceSettings(model="big")},
            "reference.model='big': GRPO measures no divergence",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(tiny: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as raised:
        make(tiny, **changes)
    assert said in str(raised.value)


def test_data_without_responses_and_teachers_with_other_tokens_are_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a row has no text as 'response', which the algorithm learns from; its colum"):
        make(tiny, algorithm=SFT()).submit()
    from transformers import AutoTokenizer

    from tests.rl.tiny import make_config, make_tokenizer

    make_tokenizer(tmp_path, words=["<pad>", "<end>", *"xyz", ">"])
    make_config().save_pretrained(tmp_path)
    teacher = ReferenceSettings(model=str(tmp_path))
    with pytest.raises(UsageError, match=r"reference\.model=.* has other tokens than model="):
        make(tiny, algorithm=OnPolicyDistillation(), reference=teacher).submit()
    critic = CriticSettings(model=str(tmp_path))
    with pytest.raises(UsageError, match=r"critic\.model=.* has other tokens than model="):
        make(tiny, algorithm=PPO(), rewards=[is_a], critic=critic).submit()
    more = AutoTokenizer.from_pretrained(tiny)
    more.add_tokens(["z"])  # a critic may have further tokens
    more.save_pretrained(tmp_path)
    rollout = RolloutSettings(max_tokens=8)
    make(tiny, algorithm=PPO(), rewards=[is_a], critic=critic, data=ROWS, rollout=rollout).check()
    for path in tmp_path.glob("tokenizer*"):
        path.unlink()
    make(tiny, algorithm=PPO(), rewards=[is_a], critic=critic, data=ROWS, rollout=rollout).check()  # weights alone


def test_the_roles_of_a_job_are_those_that_the_algorithm_uses(tiny: Path) -> None:
    roles = {
        type(algorithm).__name__: set(make(tiny, algorithm=algorithm).job().workloads)
        for algorithm in (SFT(), DPO(), RewardModelling(), OnPolicyDistillation())
    }
    assert roles == {
        "SFT": {"TRAINER", "ACTOR"},
        "DPO": {"TRAINER", "ACTOR", "REFERENCE"},
        "RewardModelling": {"TRAINER", "ACTOR"},
        "OnPolicyDistillation": {"TRAINER", "ACTOR", "ROLLOUT", "REFERENCE"},
    }


def test_responses_come_from_columns_messages_and_extra_info() -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]
    assert response_texts({"chosen": messages, "extra_info": {"rejected": "no"}}, "pairs") == ["yes", "no"]
    with pytest.raises(UsageError, match="no text as 'rejected'"):
        response_texts({"chosen": "yes", "rejected": 3}, "ranked")


def test_a_response_ends_with_the_end_token_and_a_ranked_one_has_a_single_target(tiny: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    prompt = np.asarray(tokenizer("ab>")["input_ids"], np.int32)
    drawn = [Drawn((0, 0), Prompt(prompt, {"prompt": "ab>", "chosen": "abc", "rejected": "b<end>"}, 0))]
    (pair,) = offline_groups(drawn, tokenizer, "pairs", 3)
    letters = tokenizer.convert_ids_to_tokens
    assert [letters(one.turns[1].ids.tolist()) for one in pair.episodes] == [["a", "b", "c"], ["b", "<end>"]]
    assert [one.finish_reason for one in pair.episodes] == ["length", "stop"]
    first, second = offline_groups(drawn, tokenizer, "ranked", 10)
    assert letters(first.episodes[0].prompt_ids.tolist()) == ["a", "b", ">", "a", "b", "c", "<end>"]
    assert first.episodes[0].mask.sum() == second.episodes[0].mask.sum() == 1


CHATML = (
    "{% for message in messages %}{{ message['content'] }}>{% if message['role'] == 'assistant' %}{{ eos_token }}h"
    "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("prompt", ["ab>", [{"role": "user", "content": "ab"}]])
@pytest.mark.parametrize("pad", ["<pad>", "<end>"])
def test_a_reward_model_is_trained_at_the_token_at_which_it_is_read(tmp_path: Path, prompt: Any, pad: str) -> None:
    import torch
    from transformers import AutoTokenizer

    from rlmesh.rl.engines.training.packed import PackedInputs, prepare
    from rlmesh.rl.packing import pack
    from rlmesh.rl.rewards.model import Conversation, RewardModel
    from rlmesh.rl.roles.reward import ModelScorer
    from rlmesh.rl.roles.value_head import value_model
    from rlmesh.rl.types import Score
    from tests.rl.tiny import make_reward_model

    make_reward_model(tmp_path, template=CHATML)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.pad_token = pad
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"pad_token_id": tokenizer.pad_token_id}))
    scorer, model = ModelScorer(RewardModel(str(tmp_path))), value_model(str(tmp_path)).eval()
    prepare(model)
    row = {"prompt": prompt, "chosen": "cde", "rejected": "f"}
    drawn = [Drawn((0, 0), Prompt(np.asarray([2, 3, 10], np.int32), row, 0))]
    groups = offline_groups(drawn, tokenizer, "ranked", 20, pad=tokenizer.pad_token_id)
    episodes = [group.episodes[0] for group in groups]
    asked = [
        Conversation(one.ids, prompt, str(row[side]), True, 1)
        for one, side in zip(episodes, ("chosen", "rejected"), strict=True)
    ]
    scored = scorer.score(asked)
    with torch.no_grad():
        (whole,) = pack(episodes, token_budget=100).by_rank[0]
        trained = model(packed=PackedInputs(whole, "cpu")).tolist()
    assert [one.value for one in scored if isinstance(one, Score)] == pytest.approx(
        [value for _, value in sorted(zip(whole.rows.tolist(), trained, strict=True))], abs=1e-5
    )


# The examples


def learned(run: Run, run_dir: Path) -> tuple[RunResult, list[dict[str, float]]]:
    result = run.here(run_dir=run_dir)
    reports = [json.loads(line)["metrics"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return result, reports


def values(reports: list[dict[str, float]], name: str) -> list[float]:
    return [one[name] for one in reports if name in one]


@pytest.mark.slow
def test_pairs_are_trained_without_a_ratio_also_if_the_model_has_dropout(tmp_path: Path) -> None:
    """A ratio between two passes that differ would be clipped, and the gradient would not be that of the loss."""
    run = make(make_model(tmp_path / "model"), actor=ActorSettings(lr=1e-3))
    _, reports = learned(run, tmp_path / "run")
    assert values(reports, "ratio_mean") == [1.0, 1.0] and values(reports, "clip_fraction") == [0.0, 0.0]
    assert values(reports, "grad_norm")[0] > 0


@pytest.mark.slow
def test_an_adapter_of_a_reward_model_is_of_its_head_too(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    lora = LoraSettings(rank=4, target_modules=["q_proj", "v_proj"])
    run = make(tiny, algorithm=RewardModelling(), actor=ActorSettings(lr=1e-2, lora=lora), steps=4)
    result, reports = learned(run, tmp_path)
    assert values(reports, "critic/grad_norm")[0] > 0 and values(reports, "margin")[-1] > 0
    assert (result.model / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [SFT(), DPO(), RewardModelling()], ids=["sft", "dpo", "reward model"])
def test_a_run_goes_on_from_its_checkpoint(tiny: Path, tmp_path: Path, algorithm: Any) -> None:
    rows = [dict(row, response="a") for row in PAIRS]
    first = make(tiny, data=rows, algorithm=algorithm, actor=ActorSettings(lr=1e-2), save_every=1)
    first.here(run_dir=tmp_path)
    assert saved_step(tmp_path) == first.steps == 2
    more, _ = learned(replace(first, steps=4, resume="must"), tmp_path)
    whole, _ = learned(replace(first, steps=4), tmp_path / "whole")
    name = "model.safetensors"
    assert (more.model / name).read_bytes() == (whole.model / name).read_bytes()


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunResult, list[dict[str, float]]]:
    """A model of twice the width, fine-tuned by the example."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        sft, tiny_model = import_module("sft"), import_module("tiny_model")
    finally:
        sys.path.remove(str(EXAMPLES))
    folder = tmp_path_factory.mktemp("teacher")
    return learned(sft.training(str(tiny_model.make(folder / "large", 64))), folder / "run")


@pytest.mark.slow
def test_fine_tuning_learns_to_repeat_words(teacher: tuple[RunResult, list[dict[str, float]]]) -> None:
    result, reports = teacher
    assert values(reports, "val/nll")[0] > 2 and result.metrics["val/nll"] < 0.4
    assert not (result.run_dir / "samples").exists()


@pytest.mark.slow
def test_distillation_brings_a_small_model_nearer_to_its_teacher(
    tmp_path: Path, teacher: tuple[RunResult, list[dict[str, float]]]
) -> None:
    distillation, tiny_model = import_module("distillation"), import_module("tiny_model")

    run = distillation.training(str(tiny_model.make(tmp_path / "small")), str(teacher[0].model))
    _, reports = learned(run, tmp_path / "run")
    found = values(reports, "teacher_kl")
    assert found[-1] < 0.7 * found[0]


@pytest.mark.slow
def test_preferences_are_learned(tiny: Path, tmp_path: Path) -> None:
    dpo = import_module("dpo")

    result, reports = learned(dpo.training(str(tiny)), tmp_path / "run")
    assert values(reports, "val/dpo/loss")[0] == pytest.approx(np.log(2))
    assert result.metrics["val/dpo/accuracy"] > 0.9 and result.metrics["dpo/loss"] < 0.1


@pytest.mark.slow
def test_a_reward_model_is_learned_and_scores_as_it_was_trained(tiny: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    reward_model = import_module("reward_model")
    result, _ = learned(reward_model.training(str(tiny)), tmp_path / "run")
    assert result.metrics["val/accuracy"] > 0.8
    model = AutoModelForSequenceClassification.from_pretrained(result.model)
    tokenizer = AutoTokenizer.from_pretrained(result.model)
    margins = []
    for row in reward_model.ROWS[3::4]:
        ids = [tokenizer(f"{row['prompt']}{row[side]}<end>", return_tensors="pt").input_ids for side in PAIRS[0]]
        with torch.no_grad():
            _, chosen, rejected = (float(model(one).logits) for one in ids)
        margins.append(chosen - rejected)
    assert np.mean(margins) == pytest.approx(result.metrics["val/margin"], abs=1e-4)
    assert np.mean([margin > 0 for margin in margins]) == result.metrics["val/accuracy"]


@pytest.mark.slow
def test_good_responses_are_imitated(tiny: Path, tmp_path: Path) -> None:
    behaviour_cloning = import_module("behaviour_cloning")

    result, reports = learned(behaviour_cloning.training(str(tiny)), tmp_path / "run")
    assert result.metrics["reward_mean"] > values(reports, "reward_mean")[0] + 0.4


@pytest.mark.slow
def test_a_job_on_two_ranks_gives_the_numbers_of_one_process(tiny: Path, tmp_path: Path) -> None:
    run = replace(import_module("sft").training(str(tiny)), steps=6)
    alone = run.here(run_dir=tmp_path / "here").metrics
    script = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
from dataclasses import replace
import sft
from rlmesh.rl.trainers.settings import ActorSettings
if __name__ == "__main__":
    actor = ActorSettings(lr=5e-3, warmup_steps=5, ranks=2)
    replace(sft.training({str(tiny)!r}), steps=6, actor=actor).submit("sft", view="none", run_dir="job")
"""
    (tmp_path / "job.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "job.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    together = json.loads((tmp_path / "job" / "summary.json").read_text())["metrics"]
    for name in ("val/nll", "policy_loss", "grad_norm"):
        assert together[name] == pytest.approx(alone[name], rel=1e-4)
