"""The parts of the PPO example, each alone."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from ppo import data, experience_maker, ppo_trainer, trainer
from ppo.common import Batch, Experience, left_pad, right_pad, write_atomically
from ppo.config import PPOConfig
from ppo.model import END_ID, PAD_ID, VOCABULARY, build_model, build_tokenizer, encode
from ppo.ppo_reward import RewardModelActor, exact_match
from ppo.ppo_rollout import RolloutActor

from rlmesh.errors import WeightsNotReady
from rlmesh.job.restarts import RestartEvent
from rlmesh.rl import reference
from rlmesh.rl.engines.rollout import Sample, SamplingParams
from rlmesh.rl.engines.training.forward import response_log_probs
from rlmesh.rl.engines.transformers import TransformersEngine, sample_batch
from tests.examples.conftest import EXAMPLES

PPO = EXAMPLES / "ppo"


# Data


def test_the_data_script_is_deterministic_and_splits_without_overlap(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        python(str(PPO / "data.py"), "--out", str(tmp_path / folder), "--seed", "3")
    data.write(tmp_path / "other", seed=4)
    train, validation = (data.read(tmp_path / "a" / f"{name}.parquet") for name in ("train", "validation"))
    assert data.read(tmp_path / "b" / "train.parquet") == train
    assert data.read(tmp_path / "b" / "validation.parquet") == validation
    assert data.read(tmp_path / "other" / "validation.parquet") != validation
    assert (len(train), len(validation)) == (32_512, 256)
    assert len({row.prompt for row in [*train, *validation]}) == 8**5
    assert all(row.prompt == row.answer[::-1] + ">" for row in train[:100])
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["train.parquet", "validation.parquet"]


def test_an_epoch_has_every_row_at_most_once_and_each_epoch_its_own_order() -> None:
    rows = [data.Row(str(i), "") for i in range(10)]
    first, second, third, fourth = itertools.islice(data.batches(rows, 5, seed=1), 4)
    assert {row.prompt for row in [*first, *second]} == {row.prompt for row in rows}
    assert {row.prompt for row in [*third, *fourth]} == {row.prompt for row in rows}
    assert [*first, *second] != [*third, *fourth]
    assert next(data.batches(rows, 5, seed=1)) == first
    assert next(data.batches(rows, 5, seed=2)) != first
    with pytest.raises(ValueError, match="a batch of 11 rows cannot be drawn from 10"):
        next(data.batches(rows, 11, seed=1))


# Tokenizer and reward


def test_the_tokenizer_has_one_token_per_character_and_knows_no_others() -> None:
    tokenizer = build_tokenizer()
    assert len(tokenizer) == len(VOCABULARY) == 46
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD_ID, END_ID)
    (ids,) = encode(tokenizer, ["bdaeh>"])
    assert "".join(tokenizer.convert_ids_to_tokens(ids)) == "bdaeh>"
    with pytest.raises(Exception, match=r"\[UNK\]"):
        encode(tokenizer, ["Ä"])


@pytest.mark.parametrize(
    ("text", "ended", "score"),
    [
        ("headb", True, 1),
        ("headb", False, 0),
        ("heada", True, 0),
        ("head", True, 0),
        ("headbb", True, 0),
        ("", True, 0),
    ],
)
def test_only_the_exact_answer_ended_by_the_policy_scores(text: str, ended: bool, score: float) -> None:
    assert exact_match(text, ended, "headb") == score


def test_the_reward_role_reads_tokens() -> None:
    role = RewardModelActor()
    role.tokenizer = build_tokenizer()
    (right,) = encode(role.tokenizer, ["headb"])
    responses = [[*right, END_ID], right, [*right[:2], END_ID, *right[3:]], [END_ID], [PAD_ID, *right, END_ID]]
    assert role.forward(responses, ["headb"] * 5) == [1, 0, 0, 0, 0]


# Batches and sampling


def test_prompts_are_padded_left_and_responses_right() -> None:
    samples = [Sample.of([5, 6], [7, END_ID], [0, 0], 0), Sample.of([8], [9, 10, 11], [0, 0, 0], 0)]
    batch = Batch.of(samples, PAD_ID)
    assert batch.sequences.tolist() == [[5, 6, 7, END_ID, PAD_ID], [PAD_ID, 8, 9, 10, 11]]
    assert batch.attention_mask.tolist() == [[True] * 4 + [False], [False] + [True] * 4]
    assert batch.action_mask.tolist() == [[True, True, False], [True, True, True]]


def test_experience_splits_into_balanced_parts_that_add_up() -> None:
    columns = [torch.arange(10).reshape(5, 2) + i for i in range(7)]
    parts = Experience(*columns).split(3)
    assert [len(part) for part in parts] == [2, 2, 1]
    torch.testing.assert_close(torch.cat([part.returns for part in parts]), columns[-1])


def test_the_log_probs_of_sampling_are_those_of_training() -> None:
    model = build_model(0).eval()
    prompts = [[5, 6, 7], [8], [9, 10], [5, 6, 7]]  # of several lengths, so padded
    params = SamplingParams(max_tokens=12, temperature=0.7, seed=11)
    drawn = sample_batch(model, prompts, params, stop_token_ids=[END_ID], pad_token_id=PAD_ID)
    assert all(END_ID not in sample.token_ids[:-1] and 1 <= len(sample.token_ids) <= 12 for sample in drawn)

    prompt, attend = left_pad(prompts, PAD_ID)
    response, chosen = right_pad([sample.token_ids for sample in drawn], PAD_ID)
    tokens, mask = torch.cat([prompt, response], 1), torch.cat([attend, chosen], 1)
    with torch.no_grad():
        expected = response_log_probs(model, tokens, mask, chosen, temperature=0.7)
    for row, sample in enumerate(drawn):
        assert sample.log_probs == pytest.approx(expected[row, : len(sample.log_probs)].tolist(), abs=1e-4)


# Rollout engine


def engine(seed: int, version: int | None = 0) -> RolloutActor:
    role = RolloutActor()
    role.rank, role.engine = 0, TransformersEngine(build_model(seed).eval(), pad_token_id=PAD_ID, version=version)
    role.receive_weights(role.engine.sink, name=f"ROLLOUT:{seed}")
    return role


def test_an_engine_samples_with_the_version_of_its_weights() -> None:
    role = engine(0, version=5)
    params = SamplingParams(max_tokens=4, seed=3)
    assert [s.policy_version for s in role.generate([[5], [6]], params)] == [5, 5]


def test_an_engine_without_weights_says_so() -> None:
    role = engine(1, version=None)
    with pytest.raises(WeightsNotReady, match="ROLLOUT:1 has no weights to serve"):
        role.generate([[5]], SamplingParams(max_tokens=1))


# Experience

SAMPLES = [
    Sample.of([5, 6], [7, 8, END_ID], [-0.5, -0.1, -0.2], 4),
    Sample.of([5], [9, END_ID], [-1.0, -0.3], 4),
    Sample.of([6, 7], [10, 11, 12], [-0.7, -0.9, -0.4], 4, "length"),
]
MASK = np.array([[1, 1, 1], [1, 1, 0], [1, 1, 1]], dtype=np.bool_)
LOG_PROBS = np.array([[-0.5, -0.1, -0.2], [-1.0, -0.3, 0.0], [-0.7, -0.9, -0.4]])
REF_LOG_PROBS = np.array([[-0.4, -0.2, -0.2], [-1.5, -0.1, 0.0], [-0.7, -0.5, -0.6]])
VALUES = np.array([[0.2, 0.4, 0.6], [0.1, 0.3, np.nan], [0.5, 0.2, 0.1]])
SCORES = np.array([1.0, 0.0, 0.0])


@pytest.fixture
def answering_roles(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Roles that give the numbers above, without any process."""
    answers = {"reward": SCORES.tolist(), "actor": LOG_PROBS, "critic": VALUES, "reference": REF_LOG_PROBS}

    def answer(role: str) -> Any:
        value = answers[role]
        return value if isinstance(value, list) else list(torch.tensor(value, dtype=torch.float32))

    calls = experience_maker.remote_call
    monkeypatch.setattr(calls, "reward_forward", lambda tokens, wanted: answer("reward"))
    for role in ("actor", "critic", "reference"):
        monkeypatch.setattr(calls, f"{role}_forward", lambda batch, role=role: answer(role))
    return cast("dict[str, Any]", answers)


