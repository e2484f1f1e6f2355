"""The parts of the PPO example, each alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import grpo_model
import numpy as np
import pytest
from ppo import remote_call
from ppo.common import exact_match
from ppo.ppo_reward import RewardModelRayActor
from ppo.utils.experience_maker import SamplesGenerator

from rlmesh.rl import Sample, SamplingParams
from rlmesh.rl.rewards import Response
from rlmesh.rl.types import Episode, Turn
from tests.examples.conftest import EXAMPLES

PPO = EXAMPLES / "ppo"


# Model and data


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_data_splits_without_overlap_and_follows_from_the_seed(tmp_path: Path) -> None:
    grpo_model.make(tmp_path / "tiny", accuracy=0.0)
    train, validation = (rows(tmp_path / "tiny" / f"{name}.jsonl") for name in ("train", "validation"))
    assert (len(train), len(validation)) == (32_512, 256)
    assert len({row["prompt"] for row in [*train, *validation]}) == 8**5
    assert all(row["prompt"] == row["ground_truth"][::-1] + ">" for row in [*train, *validation])
    assert [row["prompt"][:-1] for row in validation] == grpo_model.words(0)["validation"]
    assert grpo_model.words(0) != grpo_model.words(1)


def test_the_tokenizer_has_one_token_per_character_and_knows_no_others() -> None:
    tokenizer = grpo_model.build_tokenizer()
    assert len(tokenizer) == len(grpo_model.VOCABULARY) == 46
    assert tokenizer.convert_ids_to_tokens([tokenizer.pad_token_id, tokenizer.eos_token_id]) == ["<pad>", "<end>"]
    assert "".join(tokenizer.convert_ids_to_tokens(tokenizer("bdaeh>")["input_ids"])) == "bdaeh>"
    with pytest.raises(Exception, match=r"\[UNK\]"):
        tokenizer("Ä")


def test_a_model_that_does_not_learn_is_told(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"an accuracy of 0\.00 in 5 steps, not 1\.00"):
        grpo_model.warm_up(
            grpo_model.build_model(0), grpo_model.build_tokenizer(), grpo_model.words(0)["train"],
            seed=0, accuracy=1.0, most_steps=5,
        )  # fmt: skip


def test_a_folder_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(OSError, match="mine"):
        grpo_model.make(tmp_path / "mine", accuracy=0.0)
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "letter.txt"]


# Reward

ANSWERS = [("headb", True, 1), ("h e a d b", True, 1), ("headb", False, 0), ("heada", True, 0), ("head", True, 0),
           ("headbb", True, 0), ("", True, 0)]  # fmt: skip


def response(text: str, ended: bool) -> Response:
    turn = Turn(np.asarray([5], np.int32), "policy", np.zeros(1, np.float32), version_spans=((0, 0, 1),))
    episode = Episode((Turn.said([3]), turn), finish_reason="stop" if ended else "length")
    return Response([5], text, "bdaeh>", episode)


@pytest.mark.parametrize(("text", "ended", "score"), ANSWERS)
def test_only_the_exact_answer_ended_by_the_policy_scores(text: str, ended: bool, score: float) -> None:
    assert exact_match(response(text, ended), "headb") == score


def test_the_reward_role_scores_a_batch() -> None:
    texts, ended, scores = zip(*ANSWERS, strict=True)
    assert RewardModelRayActor().forward(texts, ended, ["headb"] * len(texts)) == list(scores)


# Experience


def test_samples_of_the_engines_become_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(prompts: list[list[int]], params: SamplingParams) -> list[Sample]:
        assert params.max_tokens == 3
        return [Sample.of(prompt, [7, 1], [-0.5, -0.25], 4) for prompt in prompts]

    monkeypatch.setattr(remote_call, "vllm_generate", generate)
    episodes = SamplesGenerator().generate_samples([[5, 6], [8]], SamplingParams(3))
    assert [(e.ids.tolist(), e.mask.tolist(), e.policy_version) for e in episodes] == [
        ([5, 6, 7, 1], [False, False, True, True], 4),
        ([8, 7, 1], [False, True, True], 4),
    ]


def test_texts_are_scored_by_the_reward_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_call, "reward_forward", RewardModelRayActor().forward)
    samples = [response(text, ended) for text, ended, _ in ANSWERS]
    assert SamplesGenerator().score(samples, ["headb"] * len(samples)) == [score for _, _, score in ANSWERS]


# Submission


def python(*arguments: str) -> str:
    """What a Python process with these arguments prints."""
    root = EXAMPLES.parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (root, root / "launcher")))}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True).stdout


def dry_run(*options: str) -> dict[str, Any]:
    return cast("dict[str, Any]", json.loads(python(str(PPO / "main.py"), "--dry_run", *options)))


def test_a_dry_run_prints_the_job() -> None:
    job = dry_run("--seed", "3", "--skip_node_check", "--steps", "20", "--set", "actor.lr=2e-4")
    described = {role: (w["entry_point"], w["total"]) for role, w in job["workloads"].items()}
    assert described == {
        "TRAINER": ("ppo.ppo_trainer.PPOTrainerActor", 1),
        "ACTOR": ("ppo.ppo_actor.PolicyModelActor", 2),
        "CRITIC": ("ppo.ppo_critic.CriticModelRayActor", 1),
        "ROLLOUT": ("ppo.ppo_rollout.VLLMActor", 2),
        "REFERENCE": ("ppo.ppo_reference.PPOReferenceActor", 1),
        "REWARD": ("ppo.ppo_reward.RewardModelRayActor", 1),
    }
    assert job["workloads"]["ACTOR"]["comm_pre_check"] is False
    settings = job["user_config"]
    assert (settings["seed"], settings["steps"], settings["actor"]["lr"]) == (3, 20, 2e-4)


def test_without_a_kl_penalty_there_is_no_reference_role() -> None:
    job = dry_run("--init_kl_coef", "0", "--vllm_num_engines", "3")
    assert "REFERENCE" not in job["workloads"]
    assert job["workloads"]["ROLLOUT"]["total"] == 3


def test_submitting_needs_no_torch() -> None:
    program = (
        f"import runpy, sys; sys.argv = ['main.py', '--dry_run']; runpy.run_path({str(PPO / 'main.py')!r}, "
        "run_name='__main__'); print('torch' in sys.modules)"
    )
    assert python("-c", program).splitlines()[-1] == "False"


def test_the_example_is_short() -> None:
    files = [path for path in PPO.rglob("*") if path.suffix in (".py", ".sh")]
    assert sum(len(path.read_text().splitlines()) for path in files) <= 250
