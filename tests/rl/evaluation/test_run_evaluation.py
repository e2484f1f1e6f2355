"""A training that validates in the background and keeps samples, and the evaluation of what it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlmesh.cli.main import main
from rlmesh.errors import UsageError
from rlmesh.rl.evaluation.evaluate import evaluate, evaluation_of, of_run_directory
from rlmesh.rl.evaluation.saved_run import load_saved_run, save_run
from rlmesh.rl.evaluation.settings import SampleSettings, ValidationSettings
from rlmesh.rl.rollout.ledger import LEDGER, faults_of
from rlmesh.rl.samples.files import read_file, sample_files
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import RolloutSettings, apply_overrides
from tests.rl import run_job
from tests.rl.run_job import ROWS
from tests.rl.turns import episode_runs

VALIDATION = [dict(row, data_source="letters") for row in ROWS[:6]]


def make(model: Path, **evaluation: Any) -> Run:
    return replace(
        run_job.make(str(model), "grpo", "separate"), validation=VALIDATION, validate_every=2,
        evaluation=ValidationSettings(samples=4, right=0.5, **evaluation), sample_files=SampleSettings(every=4),
    )  # fmt: skip


def test_faults_of_the_settings_are_named(tiny: Path) -> None:
    with pytest.raises(UsageError) as raised:
        apply_overrides(make(tiny), ["evaluation.samples=0", "sample_files.every=-1", "evaluation.temprature=1"])
    text = str(raised.value)
    assert "evaluation.samples=0 must be" in text and "sample_files.every=-1 must be" in text
    assert "did you mean evaluation.temperature?" in text
    with pytest.raises(UsageError, match=r"evaluation\.temperature=0 gives 4 equal responses"):
        make(tiny, temperature=0.0)
    assert ValidationSettings().temperature_of(0.7) == 0 and ValidationSettings(samples=2).temperature_of(0.7) == 0.7


def test_the_settings_of_a_run_are_read_back_only_if_they_are_safe(tiny: Path, tmp_path: Path) -> None:
    run = make(tiny)
    save_run(tmp_path, run)
    assert load_saved_run(tmp_path) == run
    (tmp_path / "settings.pickle").chmod(0o622)
    with pytest.raises(UsageError, match="others can change it"):
        load_saved_run(tmp_path)
    with pytest.raises(UsageError, match=r"has no settings\.pickle, so it is no directory of a Run; give the config"):
        load_saved_run(tmp_path.parent)


def test_weights_that_do_not_exist_are_named(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoints" / "step-000004").mkdir(parents=True)
    with pytest.raises(UsageError, match="has no checkpoint of step 3; it has checkpoints of steps 4"):
        of_run_directory(tmp_path, 3)
    with pytest.raises(UsageError, match="there are no prompts: the run has no validation data"):
        evaluate(run_job.make(str(tiny), "grpo", "separate"))
    assert main(["evaluate", str(tmp_path / "nothing.yaml")]) == 2
    assert main(["evaluate", str(tmp_path), "--step", "1", "--model", "m"]) == 2
    assert "exclude each other" in capsys.readouterr().err


def test_settings_of_training_do_not_stop_an_evaluation(tiny: Path) -> None:
    changed = ["actor.minibatches=2", "actor.epochs=3", "critic.minibatches=2", "rollout.dynamic_sampling=true"]
    run = apply_overrides(make(tiny), [*changed, "rollout.oversampling=1.5"])
    task = evaluation_of(run, checkpoint="somewhere")
    assert task.actor.updates == run.actor.updates == 6, "the step of the checkpoint follows from it"
    assert (task.actor.lora, task.rollout.max_tokens) == (run.actor.lora, run.rollout.max_tokens)


def validations(run_dir: Path) -> dict[int, dict[str, float]]:
    entries = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        one["step"]: {name: value for name, value in one["metrics"].items() if name.startswith("val/")}
        for one in entries
        if "val/reward_mean" in one["metrics"]
    }


@pytest.mark.slow
def test_a_run_validates_in_the_background_and_can_be_evaluated(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = make(tiny).submit("background", view="plain", run_dir=tmp_path / "run")
    found = validations(tmp_path / "run")
    assert sorted(found) == [0, 2, 4, 6, 8]
    # One process cannot validate in the background: the numbers are the same.
    alone = validations(make(tiny).here(run_dir=tmp_path / "here").run_dir)
    assert found == {step: pytest.approx(one) for step, one in alone.items()}
    assert found[8]["val/letters/mean@4"] > found[0]["val/letters/mean@4"] + 0.2
    assert found[8]["val/letters/pass@4"] >= found[8]["val/letters/pass@1"]
    kept = sample_files(tmp_path / "run")
    assert [(one.split, one.step) for one in kept] == [
        ("train", 4), ("train", 8), *(("validation", step) for step in (0, 2, 4, 6, 8)),
    ]  # fmt: skip
    trained, *_, validated = (read_file(one) for one in kept)
    assert {one["first_version"] for one in trained} == {3} and {one["first_version"] for one in validated} == {8}
    assert sum(one["advantage"] for one in trained) == pytest.approx(0, abs=1e-4)
    assert any(abs(one["advantage"]) > 0.1 for one in trained)
    # The exported model and the checkpoint are the weights of the last validation.
    for number, words in enumerate(([], ["--step", "8"])):
        done = subprocess.run(
            [sys.executable, "-m", "rlmesh.cli.main", "evaluate", "run", *words, "--run-dir", f"evaluated{number}"],
            capture_output=True, text=True, timeout=240,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        metrics = json.loads((tmp_path / f"evaluated{number}" / "evaluation.json").read_text())
        assert metrics == pytest.approx({name: result.metrics[name] for name in metrics})
        assert f"val/letters/mean@4 = {metrics['val/letters/mean@4']:g}" in done.stdout


@pytest.mark.slow
def test_a_validation_beside_sampling_changes_no_sample(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step off: with it and without it, the same validations, metrics and weights."""
    monkeypatch.chdir(tmp_path)
    found = []
    for background in (True, False):
        run_dir = tmp_path / f"background-{background}"
        run = replace(make(tiny, background=background), pipeline="one-step-off")
        run.submit("validates", view="plain", run_dir=run_dir)
        entries = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        steps = {one["step"]: one["metrics"] for one in entries if "grad_norm" in one["metrics"]}
        rewards = [(steps[step]["reward_mean"], steps[step]["grad_norm"]) for step in sorted(steps)]
        beside = {one["step"] for one in entries if "grad_norm" not in one["metrics"] and one["step"]}
        assert beside == ({2, 4, 6} if background else set()), "those that are reported on their own"
        found.append((validations(run_dir), rewards, (run_dir / "model" / "model.safetensors").read_bytes()))
        assert faults_of(run_dir / LEDGER) == []
    assert sorted(found[0][0]) == [0, 2, 4, 6, 8] and found[0] == found[1]


@pytest.mark.slow
def test_games_are_validated_beside_asynchronous_sampling(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = episode_runs.make(
        tiny, "environment", batch_size=4, pipeline="async(staleness=2)", validation=episode_runs.ROWS[:6],
        validate_every=2, evaluation=ValidationSettings(samples=2), rollout=RolloutSettings(engines=2, max_tokens=3),
    )  # fmt: skip
    run.submit("validates", view="plain", run_dir=tmp_path / "run")
    found = validations(tmp_path / "run")
    assert sorted(found) == [0, 2, 4, 6, 8] and episode_runs.faults(tmp_path / "run", run) == []
    for file in sample_files(tmp_path / "run"):
        if file.split == "validation":
            samples = read_file(file)
            assert len(samples) == 12 and all(one["finish_reason"] != "failed" for one in samples)
            assert {one["first_version"] for one in samples} == {one["last_version"] for one in samples} == {file.step}