def test_experience_agrees_with_numpy(answering_roles: dict[str, Any]) -> None:
    config = PPOConfig(init_kl_coef=0.3, gamma=0.9, lam=0.8)
    made = experience_maker.make_experience(SAMPLES, ["a", "b", "c"], config, PAD_ID)
    kl = reference.kl_estimate(LOG_PROBS, REF_LOG_PROBS, MASK, "k1")
    rewards = reference.token_rewards(SCORES, kl, MASK, coefficient=0.3)
    advantages, returns = reference.gae(rewards, VALUES, MASK, gamma=0.9, lam=0.8)
    np.testing.assert_allclose(made.experience.returns, returns, atol=1e-6)
    np.testing.assert_allclose(made.experience.advantages, reference.masked_whiten(advantages, MASK), atol=1e-5)
    assert made.experience.action_mask.tolist() == MASK.tolist()
    assert made.metrics["reward_mean"] == pytest.approx(1 / 3)
    assert made.metrics["kl"] == pytest.approx(reference.masked_mean(kl, MASK), abs=1e-6)
    assert made.metrics["response_length"] == pytest.approx(8 / 3)


def test_without_a_penalty_no_reference_is_asked(answering_roles: dict[str, Any]) -> None:
    del answering_roles["reference"]
    made = experience_maker.make_experience(SAMPLES, ["a", "b", "c"], PPOConfig(init_kl_coef=0.0), PAD_ID)
    assert made.metrics["kl"] == 0


