"""`rlmesh replay`: a recorded step computed again has the same bits, and what is missing is said."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")

from rlmesh.cli.main import main
from rlmesh.errors import UsageError
from rlmesh.rl.algorithms import GRPO, SFT
from rlmesh.rl.evaluation.saved_run import load_saved_run
from rlmesh.rl.evaluation.settings import SampleSettings
from rlmesh.rl.reading.replay import Replayed, replay
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import ActorSettings, RolloutSettings
from tests.rl.checkpoints.runs import make, make_model


def with_changes(model: Path, **changes: Any) -> Run:
    return replace(make(model), **changes)


def replayed(run_dir: Path, step: int) -> Replayed:
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    found = replay(run_dir, load_saved_run(run_dir), step)
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose configuration has dropout, which steps on samples leave out."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def grpo(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("grpo") / "run"
    make(model, steps=6, actor=ActorSettings(lr=1e-2, minibatches=2, epochs=2)).here(run_dir=run_dir)
    return run_dir


@pytest.mark.parametrize("step", [1, *(pytest.param(step, marks=pytest.mark.slow) for step in (2, 4, 5, 6))])
def test_a_step_has_the_bits_of_the_recorded_one(grpo: Path, step: int) -> None:
    found = replayed(grpo, step)
    assert found.differing == [] and {"policy_loss", "grad_norm", "entropy", "log_prob_gap"} <= {*found.common}
    assert found.metrics["policy_loss"] == found.recorded["policy_loss"]
    # Checkpoints are of the steps 2, 4 and 6, of which three are kept.
    assert (found.began, found.weights_equal) == {
        1: (0, None), 2: (0, True), 4: (2, True), 5: (4, None), 6: (4, True)
    }[step]  # fmt: skip
    assert found.equal


def test_a_critic_a_reference_and_a_controlled_penalty_are_computed_again(model: Path, tmp_path: Path) -> None:
    make(model, "ppo", steps=4).here(run_dir=tmp_path / "run")
    found = replayed(tmp_path / "run", 4)
    assert (found.began, found.weights_equal, found.differing) == (2, True, [])
    assert {"critic/loss", "kl_coefficient", "batches"} <= {*found.common}


@pytest.mark.slow
def test_older_weights_and_truncated_sampling(tiny: Path, tmp_path: Path) -> None:
    with_changes(
        tiny, steps=4, pipeline="one-step-off", algorithm=GRPO(samples=4, correction="token"),
        rollout=RolloutSettings(max_tokens=6, top_k=4),
    ).here(run_dir=tmp_path / "run")  # fmt: skip
    found = replayed(tmp_path / "run", 3)
    assert found.differing == [] and "off_policy_k3" in found.common


def test_an_adapter(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from rlmesh.rl.trainers.settings import LoraSettings

    with_changes(tiny, steps=4, actor=ActorSettings(lr=1e-2, lora=LoraSettings(rank=2))).here(run_dir=tmp_path / "run")
    found = replayed(tmp_path / "run", 4)
    assert (found.began, found.weights_equal, found.differing) == (2, True, [])
    assert found.weights and all("lora" in name for name in found.weights)


def test_the_command_prints_both_numbers(grpo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(grpo), "--step", "6"]) == 0
    told = capsys.readouterr().out
    assert "step 6, computed from the checkpoint of step 4" in told and "bit for bit" in told
    (line,) = [line for line in told.splitlines() if line.startswith("policy_loss")]
    now, recorded = line.split()[1:]
    assert now == recorded


def test_a_step_that_was_recorded_differently_differs(grpo: Path, tmp_path: Path) -> None:
    shutil.copytree(grpo, tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    (place,) = [number for number, line in enumerate(lines) if '"step": 6' in line and "policy_loss" in line]
    entry = json.loads(lines[place])
    entry["metrics"]["policy_loss"] += 1e-9
    lines[place] = json.dumps(entry)
    metrics.write_text("\n".join(lines) + "\n")
    found = replayed(tmp_path / "run", 6)
    assert found.differing == ["policy_loss"] and not found.equal and "differs" in str(found)
    assert main(["replay", str(tmp_path / "run"), "--step", "6"]) == 1


@pytest.mark.slow
def test_settings_that_changed_since_the_step_are_said(tiny: Path, tmp_path: Path) -> None:
    run = with_changes(tiny, steps=2, save_every=2, actor=ActorSettings(lr=1e-3))
    run.here(run_dir=tmp_path / "run")
    replace(run, steps=4, actor=ActorSettings(lr=1e-2)).here(run_dir=tmp_path / "run")
    assert replayed(tmp_path / "run", 4).equal
    earlier = replayed(tmp_path / "run", 2)
    assert not earlier.equal and "actor.lr=0.01, before 0.001" in str(earlier) and "machine" not in str(earlier)


def test_what_is_missing_is_said(grpo: Path, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"step 9 is not reported.*steps 1 to 6"):
        replayed(grpo, 9)
    shutil.copytree(grpo, tmp_path / "run")
    (tmp_path / "run" / "samples" / "train-00000005.parquet").unlink()
    with pytest.raises(UsageError, match=r"samples of step 5 are missing.*steps 1 to 6 \(5 of them\)"):
        replayed(tmp_path / "run", 6)
    assert replayed(tmp_path / "run", 4).equal
    # Samples of another step in the place of those that were trained on.
    samples = tmp_path / "run" / "samples"
    shutil.copy(samples / "train-00000003.parquet", samples / "train-00000004.parquet")
    with pytest.raises(UsageError, match="not those that it was trained on"):
        replayed(tmp_path / "run", 4)


@pytest.mark.slow
def test_runs_without_samples_are_refused(tiny: Path, tmp_path: Path) -> None:
    with_changes(tiny, steps=2, sample_files=SampleSettings(every=0)).here(run_dir=tmp_path / "none")
    with pytest.raises(UsageError, match="has those of no step"):
        replayed(tmp_path / "none", 1)
    rows: list[dict[str, Any]] = [{"prompt": "ab>", "response": "a"}] * 8
    with_changes(tiny, algorithm=SFT(), rewards=[], data=rows, steps=1).here(run_dir=tmp_path / "sft")
    with pytest.raises(UsageError, match="SFT trains on the responses of the data"):
        replayed(tmp_path / "sft", 1)
    with_changes(tiny, algorithm=GRPO(samples=2, advantage="remax"), steps=1).here(run_dir=tmp_path / "remax")
    with pytest.raises(UsageError, match="greedy"):
        replayed(tmp_path / "remax", 1)
