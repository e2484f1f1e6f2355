"""`actor.lora`: its faults, and a training whose pushes have the adapter only."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from rlmesh.errors import UsageError
from rlmesh.rl.algorithms import GRPO
from rlmesh.rl.engines.lora import LoraOptions
from rlmesh.rl.trainers import settings as sections
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import ActorSettings, LoraSettings, apply_overrides
from tests.rl.conftest import make_tiny
from tests.rl.test_run import reported, settings, small


def test_settings_make_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "find_spec", lambda name: object())
    run = Run(**settings())
    assert run.actor.lora.options() is None
    run = apply_overrides(run, ["actor.lora.rank=8", 'actor.lora.target_modules=["q_proj", "v_proj"]'])
    assert run.actor.lora.options() == LoraOptions(8, None, ("q_proj", "v_proj"))
    for override, said in (
        ("actor.lora.rank=-1", "actor.lora.rank=-1: it is a whole number"),
        ("actor.lora.alpha=0", "actor.lora.alpha=0: it is > 0"),
        ("actor.lora.ranks=4", "did you mean actor.lora.rank?"),
        ("actor.lora.target_modules=q_proj", "target_modules='q_proj': it is 'all-linear', or a list of names"),
    ):
        with pytest.raises(UsageError) as raised:
            apply_overrides(run, [override])
        assert said in str(raised.value)


def test_without_peft_it_is_told_before_any_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"actor\.lora\.rank=4 needs peft: pip install 'rlmesh\[lora\]'"):
        Run(**settings(actor=ActorSettings(lora=LoraSettings(rank=4))))


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed (make engines)")
@pytest.mark.parametrize("train", ["ddp", "fsdp2"])
def test_a_run_trains_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: Any) -> None:
    from safetensors.torch import load_file

    monkeypatch.chdir(tmp_path)
    # No adapter changes the head: one with small weights would hold all probabilities near each other.
    tiny = make_tiny(tmp_path / "tiny", initializer_range=0.2)
    actor = ActorSettings(lr=1e-2, ranks=2, lora=LoraSettings(rank=8))
    run = small(tiny, steps=12, train=train, actor=actor, algorithm=GRPO(8))
    result = run.submit("adapter", view="plain")
    steps = reported(result.run_dir)
    assert sorted(steps) == list(range(1, 13))
    assert steps[12]["reward_mean"] > steps[1]["reward_mean"] + 0.6
    # The engine has the base model and gets adapters: it says what the trainer says.
    assert all(step["drift_alarm"] == 0 and abs(step["ratio_mean"] - 1) < 1e-3 for step in steps.values())
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny, result.model))
    moved = {name for name in before if not before[name].equal(after[name])}
    assert before.keys() == after.keys() and moved and all("_proj" in name for name in moved)