def test_engines_that_hold_other_weights_than_the_actor_are_noticed(answering_roles: dict[str, Any]) -> None:
    answering_roles["actor"] = LOG_PROBS + 0.2 * MASK
    with pytest.raises(RuntimeError, match="do not hold the same weights"):
        experience_maker.make_experience(SAMPLES, ["a", "b", "c"], PPOConfig(), PAD_ID)


@pytest.mark.parametrize("versions", [(4, 3), (3, 3), (5, 5)])
def test_samples_of_another_policy_version_are_refused(versions: tuple[int, int]) -> None:
    samples = [dataclasses.replace(SAMPLES[0], version_spans=[(version, 0, 3)]) for version in versions]
    with pytest.raises(RuntimeError, match=r"policy versions .*, expected 4 only"):
        experience_maker.require_version(samples, 4)
    experience_maker.require_version(SAMPLES, 4)


# Checkpoints


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "model.pt"
    write_atomically(path, lambda file: file.write(b"old"))

    def fail(file: Any) -> None:
        file.write(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


def test_a_process_killed_while_it_writes_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"old")
    program = (
        "import sys, time; from pathlib import Path; from ppo.common import write_atomically\n"
        "def write(file):\n"
        "    file.write(b'new'); file.flush(); print('writing', flush=True); time.sleep(60)\n"
        "write_atomically(Path(sys.argv[1]), write)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLES), *sys.path])},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
    assert path.read_bytes() == b"old"


# Settings and summary


def test_the_learning_rate_rises_and_falls() -> None:
    config = PPOConfig(steps=100, lr_warmup_steps=10, lr_final_share=0.1)
    shares = [config.lr_share(step) for step in range(100)]
    assert shares[0] == pytest.approx(0.1)
    assert max(shares) == shares[9] == pytest.approx(0.919)
    assert shares[9:] == sorted(shares[9:], reverse=True)
    assert config.lr_share(100) == pytest.approx(0.1)


def test_the_summary_has_both_ends_of_both_curves() -> None:
    history = [{"reward_mean": i / 10, "step_time_s": 2.0} for i in range(10)]
    history[9]["heldout_accuracy"] = 0.75
    summary = ppo_trainer.summarize(PPOConfig(seed=7), [{"heldout_accuracy": 0.25}, *history], 3)
    assert summary == pytest.approx(
        {
            "seed": 7,
            "steps": 10,
            "steps_lost": 3,
            "reward_first": 0.2,
            "reward_last": 0.7,
            "heldout_first": 0.25,
            "heldout_last": 0.75,
            "step_time_s": 2.0,
        }
    )


def python(*arguments: str) -> str:
    """What a Python process with these arguments prints."""
    root = EXAMPLES.parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (root, root / "launcher")))}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True).stdout


def dry_run(*options: str) -> dict[str, Any]:
    return cast("dict[str, Any]", json.loads(python(str(PPO / "main.py"), "--dry_run", *options)))


def test_a_dry_run_prints_the_job() -> None:
    job = dry_run("--seed", "3", "--skip_node_check", "--steps", "20")
    members = {role: workload["total"] for role, workload in job["workloads"].items()}
    assert members == {"TRAINER": 1, "ACTOR": 2, "CRITIC": 1, "ROLLOUT": 2, "REFERENCE": 1, "REWARD": 1}
    assert job["workloads"]["ACTOR"]["comm_pre_check"] is False
    assert (job["user_config"]["seed"], job["user_config"]["steps"]) == (3, 20)


def test_without_a_kl_penalty_there_is_no_reference_role() -> None:
    job = dry_run("--init_kl_coef", "0", "--rollout_num_engines", "3")
    assert "REFERENCE" not in job["workloads"]
    assert job["workloads"]["ROLLOUT"]["total"] == 3


def test_submitting_needs_no_torch() -> None:
    program = (
        f"import runpy, sys; sys.argv = ['main.py', '--dry_run']; runpy.run_path({str(PPO / 'main.py')!r}, "
        "run_name='__main__'); print('torch' in sys.modules)"
    )
    assert python("-c", program).splitlines()[-1] == "False"


class News:
    """What `current_worker` gives: news of restarts, one by one."""

    def __init__(self, *roles: str) -> None:
        self.roles = list(roles)

    def events(self, wait_s: float) -> tuple[Any, ...]:
        assert 0 < wait_s <= trainer.NEWS_S
        return (RestartEvent(self.roles.pop(0), (0,), "restarting", "member", (1,), "killed", 1, 0.0),)


@pytest.mark.parametrize(("roles", "expected"), [(["REWARD", "ROLLOUT", "ACTOR"], True), (["REWARD"] * 2, False)])
def test_news_of_other_restarts_may_come_before_that_of_the_learners(
    monkeypatch: pytest.MonkeyPatch, roles: list[str], expected: bool
) -> None:
    news, times = News(*roles), iter([0.0, *(0.1 * n for n in range(len(roles))), trainer.NEWS_S])
    monkeypatch.setattr(trainer, "current_worker", lambda: news)
    monkeypatch.setattr(trainer, "time", SimpleNamespace(monotonic=lambda: next(times)))
    assert trainer.learners_restarted() == expected
