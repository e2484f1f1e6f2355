"""A run goes on from its checkpoints as if nothing had happened, or says why it cannot."""

from __future__ import annotations

import json
import random
import re
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlmesh.errors import UsageError
from rlmesh.rl.algorithms import SFT
from rlmesh.rl.checkpoints.store import checkpoint_folder, read_checkpoint, saved_step
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import ActorSettings, RolloutSettings
from rlmesh.rl.trainers.trainer import Trainer
from tests.rl.checkpoints.runs import PROMPTS, content, make, make_model, metrics_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run directory of an undisturbed run."""
    found: dict[str, Path] = {}

    def run(algorithm: str) -> Path:
        if algorithm not in found:
            found[algorithm] = tmp_path_factory.mktemp("whole") / algorithm
            make(model, algorithm).here(run_dir=found[algorithm])
        return found[algorithm]

    return run


@pytest.fixture
def saved(whole: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of a run with a critic whose latest checkpoint is that of step 6."""
    folder = tmp_path / "copy"
    shutil.copytree(whole("ppo"), folder)
    shutil.rmtree(checkpoint_folder(folder, 8))
    for name in ("summary.json", "progress.json"):
        (folder / name).unlink()
    return folder


def test_samples_that_were_made_ahead_are_not_lost(model: Path, tmp_path: Path) -> None:
    """One step off: the checkpoint has the samples of the next step, which earlier weights have made."""
    run, run_dir = make(model, pipeline="one-step-off"), tmp_path / "run"
    run.here(run_dir=tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", run_dir)
    shutil.rmtree(checkpoint_folder(run_dir, 8))
    (run_dir / "summary.json").unlink()
    slots = read_checkpoint(checkpoint_folder(run_dir, 6)).trainer_state()["objects"]["buffer"]["slots"]
    assert len(slots) == 8 and all("group" in slot for slot in slots)
    run.here(run_dir=run_dir)
    assert content(run_dir) == content(tmp_path / "whole")
    assert metrics_of(run_dir) == metrics_of(tmp_path / "whole")
    with pytest.raises(UsageError, match="pipeline='sync', before 'one-step-off'"):
        make(model, steps=9).here(run_dir=run_dir)


class Draws(Trainer):
    """Samples by itself, with random numbers of its own."""

    def draw(self, prompts: Any, params: Any) -> Any:
        number = random.getrandbits(16) + int(np.random.randint(1 << 16)) + int(torch.randint(1 << 16, ()))
        return super().draw(prompts, replace(params, seed=(params.seed + number) % 2**31))


@pytest.mark.parametrize("pipeline", ["sync", pytest.param("one-step-off", marks=pytest.mark.slow)])
def test_a_trainer_that_samples_by_itself_goes_on_with_the_same_samples(
    model: Path, tmp_path: Path, pipeline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlmesh.rl.trainers.here.Trainer", Draws)
    make(model, pipeline=pipeline).here(run_dir=tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    shutil.rmtree(checkpoint_folder(tmp_path / "run", 8))
    (tmp_path / "run" / "summary.json").unlink()
    make(model, pipeline=pipeline).here(run_dir=tmp_path / "run")
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "whole")
    assert content(tmp_path / "run") == content(tmp_path / "whole")


@pytest.mark.parametrize(
    ("algorithm", "stop"),
    [
        ("grpo", 3), pytest.param("ppo", 1, marks=pytest.mark.slow), pytest.param("ppo", 4, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_run_that_goes_on_gives_the_same_bits(
    model: Path, tmp_path: Path, whole: Callable[[str], Path], algorithm: str, stop: int
) -> None:
    """The controller and the place in the data go on where they were; step 4 is at the edge of an epoch."""
    run_dir = tmp_path / "run"
    make(model, algorithm, steps=stop).here(run_dir=run_dir)
    make(model, algorithm).here(run_dir=run_dir)
    assert content(run_dir) == content(whole(algorithm))
    assert metrics_of(run_dir) == metrics_of(whole(algorithm))


@pytest.mark.slow
def test_the_dropout_of_supervised_steps_is_the_same_after_a_resume(model: Path, tmp_path: Path) -> None:
    rows = [{**row, "response": "ab"} for row in PROMPTS]

    def supervised(steps: int) -> Run:
        return make(model, algorithm=SFT(), data=rows, rewards=[], steps=steps)

    supervised(4).here(run_dir=tmp_path / "whole")
    supervised(2).here(run_dir=tmp_path / "run")
    supervised(4).here(run_dir=tmp_path / "run")
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "whole")
    assert content(tmp_path / "run") == content(tmp_path / "whole")


def test_the_states_of_the_run_do_change(whole: Callable[[str], Path]) -> None:
    """Or the tests above would show nothing."""
    steps = metrics_of(whole("ppo"))
    assert [steps[step]["batches"] for step in range(1, 9)] == [*range(1, 9)]
    assert len({step["kl_coefficient"] for number, step in steps.items() if number}) == 8
    checkpoint = read_checkpoint(checkpoint_folder(whole("ppo"), 4))
    assert checkpoint.position == {"seed": 0, "epoch": 1, "index": 2, "prompts": 30}
    assert checkpoint.trainer_state()["objects"]["algorithm"]["batches"] == 4


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("actor", "actor/current.json"), ("", "checkpoint.json"),
        pytest.param("critic", "critic/step-*/__0_0.distcp", marks=pytest.mark.slow),
        pytest.param("actor", "actor/step-*/.metadata", marks=pytest.mark.slow),
        pytest.param("trainer", "trainer/state.json", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_part_that_was_altered_or_is_torn_is_refused_by_name(model: Path, saved: Path, part: str, name: str) -> None:
    folder = checkpoint_folder(saved, 6)
    (path,) = folder.glob(name)
    good = path.read_bytes()
    middle = len(good) // 2
    for bad in (good[:-9], good[:middle] + bytes([good[middle] ^ 4]) + good[middle + 1 :]):
        path.write_bytes(bad)
        with pytest.raises(UsageError, match=re.escape(str(path))) as raised:
            make(model, "ppo").here(run_dir=saved)
        assert part in str(raised.value)
    shutil.rmtree(folder)
    make(model, "ppo").here(run_dir=saved)  # goes on from step 4


@pytest.mark.slow
def test_a_checkpoint_counts_only_with_all_parts(model: Path, saved: Path, whole: Callable[[str], Path]) -> None:
    (checkpoint_folder(saved, 6) / "checkpoint.json").unlink()
    assert saved_step(saved) == 4
    make(model, "ppo").here(run_dir=saved)
    assert content(saved) == content(whole("ppo"))


def test_a_run_that_is_complete_says_so(
    model: Path, whole: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = whole("grpo")
    for start in (make(model).here, make(model).submit):
        result = start(run_dir=run_dir)
        assert result.model == run_dir / "model" and result.metrics["reward_mean"] > 0
        assert f"already complete: 8 steps are done; the policy is in {run_dir / 'model'}" in capsys.readouterr().out
        assert make(model, steps=6).here(run_dir=run_dir).metrics == result.metrics
        capsys.readouterr()


@pytest.mark.slow
def test_a_run_goes_on_beyond_its_former_end(model: Path, saved: Path, whole: Callable[[str], Path]) -> None:
    make(model, "ppo", steps=7).here(run_dir=saved)
    make(model, "ppo").here(run_dir=saved)
    assert content(saved) == content(whole("ppo"))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"seed": 1}, "seed=1, before 0 (the order of prompts"),
        ({"batch_size": 6}, "batch_size=6, before 8"),
        ({"data": PROMPTS[:29]}, "data: other rows, or in another order"),
        ({"data": PROMPTS[::-1]}, "data: other rows, or in another order"),
        ({"actor": ActorSettings(lr=1e-2, epochs=2)}, "actor.epochs=2, before 1"),
    ],
)
def test_settings_that_may_not_change_are_refused_before_anything_starts(
    model: Path, saved: Path, changed: dict[str, Any], says: str
) -> None:
    for begin in (make(model, "ppo", **changed).here, make(model, "ppo", **changed).submit):
        with pytest.raises(UsageError, match="cannot go on from step 6") as raised:
            begin(run_dir=saved)
        assert says in str(raised.value) and "restore=CHECKPOINT" in str(raised.value)


def test_settings_that_may_change_are_told(model: Path, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(model, "ppo", steps=7, actor=ActorSettings(lr=5e-3, token_budget=4096), keep_last=1)
    run.here(run_dir=saved)
    told = capsys.readouterr().out
    assert "settings changed since step 6 was saved" in told
    assert "actor.lr=0.005, before 0.01: from step 7 on" in told
    assert "actor.token_budget=4096, before 8192: the same training up to rounding" in told
    assert "steps=7, before 8: the end of the run" in told and "keep_last" not in told
    assert metrics_of(saved)[7]["lr"] == 5e-3


def test_resume_must_and_never(model: Path, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"resume='never', and .* has the checkpoint of step 6"):
        make(model, "ppo", resume="never").here(run_dir=saved)
    with pytest.raises(UsageError, match=r"resume='must', and .*new has no complete checkpoint"):
        make(model, resume="must").here(run_dir=tmp_path / "new")
    with pytest.raises(UsageError, match="resume='must', and no run directory is named"):
        make(model, resume="must").submit()
    with pytest.raises(UsageError, match="resume='perhaps' must be one of 'auto'"):
        make(model, resume="perhaps")


def test_a_critic_that_the_checkpoint_lacks_is_named(model: Path, whole: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(whole("grpo"), tmp_path / "run")
    with pytest.raises(UsageError, match="has no part 'critic'; it has actor, trainer"):
        make(model, "ppo", steps=9).here(run_dir=tmp_path / "run")


def test_the_latest_and_the_best_are_kept(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(model, save_every=1, keep_last=2, keep_best="-val/reward_mean", validation=PROMPTS[:4], validate_every=3)
    run.here(run_dir=tmp_path)
    scores = {step: -found["val/reward_mean"] for step, found in metrics_of(tmp_path).items() if step and step % 3 == 0}
    scores |= {8: -metrics_of(tmp_path)[8]["val/reward_mean"]}
    best = max(scores, key=lambda step: scores[step])
    kept = {int(path.name[5:]) for path in (tmp_path / "checkpoints").iterdir()}
    assert kept == {7, 8, best}
    assert capsys.readouterr().out.count("step 1 has no metric 'val/reward_mean'") == 1


# Restoring into another run.


def test_weights_of_another_run_begin_a_run(model: Path, whole: Callable[[str], Path], tmp_path: Path) -> None:
    other = whole("ppo")
    for restore, parts in ((other, ("weights",)), (checkpoint_folder(other, 8), ("weights", "optimizer"))):
        run_dir = tmp_path / parts[-1]
        run = make(model, "ppo", restore=str(restore), restore_parts=parts, steps=2, seed=5)
        run.here(run_dir=run_dir)
        first = metrics_of(run_dir)[1]
        assert first["batches"] == 1  # the controller begins anew
        assert first["reward_mean"] > metrics_of(other)[1]["reward_mean"] + 0.1
        assert first["kl"] > 0.01  # the policy is not the reference, which is the model
    weights, optimizer = (content(tmp_path / name) for name in ("weights", "optimizer"))
    assert weights["actor"] != optimizer["actor"] and weights["critic"] != optimizer["critic"]


def test_the_critic_of_another_run_begins_a_run(model: Path, whole: Callable[[str], Path], tmp_path: Path) -> None:
    run = make(model, "ppo", restore=str(whole("ppo")), restore_parts=["critic.weights"], steps=1)
    run.here(run_dir=tmp_path / "run")
    mine, first = metrics_of(tmp_path / "run")[1], metrics_of(whole("ppo"))[1]
    assert mine["reward_mean"] == first["reward_mean"]
    assert mine["critic/value_mean"] != 0 == first["critic/value_mean"]


@pytest.mark.parametrize(
    ("restore", "parts", "says"),
    [
        ("nowhere", ("weights",), "restore: there is no nowhere: name a run directory"),
        (".", ("weights",), "restore: . holds no complete checkpoint"),
        ("grpo", (), "restore_parts=() must be a list of some of weights"),
        ("grpo", "weights", "restore_parts='weights' must be a list of some of weights"),
        ("grpo", ("weight",), "there is no 'weight'; did you mean 'weights'?"),
        ("grpo", ("critic.weights",), "has no critic; it has actor, trainer"),
        ("ppo", ("optimizer",), "'optimizer' without the weights that it belongs to; add 'weights'"),
        ("ppo", ("actor.weights", "critic.optimizer"), "add 'critic.weights'"),
    ],
)
def test_faults_of_what_is_restored_are_told_before_anything_starts(
    model: Path, whole: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restore: str,
    parts: Any, says: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    source = str(whole(restore)) if restore in ("grpo", "ppo") else restore
    with pytest.raises(UsageError, match=re.escape(says)):
        make(model, "ppo", restore=source, restore_parts=parts).submit()


# Failures.


@pytest.mark.case("O21")
def test_a_full_disk_costs_a_checkpoint_and_no_step(
    model: Path, whole: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Files cannot grow beyond a limit that the exported weights keep, and the checkpoint of the optimizer does not."""
    make(model, steps=2).here(run_dir=tmp_path)
    exported = (tmp_path / "model" / "model.safetensors").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (exported * 2, before[1]))
    try:
        result = make(model).here(run_dir=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    told = capfd.readouterr().out
    assert told.count("failed, and training goes on; the checkpoint of step 2 is the latest") == 1, told
    assert "the checkpoint of step 4 failed" in told and "File too large" in told
    assert metrics_of(tmp_path)[8]["saves_failed"] >= 2
    assert saved_step(tmp_path) == 2 and [*(checkpoint_folder(tmp_path, 4)).glob("*/*/*")] == []
    assert content(tmp_path)["model"] == content(whole("grpo"))["model"]
    (tmp_path / "summary.json").unlink()  # as if it had been killed before its end
    assert make(model).here(run_dir=tmp_path).model == result.model
    assert content(tmp_path) == content(whole("grpo"))


def test_an_object_without_its_state_is_refused(model: Path, saved: Path) -> None:
    """A run that had a curriculum of its own cannot go on without one."""
    folder = checkpoint_folder(saved, 6)
    from rlmesh.rl.checkpoints.state import encoded
    from rlmesh.rl.checkpoints.store import CheckpointStore

    checkpoint = read_checkpoint(folder)
    state = checkpoint.trainer_state()
    state["objects"]["curriculum"] = {"level": 7}
    about = {name: dict(getattr(checkpoint, name)) for name in ("metrics", "settings", "position")}
    CheckpointStore(saved).commit(6, ["actor", "critic"], encoded(state), about)
    with pytest.raises(UsageError, match="has a state of 'curriculum', and this run's curriculum has none"):
        make(model, "ppo").here(run_dir=saved)


def _write_prompts(run_dir: Path, step: int, prompts: int) -> None:
    """Change the number of prompts that a checkpoint was written with."""
    from rlmesh.rl.checkpoints.store import _digest

    path = checkpoint_folder(run_dir, step) / "checkpoint.json"
    fields = json.loads(path.read_text())
    del fields["sha256"]
    fields["position"]["prompts"] = prompts
    path.write_text(json.dumps(fields | {"sha256": _digest(fields)}))


def test_another_tokenizer_is_refused(model: Path, saved: Path) -> None:
    _write_prompts(saved, 6, 31)
    with pytest.raises(
        UsageError, match="was written with 31 prompts that are not too long, and now there are 30"
    ) as e:
        make(model, "ppo").here(run_dir=saved)
    folder = checkpoint_folder(saved, 6)
    assert str(e.value).endswith(
        "the tokenizer or its chat template is another one. Go on with the earlier one, or begin a new run with the "
        f"weights: restore={str(folder)!r}"
    )


def test_a_mixture_whose_parts_were_rounded_down_is_refused_as_what_it_is(model: Path, tmp_path: Path) -> None:
    """Earlier versions made an epoch of 10 + 3 prompts of these weights; now it has 10 + 4."""
    data = {}
    for name, rows, weight in (("few", PROMPTS[:10], 1.0), ("many", PROMPTS[10:], 0.36)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data[str(path)] = weight
    run_dir = tmp_path / "run"
    make(model, data=data, steps=2).here(run_dir=run_dir)
    folder = checkpoint_folder(run_dir, 2)
    assert read_checkpoint(folder).position["prompts"] == 14
    _write_prompts(run_dir, 2, 13)
    with pytest.raises(UsageError) as raised:
        make(model, data=data, steps=4).here(run_dir=run_dir)
    assert str(raised.value) == (
        f"{folder} was written by an earlier version of rlmesh, which rounded parts of a mixture down: an epoch had "
        "13 prompts, and now it has 14, so a step would take prompts that earlier steps have used, or leave some out. "
        f"Go on with the version that wrote it, or begin a new run with the weights: restore={str(folder)!r}"
    )
    _write_prompts(run_dir, 2, 12)
    with pytest.raises(UsageError, match=r"12 prompts .* now there are 14: the tokenizer or its chat template"):
        make(model, data=data, steps=4).here(run_dir=run_dir)


def test_other_engines_and_ranks_are_no_change_of_the_training(model: Path) -> None:
    from rlmesh.rl.checkpoints.changes import changes, described

    before = make(model)
    after = replace(before, actor=replace(before.actor, ranks=2), rollout=RolloutSettings(engines=3, max_tokens=4))
    text = changes(described(before), described(after), 6)
    assert text.count("the same training up to rounding") == 2 and "from step" not in text
