"""`Run`: its settings, their faults, and a training from the first to the last step."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rlmesh.errors import UsageError
from rlmesh.rl.algorithms import DPO, GRPO, PPO, Algorithm
from rlmesh.rl.rewards import Reward
from rlmesh.rl.trainers import preflight
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import (
    ActorSettings,
    CriticSettings,
    LoraSettings,
    RolloutSettings,
    apply_overrides,
)
from tests.rl import run_job
from tests.rl.run_job import ROWS, is_a
from tests.rl.tiny import TEMPLATE, make_tokenizer

LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 8,
    "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
}  # fmt: skip


def settings(**changes: Any) -> dict[str, Any]:
    return {"model": "nowhere", "data": "nowhere.jsonl", "rewards": [is_a], "algorithm": GRPO(samples=4), **changes}


def test_all_faults_of_the_settings_come_in_one_message() -> None:
    with pytest.raises(UsageError) as raised:
        Run(
            **settings(
                steps=0, batch_size="16", pipeline="two-steps-off", train="fsdp", rewards=[],
                actor=ActorSettings(lr=-1.0, ranks=0), rollout=RolloutSettings(temperature=0.0),
            )
        )  # fmt: skip
    text = str(raised.value)
    for fault in (
        "steps=0 must be", "batch_size='16' must be a whole number", "pipeline='two-steps-off': there is 'sync'",
        "train='fsdp'", "at least one reward", "actor.lr=-1.0", "actor.ranks=0", "rollout.temperature=0.0",
    ):  # fmt: skip
        assert fault in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"actor": {"lr": 1e-3}}, "actor={'lr': 0.001} must be ActorSettings(…)"),
        ({"critic": "model", "algorithm": PPO()}, "critic='model' must be CriticSettings(…)"),
        ({"rollout": RolloutSettings}, "must be RolloutSettings(…)"),
        ({"episode": None, "rollout": {"max_tokens": 3}}, "episode=None must be EpisodeSettings(…)"),
        ({"algorithm": GRPO}, "expected an Algorithm, such as GRPO(samples=8)"),
        ({"data": None}, "data=None must be a file"),
        ({"data": (row for row in ROWS)}, "must be a file, a folder, a list of files or of rows"),
        ({"validation": 3}, "validation=3 must be a file"),
        ({"data": [3]}, "data: 3 is no row and no file"),
        ({"data": ["a.jsonl", {"prompt": "a"}]}, "data has both rows and files"),
        ({"rewards": 3}, "a reward is a function, such as gsm8k.compute_score, got 3"),
        ({"trackers": 3}, "trackers=3 must be a list, such as [1, 2]"),
        (
            {"actor": ActorSettings(lora=LoraSettings(alpha=8.0))},
            "actor.lora.rank=0: without a rank there is no adapter",
        ),
    ],
)
def test_values_of_a_wrong_kind_are_told(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as raised:
        Run(**settings(**changes))
    assert said in str(raised.value)


def test_an_algorithm_that_needs_a_critic_gets_one() -> None:
    assert Run(**settings(algorithm=PPO())).critic.lr == 1e-5
    with pytest.raises(UsageError, match=r"critic\.lr=-1\.0 must be"):
        Run(**settings(algorithm=PPO(), critic=CriticSettings(lr=-1.0)))


@dataclass(frozen=True)
class Taught(GRPO):
    @property
    def needs(self) -> frozenset[Any]:
        return frozenset(["teacher"])


def test_an_input_that_no_role_gives_is_refused() -> None:
    with pytest.raises(UsageError, match="Taught needs teacher, which no role gives: there is critic, greedy, refer"):
        Run(**settings(algorithm=Taught()))


@pytest.mark.parametrize(
    ("changes", "placed"),
    [
        ({}, "separate"),
        ({"devices_per_node": 1}, "shared"),
        ({"devices_per_node": 2}, "separate"),
        ({"devices_per_node": 2, "algorithm": PPO()}, "shared"),
        ({"devices_per_node": 2, "nodes": 2, "algorithm": PPO(kl=0.1)}, "separate"),
        ({"devices_per_node": 8, "placement": "shared"}, "shared"),
        ({"devices_per_node": 1, "placement": "fused"}, "fused"),
    ],
)
def test_roles_share_devices_if_there_are_too_few(changes: dict[str, Any], placed: str) -> None:
    assert Run(**settings(**changes)).placed == placed


def test_a_placement_that_cannot_be_is_told() -> None:
    with pytest.raises(UsageError, match=r"rollout\.engines=2 must be actor\.ranks=1"):
        Run(**settings(placement="fused", rollout=RolloutSettings(engines=2)))
    with pytest.raises(UsageError, match="placement='same' must be one of 'auto', 'separate'"):
        Run(**settings(placement="same"))


def test_overrides_change_settings_and_sections() -> None:
    run = apply_overrides(
        Run(**settings(rollout="transformers")),
        ["actor.lr=2e-6", "steps=7", "train=fsdp2", "rollout.max_tokens=9", "algorithm.samples=6", "actor.ranks=2"],
    )
    assert (run.actor.lr, run.steps, run.train, run.rollout.max_tokens) == (2e-6, 7, "fsdp2", 9)
    assert (run.algorithm.samples, run.actor.ranks) == (6, 2)


def test_overrides_take_lists_as_people_write_them() -> None:
    run = apply_overrides(
        Run(**settings()),
        ["rollout.stop_token_ids=1,2", "rollout.stop=a,b", "restore_parts=weights, optimizer", "critic.model=None"],
    )
    assert (run.rollout.stop_token_ids, run.rollout.stop, run.critic.model) == ([1, 2], "a,b", None)
    assert run.restore_parts == ["weights", "optimizer"]
    with pytest.raises(UsageError, match=r"rollout.stop_token_ids='a' must be a list of token ids"):
        apply_overrides(Run(**settings()), ["rollout.stop_token_ids=a"])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "actor.learning_rte=1",
            "there is no setting 'actor.learning_rte'; did you mean actor.lr? It corresponds to learning_rate",
        ),
        ("actor.warmup_step=1", "did you mean actor.warmup_steps?"),
        ("lr=1", "did you mean actor.lr?"),
        ("rollout.n=0", "did you mean algorithm.samples? It corresponds to rollout.n in other libraries."),
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
        tiny,
        algorithm=GRPO(samples=4, kl=0.1),
        actor=ActorSettings(ranks=2),
        rollout=RolloutSettings(engines=3, max_tokens=8),
    )
    run.check()
    job = run.job()
    assert {name: getattr(one, "total", None) for name, one in job.workloads.items()} == {
        "TRAINER": 1, "ACTOR": 2, "ROLLOUT": 3, "REFERENCE": 1,
    }  # fmt: skip


def wrong_length(responses: list[str]) -> list[float]:
    return [0.0] * (len(responses) + 1)


def matches(response: str, ground_truth: str) -> float:
    return float(response == ground_truth)


def templated(response: str, prompt: str) -> float:
    raise KeyError(prompt.replace(" ", ""))


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
        (
            {"rewards": [matches], "data": [*ROWS[:9], {"prompt": "a>"}, {"prompt": "b>", "ground_truth": None}]},
            "2 of 11 rows cannot be scored; row 9: reward 'matches' wants 'ground_truth'",
        ),
        (
            {"rewards": [matches], "validation": [*ROWS[:2], {"prompt": "a>"}]},
            "validation: 1 of 3 rows cannot be scored; row 2: reward 'matches'",
        ),
        ({"rewards": [wrong_length]}, "returned list of length 2 for 1 responses"),
        ({"rewards": [raises]}, "reward 'raises' fails on row 0"),
        ({"rewards": [raises], "data": [{"question": "a>"}] * 8, "prompt_key": "question"}, "reward 'raises' fails"),
        ({"rewards": [raises], "data": {}}, "data: a mixture is a mapping of files to weights"),
        ({"data": [{"prompts": "a>"}] * 8}, "did you mean prompt_key='prompts'?"),
        ({"data": [{"question": "a>"}] * 8, "prompt_key": "questions"}, "did you mean prompt_key='question'?"),
        ({"rewards": [Reward(is_a), raises], "validation": "/nowhere"}, "validation: "),
        ({"rewards": [is_a, is_a], "batch_size": 99}, "rewards: 2 are named 'is_a'"),
        ({"rollout": RolloutSettings(max_tokens=64)}, "tokens are more than the 64 positions of the model"),
        (
            {"rollout": RolloutSettings(max_tokens=8, stop_token_ids=(1, 999))},
            "stop_token_ids has 999, and the tokenizer has only",
        ),
    ],
)
def test_faults_are_told_before_any_process_starts(tiny: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as raised:
        small(tiny, **changes).submit()
    assert said in str(raised.value) and "the run cannot start" in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("mistral", {"sliding_window": 8, "head_dim": 8}, "more than the sliding window of 8 tokens"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "has layers of type conv"),
        ("llama", {"rope_parameters": LONG_ROPE, "head_dim": 8}, "more than the 8 tokens beyond which the model resc"),
    ],
)
def test_models_that_would_train_with_wrong_numbers_are_told_before_any_process_starts(
    tiny: Path, tmp_path: Path, kind: str, options: dict[str, Any], said: str
) -> None:
    from transformers import AutoConfig

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config: Any = AutoConfig.for_model(kind, **(sizes | options))
    for path in tiny.glob("tokenizer*"):
        shutil.copy(path, tmp_path)
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()  # the check loads no weights
    run = small(tmp_path, rollout=RolloutSettings(max_tokens=8, stop_token_ids=[1]))
    with pytest.raises(UsageError, match=said):
        run.check()
    # An evaluation only samples.
    from rlmesh.rl.evaluation.evaluate import EvaluationRun  # imports torch

    EvaluationRun(**{one.name: getattr(run, one.name) for one in fields(Run)} | {"algorithm": Algorithm()}).check()


def test_end_tokens_that_responses_or_prompts_would_not_have_right_are_told(tiny: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    shutil.copytree(tiny, tmp_path / "model")
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "model" / "generation_config.json").unlink()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"eos_token_id": [5]}))
    lone = small(tmp_path / "model")
    with pytest.raises(UsageError, match=r"'<end>' \(1\) is none of the end tokens .* \(5\), so no response would end"):
        lone.check()
    replace(lone, rollout=replace(lone.rollout, stop_token_ids=[1])).check()
    name = tmp_path / "model" / "tokenizer.json"
    parts = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<end>", "type_id": 0}}]
    special = {"<end>": {"id": "<end>", "ids": [1], "tokens": ["<end>"]}}
    after = {"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": special}
    name.write_text(json.dumps(json.loads(name.read_text()) | {"post_processor": after}))
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("a").input_ids[-1] == 1
    with pytest.raises(UsageError, match="its tokenizer appends its end token '<end>' to prompts"):
        replace(lone, rollout=replace(lone.rollout, stop_token_ids=[1])).check()


def test_faults_of_rewards_and_data_come_together_and_before_torch_is_loaded(tiny: Path) -> None:
    program = (
        "import sys\n"
        "from tests.rl.test_run import raises, small, wrong_length\n"
        "from pathlib import Path\n"
        "from rlmesh.errors import UsageError\n"
        "if __name__ == '__main__':\n"
        "    run = small(Path(sys.argv[1]), rewards=[raises, wrong_length], batch_size=40)\n"
        "    try: run.check()\n"
        "    except UsageError as error: print(error)\n"
        "    print(sorted(set(sys.modules) & {'torch', 'transformers'}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tiny)], capture_output=True, text=True, timeout=60, check=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    for said in ("32 prompts are too few", "reward 'raises' fails on row 0", "returned list of length 2", "\n[]\n"):
        assert said in done.stdout, done.stdout + done.stderr


def test_rewards_that_read_a_prompt_of_messages_are_tried_with_the_template(tiny: Path, tmp_path: Path) -> None:
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    make_tokenizer(tmp_path, template=TEMPLATE)
    rows = [{"prompt": [{"role": "user", "content": "ab"}], "ground_truth": "a"}] * 8
    with pytest.raises(UsageError, match=r"reward 'templated' fails on row 0 .*KeyError: 'ab>'"):
        small(tmp_path, data=rows, rewards=[is_a, templated]).check()
    tried = set[str]()
    assert not [*preflight._early_reward_faults(small(tmp_path, data=rows, rewards=[is_a, templated]), tried)]
    assert tried == {"is_a"}
    found = [*preflight._early_reward_faults(small(tmp_path, data=rows, rewards=[raises]), tried)]
    assert len(found) == 1 and "reward 'raises' fails on row 0" in found[0]
    small(tmp_path, data=rows).check()


def test_a_script_without_a_guard_is_told_about_it(tiny: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from rlmesh.rl.algorithms import GRPO\nfrom rlmesh.rl.trainers.run import Run\n\n"
        "def length(response):\n    return len(response)\n\n"
        f"Run(model={str(tiny)!r}, data=[{{'prompt': 'ab>'}}] * 16, rewards=[length], algorithm=GRPO()).submit('x')\n"
    )
    ended = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode and not (tmp_path / "runs").exists()
    assert 'In a script, begin a run below `if __name__ == "__main__":`' in ended.stderr.splitlines()[-1]
    assert "imports it: begin a run below" in ended.stderr


def test_an_engine_that_is_not_installed_is_told(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"rollout\.engine='vllm-async' needs vllm: pip install 'rlmesh\[vllm\]'"):
        small(tiny, rollout=RolloutSettings(engine="vllm-async", max_tokens=8)).check()


def test_the_column_of_prompts_and_the_template_are_settings(tmp_path: Path) -> None:
    template = "{% if quiet %}h{% endif %}" + TEMPLATE
    tokenizer = make_tokenizer(tmp_path, template=template)
    rows = [{"question": [{"role": "user", "content": "ab"}]}] * 2
    run = Run(**settings(data=rows, prompt_key="question", template={"quiet": True}))
    assert tokenizer.decode(run.dataset(tokenizer)[0].ids).replace(" ", "") == "hab>"
    plain = replace(run, template={})
    assert tokenizer.decode(plain.dataset(tokenizer)[0].ids).replace(" ", "") == "ab>"


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


def launched(script: str, folder: Path, *arguments: str, options: Sequence[str] = ()) -> Path:
    """The run directory of a script's job, launched with these options."""
    folder.mkdir()
    command = [sys.executable, "-m", "rlmesh.cli.main", "launch", "--view", "plain", "--run-dir", "run", *options]
    done = subprocess.run(
        [*command, script, *arguments], cwd=folder, capture_output=True, text=True, timeout=240,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def curve(
    tiny: Path, folder: Path, algorithm: str, placement: str, *options: str, devices: int = 0
) -> dict[int, float]:
    """The mean reward of each step of ``run_job.py``."""
    run_dir = launched(run_job.__file__, folder, str(tiny), algorithm, placement, str(devices), options=options)
    return {step: metrics["reward_mean"] for step, metrics in reported(run_dir).items()}


@pytest.fixture(scope="module")
def calm(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[int, float]]:
    """Gives the undisturbed curve of an algorithm, with a process for each role."""

    @cache
    def run(algorithm: str) -> dict[int, float]:
        return curve(tiny, tmp_path_factory.mktemp("calm") / algorithm, algorithm, "separate")

    return run


Curves = Callable[[str], dict[int, float]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "placement", "target"),
    [
        ("grpo", "separate", "ACTOR:0"),
        ("grpo", "separate", "ROLLOUT:0"),
        ("grpo", "separate", "TRAINER:0"),
        ("ppo", "separate", "ACTOR:0"),
        ("ppo", "separate", "CRITIC:0"),
        ("ppo", "separate", "ROLLOUT:0"),
        ("ppo", "separate", "TRAINER:0"),
        ("ppo", "shared", "ACTOR:0"),
        ("ppo", "shared", "CRITIC:0"),
        ("ppo", "shared", "ROLLOUT:0"),
        ("ppo", "shared", "TRAINER:0"),
        ("ppo", "fused", "ACTOR:0"),
    ],
)
def test_a_killed_member_costs_steps_and_changes_nothing(
    tiny: Path, tmp_path: Path, calm: Curves, algorithm: str, placement: str, target: str
) -> None:
    killed = curve(tiny, tmp_path / "killed", algorithm, placement, "--chaos", f"{target}@step=5")
    assert sorted(calm(algorithm)) == sorted(killed) == list(range(1, 9))
    # Sampling and training are functions of the step, so the curve goes on as if nothing had happened.
    assert killed == pytest.approx(calm(algorithm), abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_run_in_one_process_gives_the_numbers_of_the_job(
    tiny: Path, tmp_path: Path, calm: Curves, algorithm: str
) -> None:
    result = run_job.make(str(tiny), algorithm, "auto").here(run_dir=tmp_path / "here")
    found = {step: metrics["reward_mean"] for step, metrics in reported(result.run_dir).items()}
    assert found == pytest.approx(calm(algorithm), abs=1e-6)
    assert found[8] > found[1] + 0.2
    assert (result.model / "model.safetensors").exists()


@pytest.mark.parametrize("algorithm", [PPO(samples=2, kl=0.1), DPO()], ids=["ppo", "dpo"])
def test_equal_policies_have_the_ratio_1_also_if_the_model_has_dropout(tmp_path: Path, algorithm: Algorithm) -> None:
    """Nothing is learnt, so every pass of the step must compute the same policy."""
    from tests.rl.checkpoints.runs import make_model, metrics_of  # they import torch, which a test here goes without

    rows = [{**row, "chosen": "a", "rejected": "bc"} for row in ROWS]
    run = Run(
        model=str(make_model(tmp_path / "model")), data=rows, rewards=[is_a] if algorithm.rewarded else [],
        algorithm=algorithm, batch_size=8, steps=1, actor=ActorSettings(lr=0.0), critic=CriticSettings(lr=0.0),
        rollout=RolloutSettings(max_tokens=4),
    )  # fmt: skip
    found = metrics_of(run.here(run_dir=tmp_path / "run").run_dir)[1]
    assert found["clip_fraction"] == 0 and found["kl_step"] < 1e-9
    assert found["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    if "critic/loss" in found:
        assert found["critic/clip_fraction"] == 0


@pytest.mark.slow
def test_a_greedy_response_is_the_baseline_of_remax(tiny: Path, tmp_path: Path) -> None:
    run = replace(run_job.make(str(tiny), "grpo", "auto"), algorithm=GRPO(samples=4, advantage="remax"), steps=10)
    steps = reported(run.here(run_dir=tmp_path / "here").run_dir)
    assert steps[10]["reward_mean"] > steps[1]["reward_mean"] + 0.2


@pytest.mark.slow
def test_a_run_in_one_process_goes_on_from_its_checkpoint(tiny: Path, tmp_path: Path, calm: Curves) -> None:
    run_dir = tmp_path / "here"
    replace(run_job.make(str(tiny), "ppo", "auto"), steps=5).here(run_dir=run_dir)
    result = run_job.make(str(tiny), "ppo", "auto").here(run_dir=run_dir)
    found = {step: metrics["reward_mean"] for step, metrics in reported(result.run_dir).items()}
    assert found == pytest.approx(calm("ppo"), abs=1e-6)


def ends_at_a(response: str) -> float:
    """1 if nothing comes after the first "a"."""
    return float("a" not in response.removesuffix("<end>")[:-1])


@pytest.mark.parametrize(
    "cut",
    [
        {"top_k": 3}, pytest.param({"top_p": 0.7}, marks=pytest.mark.slow),
        pytest.param({"min_p": 0.8}, marks=pytest.mark.slow),
    ],
    ids=["top_k", "top_p", "min_p"],
)  # fmt: skip
def test_sampling_options_reach_the_engine_and_the_ratios(tiny: Path, tmp_path: Path, cut: dict[str, Any]) -> None:
    """A trainer that took truncated log-probabilities for those of the whole vocabulary would see a large gap."""
    rollout = RolloutSettings(max_tokens=6, stop="a", stop_token_ids=[3], **cut)
    run = small(tiny, rollout=rollout, rewards=[ends_at_a], steps=2, validation=ROWS[:8])
    steps = reported(run.here(run_dir=tmp_path / "run").run_dir)
    assert steps[2]["val/reward_mean"] == 1.0
    for one in (steps[1], steps[2]):
        assert one["reward_mean"] == 1.0 and one["log_prob_gap"] < 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_engines_in_half_precision_sample_with_the_weights_of_the_actor(tiny: Path, tmp_path: Path, dtype: Any) -> None:
    """The gap between the log-probabilities of both is that of rounding: neither 0 nor that of other weights."""
    rollout = RolloutSettings(max_tokens=6, dtype=dtype)
    run = small(tiny, rollout=rollout, actor=ActorSettings(lr=1e-2), steps=3)
    steps = reported(run.here(run_dir=tmp_path / "run").run_dir)
    assert all(1e-5 < one["log_prob_gap"] < 0.05 for one in steps.values())


@pytest.mark.slow
def test_without_stop_texts_responses_go_on(tiny: Path, tmp_path: Path) -> None:
    run = small(tiny, rollout=RolloutSettings(max_tokens=6), rewards=[ends_at_a], steps=1)
    assert reported(run.here(run_dir=tmp_path / "run").run_dir)[1]["reward_mean"] < 1.0


def test_sampling_parameters_are_those_of_the_settings() -> None:
    rollout = RolloutSettings(
        max_tokens=9, temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, stop=["x", "y"], stop_token_ids=[7]
    )
    drawn, greedy = rollout.params(greedy=False, seed=3), rollout.params(greedy=True)
    assert (drawn.temperature, drawn.top_p, drawn.top_k, drawn.min_p, drawn.seed) == (0.5, 0.9, 4, 0.1, 3)
    assert (greedy.temperature, greedy.truncates) == (0.0, False)
    assert all((one.max_tokens, one.stop, one.stop_token_ids) == (9, ("x", "y"), (7,)) for one in (drawn, greedy))


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"top_p": 0.0}, "rollout.top_p=0.0 must be in (0, 1]"),
        ({"top_p": 1.5}, "rollout.top_p=1.5 must be in (0, 1]"),
        ({"top_k": -1}, "rollout.top_k=-1 must be ≥ 0"),
        ({"min_p": 1.0}, "rollout.min_p=1.0 must be in [0, 1)"),
        ({"stop": ["x", ""]}, "rollout.stop=['x', ''] must be a text or a list of texts"),
        ({"stop": 5}, "rollout.stop=5 must be a text or"),
        ({"stop": [5]}, "rollout.stop=[5] must be a text or a list"),
        ({"stop_token_ids": [-1]}, "rollout.stop_token_ids=[-1] must be a list of token ids"),
        ({"stop_token_ids": "</s>"}, "rollout.stop_token_ids='</s>' must be a list of token ids"),
    ],
)
def test_wrong_sampling_options_are_named(option: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as raised:
        Run(**settings(rollout=RolloutSettings(**option)))
    assert said in str(raised.value)
