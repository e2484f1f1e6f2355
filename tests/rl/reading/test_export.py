"""`rlmesh export`: the trained policy, and that of a checkpoint, as folders that transformers reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch

from rlmesh.cli.main import main
from rlmesh.errors import UsageError
from rlmesh.rl.evaluation.evaluate import of_run_directory
from rlmesh.rl.reading.export import export
from rlmesh.rl.trainers.settings import ActorSettings, LoraSettings
from tests.rl.checkpoints.runs import make


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoTokenizer.from_pretrained(folder).eos_token == "<end>"
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


@pytest.fixture(scope="module", params=[0, 2], ids=["whole", "lora"])
def run_dir(tiny: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param:
        pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("run") / "run"
    actor = ActorSettings(lr=1e-2, lora=LoraSettings(rank=request.param))
    make(tiny, steps=4, actor=actor).here(run_dir=folder)
    return folder


def test_the_last_checkpoint_is_the_trained_model(run_dir: Path, tmp_path: Path) -> None:
    assert export(run_dir, tmp_path / "end") == 4
    assert export(run_dir / "checkpoints" / "step-000004", tmp_path / "last") == 4
    assert export(run_dir, tmp_path / "two", step=2) == 2
    trained, end, last, two = (
        weights(one) for one in (run_dir / "model", *map(tmp_path.joinpath, ("end", "last", "two")))
    )
    assert trained.keys() == end.keys() == last.keys() == two.keys()
    assert not any("lora" in name for name in last)
    assert all(torch.equal(trained[name], end[name]) and torch.equal(trained[name], last[name]) for name in trained)
    assert not all(torch.equal(trained[name], two[name]) for name in trained)


@pytest.mark.slow
def test_the_model_of_a_run_that_goes_on_after_its_end_is_not_the_trained_one(tiny: Path, tmp_path: Path) -> None:
    run_dir, model = tmp_path / "run", {"model": str(tmp_path / "run" / "model")}
    make(tiny, steps=2).here(run_dir=run_dir)
    assert of_run_directory(run_dir) == model
    summary = (run_dir / "summary.json").read_text()
    make(tiny, steps=4).here(run_dir=run_dir)
    assert of_run_directory(run_dir) == model
    (run_dir / "summary.json").write_text(summary)  # as long as the second part has not ended
    (of_step_4,) = of_run_directory(run_dir).values()
    assert "step-000004" in of_step_4 and export(run_dir, tmp_path / "out") == 4
    (run_dir / "summary.json").unlink()  # as long as the first part writes its model
    assert list(of_run_directory(run_dir)) == ["checkpoint"]


def test_the_command(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run_dir), str(tmp_path / "out"), "--step", "2"]) == 0
    assert "after 2 steps" in capsys.readouterr().out and weights(tmp_path / "out")
    assert main(["export", str(run_dir), str(tmp_path / "out")]) == 2
    assert "not empty" in capsys.readouterr().err


def test_what_cannot_be_exported_is_said(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="no checkpoint of step 3; it has checkpoints of steps 2, 4 and a trained model"
    ):
        export(run_dir, tmp_path / "out", step=3)
    with pytest.raises(UsageError, match="leave the step out"):
        export(run_dir / "checkpoints" / "step-000002", tmp_path / "out", step=2)
    with pytest.raises(UsageError, match="there is no folder"):
        export(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no trained model; it has no checkpoint"):
        export(tmp_path / "empty", tmp_path / "out")
    assert not (tmp_path / "out").exists()
