"""`rlmesh train` with a real, tiny model: what is wrong is told before any process starts; what is right trains."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from rlmesh.cli.main import main
from rlmesh.driver.outcome import job_interrupted
from rlmesh.rl.trainers import preflight
from rlmesh.rl.trainers.run import Run
from tests.rl.run_job import ROWS

FUNCTIONS = '''
"""Rewards of the tests."""


def is_a(response):
    return response.replace(" ", "").count("a") / 4


def one_too_many(responses):
    return [0.0] * (len(responses) + 1)


def other_arguments(respons, row):
    return 0.0


def raises(response):
    raise KeyError("answer")
'''


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers and its tokenizer of letters, without a chat template."""
    import torch
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("small")
    words = {word: place for place, word in enumerate(["<pad>", "<end>", *"abcdefgh", ">"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def config(folder: Path, model: Path, **changes: Any) -> Path:
    (folder / "my_rewards.py").write_text(FUNCTIONS)
    values = {
        "model": str(model), "data": ROWS[:32], "batch_size": 8, "steps": 2, "rewards": ["my_rewards:is_a"],
        "algorithm": {"name": "grpo", "samples": 4}, "actor": {"lr": 1e-2}, "rollout": {"max_tokens": 4},
    } | changes  # fmt: skip
    path = folder / "settings.json"
    path.write_text(json.dumps(values))
    return path


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)


CHAT = [{"prompt": [{"role": "user", "content": "a"}]}] * 8
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "all too long": ({"data": ROWS[:30], "max_prompt_tokens": 1}, "30 too long"),
    "too few rows": ({"data": ROWS[:3], "batch_size": 4}, "3 prompts are too few for a batch of 4"),
    "no template": ({"data": CHAT}, "the tokenizer in"),
    "no prompt": ({"data": [{"text": "a"}] * 8}, "row 0 has no column 'prompt'"),
    "n": ({"rollout": {"n": 0}}, "did you mean algorithm.samples? It corresponds to rollout.n in other libraries."),
    "key": (
        {"actor": {"learning_rte": 1}},
        "did you mean actor.lr? It corresponds to learning_rate in other libraries.",
    ),
    "section": ({"max_tokens": 4}, "it belongs to the section rollout; did you mean rollout.max_tokens?"),
    "type": ({"steps": "2"}, "steps='2' must be a whole number"),
    "arguments": ({"rewards": ["my_rewards:other_arguments"]}, "; did you mean 'response'?"),
    "length": ({"rewards": ["my_rewards:one_too_many"]}, "returned list of length 2 for 1 responses"),
    "raises": ({"rewards": ["my_rewards:raises"]}, "reward 'raises' fails on row 0"),
    "names": ({"rewards": ["my_rewards:is_a"] * 2}, "named"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_told(
    what: str,
    small_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    changes, said = BAD[what]
    assert main(["train", str(config(tmp_path, small_model, **changes)), "--check"]) == 2
    found = capsys.readouterr().err
    assert said in found, found
    assert not (tmp_path / "runs").exists()


def test_a_model_without_a_tokenizer_or_configuration_is_told(
    small_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    assert main(["train", str(config(tmp_path, bare)), "--check"]) == 2
    found = capsys.readouterr().err
    assert "the model has no tokenizer" in found and "the folder has no config.json" in found
    (bare / "config.json").write_text((small_model / "config.json").read_text())
    assert main(["train", str(config(tmp_path, bare)), "--check"]) == 2
    found = capsys.readouterr().err
    assert "the model has no tokenizer" in found and "the folder has no weights" in found
    assert main(["train", str(config(tmp_path, tmp_path / "bar"))]) == 2
    assert f"did you mean {bare}?" in capsys.readouterr().err


def test_a_name_that_the_hub_does_not_know_is_told_with_the_folder_that_was_meant(
    small_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(run: Any) -> Any:
        raise OSError("no connection")

    monkeypatch.setattr(preflight, "_tokenizer", unreachable)
    (tmp_path / "small").mkdir()
    for name, told in (
        ("smal", "no folder of this name; did you mean small? As a hub name: no connection"),
        ("Qwen/none", "no folder of this name. As a hub name: no connection"),
    ):
        assert main(["train", str(config(tmp_path, Path(name))), "--check"]) == 2
        assert f"model='{name}': there is {told}" in capsys.readouterr().err


def test_ctrl_c_says_how_to_go_on(
    small_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> Any:
        raise job_interrupted("toy", "Ctrl-C", "")

    monkeypatch.setattr(Run, "submit", interrupted)
    for options, place in (([], "and its run directory"), (["--run-dir", "runs/toy"], "runs/toy")):
        assert main(["train", str(config(tmp_path, small_model)), *options]) == 130
        told = capsys.readouterr().err
        assert f"was stopped: Ctrl-C. Start it again with --run-dir {place} to resume" in told


def test_prompts_that_are_all_too_long_are_told_before_torch_is_loaded(small_model: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from rlmesh.cli.main import main; code = main(sys.argv[1:]); "
        "print(code, sorted(set(sys.modules) & {'torch', 'transformers'}))"
    )
    path = config(tmp_path, small_model, data=ROWS[:30], max_prompt_tokens=1)
    command = [sys.executable, "-c", program, "train", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "2 []" and "30 rows read, 30 too long" in done.stderr
    # One row that may fit is enough to count with the real tokenizer.
    assert main(["train", str(config(tmp_path, small_model, data=[*ROWS[:30], {"prompt": "a"}], max_prompt_tokens=1,
                                     batch_size=1)), "--check"]) == 0  # fmt: skip


def test_a_right_run_is_told_with_its_rows(
    small_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", str(config(tmp_path, small_model)), "--check"]) == 0
    assert "the run can start; data: 32 rows read, 0 too long, 0 empty, 32 left" in capsys.readouterr().out


@pytest.mark.slow
def test_fit_is_printed_and_gives_a_code(
    small_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = str(config(tmp_path, small_model, max_prompt_tokens=16))
    assert main(["train", path, "--fit", "--memory", "64"]) == 0
    assert "largest actor.token_budget that fits" in capsys.readouterr().out
    assert main(["train", path, "--fit", "--memory", "0.1"]) == 1
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.slow
def test_a_file_of_settings_trains(small_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = config(tmp_path, small_model, validation=ROWS[:4])
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "rlmesh.cli.main", "train", str(path), "--set", "steps=3", "--run-dir", "run"],
        cwd=tmp_path, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    print(f"{time.monotonic() - began:.0f} s")
    assert "val/reward_mean = " in done.stdout and f"model: {tmp_path}/run/model" in done.stdout
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model") is not None
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(entry["step"] for entry in steps) == 3
