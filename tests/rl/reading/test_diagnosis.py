"""`rlmesh doctor RUN`: real small runs with a planted bottleneck each, and reports with figures that are made up."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from rlmesh.cli.main import main
from rlmesh.errors import UsageError
from rlmesh.rl.algorithms import GRPO
from rlmesh.rl.evaluation.saved_run import load_saved_run
from rlmesh.rl.evaluation.settings import ValidationSettings
from rlmesh.rl.reading.diagnosis import Diagnosis, diagnose
from rlmesh.rl.reading.phases import StepPhases
from rlmesh.rl.reading.steps import StepReported, read_steps
from rlmesh.rl.rewards import Reward, RewardModel
from rlmesh.rl.roles.fused import ActorRollout
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import ActorSettings, RolloutSettings
from tests.rl.checkpoints.runs import make
from tests.rl.reading.slow_engines import job_of
from tests.rl.reading.slow_scorer import slow
from tests.rl.run_job import ROWS


def diagnosed(run_dir: Path) -> Diagnosis:
    return diagnose(read_steps(run_dir), load_saved_run(run_dir))


def with_changes(model: Path, **changes: Any) -> Run:
    return replace(make(model), **changes)


def trained(tiny: Path, run_dir: Path, **changes: Any) -> Diagnosis:
    with_changes(tiny, **{"steps": 3, "save_every": 3, **changes}).here(run_dir=run_dir)
    return diagnosed(run_dir)


# Real runs, each with one planted bottleneck.


@pytest.mark.slow
def test_a_slow_scorer_is_the_bottleneck(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = trained(tiny, tmp_path / "run", rewards=[Reward(slow)], reward_workers=1)
    assert found.bottleneck == "scoring", str(found)
    assert found.parts["scoring"] > 32 * 0.015 * 0.9  # 32 responses per step, one process
    assert found.advice.setting == "reward_workers" and int(found.advice.value) > 1
    assert main(["doctor", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().out
    assert "bottleneck: scoring" in told and f"change: reward_workers={found.advice.value}" in told


def test_a_slow_scorer_inside_of_the_trainer_must_leave_it(tiny: Path, tmp_path: Path) -> None:
    found = trained(tiny, tmp_path / "run", rewards=[Reward(slow, inline=True)])
    assert (found.bottleneck, found.advice.setting, found.advice.value) == ("scoring", "Reward(inline)", "False")


def test_a_token_budget_that_is_too_small_is_the_bottleneck(tiny: Path, tmp_path: Path) -> None:
    small = ActorSettings(lr=1e-3, token_budget=4)
    found = trained(tiny, tmp_path / "run", actor=small, rollout=RolloutSettings(max_tokens=2))
    assert found.bottleneck == "training", str(found)
    assert found.advice.setting == "actor.token_budget" and int(found.advice.value) >= 64
    # The advice helps: the same step with that budget takes less time.
    cured = trained(
        tiny, tmp_path / "cured", rollout=RolloutSettings(max_tokens=2),
        actor=replace(small, token_budget=int(found.advice.value)),
    )  # fmt: skip
    reported = read_steps(tmp_path / "cured")[-1].metrics
    assert reported["packs/passes"] < 4 and cured.parts["training"] < found.parts["training"] / 2


def test_a_slow_engine_is_the_bottleneck(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = ActorRollout.sample_in_turn

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.5)
        return sample(*arguments)

    monkeypatch.setattr(ActorRollout, "sample_in_turn", slowly)
    found = trained(tiny, tmp_path / "run")
    assert found.bottleneck == "sampling", str(found)
    assert found.advice.setting in ("rollout.engines", "pipeline")
    assert found.parts["sampling"] > 0.5 > found.parts["scoring"]
    assert read_steps(tmp_path / "run")[-1].metrics["buffer/engines_busy"] > 0.3


def test_a_validation_that_every_step_waits_for_is_the_bottleneck(tiny: Path, tmp_path: Path) -> None:
    long = ValidationSettings(samples=8, temperature=1.0)
    found = trained(tiny, tmp_path / "run", validation=ROWS, validate_every=1, evaluation=long)
    assert found.bottleneck == "validating", str(found)
    assert found.advice.setting == "validate_every" and int(found.advice.value) > 1


@pytest.mark.slow
def test_one_engine_too_few_is_the_bottleneck_of_a_job(tiny: Path, tmp_path: Path) -> None:
    def run(engines: int) -> tuple[Diagnosis, float]:
        settings = with_changes(
            tiny, pipeline="one-step-off", rollout=RolloutSettings(max_tokens=4, engines=engines), steps=4,
            save_every=4, algorithm=GRPO(samples=4, correction="token"),
        )  # fmt: skip
        run_dir = tmp_path / str(engines)
        job_of(settings).submit("short", run_dir=run_dir)
        assert read_steps(run_dir)[-1].metrics["buffer/engines"] == engines
        return diagnosed(run_dir), sum(one.metrics["buffer/engines_busy"] for one in read_steps(run_dir)[1:]) / 3

    found, busy = run(1)
    assert found.bottleneck == "sampling" and busy > 0.5, str(found)
    assert found.advice.setting == "rollout.engines" and int(found.advice.value) >= 2, str(found)
    more, _ = run(2)  # the advice helps
    assert more.parts["sampling"] < 0.75 * found.parts["sampling"], f"{found}\n{more}"


# Figures that are made up.


def reports(count: int = 4, **metrics: float) -> list[StepReported]:
    usual = {
        "time/wait_s": 1.0, "time/evaluate_s": 0.1, "time/train_s": 1.0, "time/push_s": 0.1, "time/save_s": 0.0,
        "time/drain_s": 0.0, "time/validation_s": 0.0, "buffer/trainer_wait_s": 1.0, "buffer/scoring_wait_s": 0.0,
        "buffer/engines_busy": 0.4, "buffer/engines": 1.0, "memory/actor": 0.5, "packs/passes": 1.0,
        "packs/tokens": 8000.0,
    }  # fmt: skip
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    found = usual | named
    whole = sum(found[f"time/{name}_s"] for name in ("wait", "evaluate", "train", "push", "save", "drain"))
    return [StepReported(step, float(step), found | {"step_time_s": whole}) for step in range(1, count + 1)]


@pytest.fixture
def run(tiny: Path) -> Callable[..., Run]:
    return lambda **changes: with_changes(tiny, **changes)


def test_parts_add_up_to_the_step(run: Callable[..., Run]) -> None:
    found = diagnose(reports(time__wait_s=3.0, buffer__scoring_wait_s=0.5, time__drain_s=0.25), run())
    assert found.step_s == pytest.approx(sum(found.parts.values()))
    assert found.step_s == pytest.approx(3.0 + 0.25 + 0.1 + 1.0 + 0.1)
    assert found.parts["sampling"] == pytest.approx(2.75) and found.parts["scoring"] == pytest.approx(0.5)
    assert (found.first, found.count) == (2, 3)  # without the first step


def test_the_time_after_a_validated_step_is_that_of_the_validation() -> None:
    steps = reports(3, time__between_s=2.0)
    steps[1] = replace(steps[1], metrics={**steps[1].metrics, "val/reward_mean": 1.0})
    found = diagnose(steps, None)
    assert found.parts["validating"] == pytest.approx(1.0)  # of two steps, one follows a validation
    assert found.parts["other"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("metrics", "changes", "bottleneck", "setting", "value"),
    [
        ({"time__wait_s": 2.0}, {}, "sampling", "pipeline", "one-step-off"),
        (
            {"time__wait_s": 2.0, "time__train_s": 0.2}, {"pipeline": "one-step-off"},
            "sampling", "rollout.engines", "5",
        ),
        (
            {"time__wait_s": 9.0, "buffer__engines": 4.0, "buffer__engines_busy": 0.3}, {"pipeline": "one-step-off"},
            "sampling", "pipeline", "async(staleness=2)",
        ),
        (
            {"time__wait_s": 3.0, "buffer__dropped": 8.0}, {"rollout": RolloutSettings(dynamic_sampling=True)},
            "sampling", "rollout.oversampling", "2.0",
        ),
        ({"time__wait_s": 2.0}, {"placement": "shared", "devices_per_node": 2}, "sampling", "rollout.engine", "vllm"),
        (
            {"time__wait_s": 2.0}, {"placement": "shared", "devices_per_node": 2, "rollout": "vllm"},
            "sampling", "devices_per_node", "4",
        ),
        ({"time__train_s": 4.0, "packs__ranks_wait": 0.4}, {}, "training", "actor.token_budget", "4096"),
        ({"time__train_s": 4.0}, {}, "training", "actor.ranks", "2"),
        (
            {"time__train_s": 4.0, "memory__actor": 0.2}, {"actor": ActorSettings(activation_checkpointing=True)},
            "training", "actor.activation_checkpointing", "false",
        ),
        # Many small passes, and no memory for larger ones.
        (
            {"time__train_s": 4.0, "packs__passes": 20.0, "packs__tokens": 900.0, "memory__actor": 0.9}, {},
            "training", "actor.ranks", "2",
        ),
        ({"time__evaluate_s": 4.0}, {"algorithm": GRPO(samples=4, kl=0.1)}, "evaluating", "algorithm.kl", "0"),
        ({"time__push_s": 4.0}, {}, "pushing", "batch_size", "16"),
        ({"time__save_s": 4.0}, {}, "saving", "save_every", "16"),
        (
            {"buffer__scoring_wait_s": 3.0, "time__wait_s": 3.0}, {"rewards": [RewardModel("helpful", members=2)]},
            "scoring", "RewardModel(members)", "15",
        ),
    ],
)  # fmt: skip
def test_each_bottleneck_has_one_setting(
    run: Callable[..., Run], metrics: dict[str, float], changes: dict[str, Any], bottleneck: str, setting: str,
    value: str,
) -> None:  # fmt: skip
    found = diagnose(reports(4, **metrics), run(**changes))
    assert (found.bottleneck, found.advice.setting, found.advice.value) == (bottleneck, setting, value), str(found)
    other = setting.startswith("algorithm.") or setting in ("batch_size", "pipeline", "rollout.oversampling")
    assert ("begin a new run" in found.advice.why) == other, "a training is not changed without a word"


@pytest.mark.parametrize(
    ("workers", "said"),
    [(1, "1 process computes the reward 'code'; with"), (2, "2 processes compute the reward 'code'; with")],
)
def test_the_advice_on_scoring_names_processes_and_rewards(run: Callable[..., Run], workers: int, said: str) -> None:
    code = Reward(slow, name="code")
    found = diagnose(reports(buffer__scoring_wait_s=3.0, time__wait_s=3.0), run(rewards=[code], reward_workers=workers))
    assert found.advice.why.startswith("the trainer waits 3 s of 4.2 s for rewards alone: all responses are sampled; ")
    assert said in found.advice.why


def test_other_losses_are_notes(run: Callable[..., Run]) -> None:
    steps = reports(
        time__train_s=4.0, memory__actor=0.95, cut_off_share=0.5, buffer__dropped=4.0, buffer__failed=1.0,
        buffer__staleness_mean=1.0, reward_failed=0.1, buffer__engines_busy=0.2, steps_lost=3.0,
    )  # fmt: skip
    told = str(diagnose(steps, run(pipeline="one-step-off")))
    for figure in ("95%", "idle 80%", "cuts off 50%", "4.0 groups", "fail on 10%", "1.0 versions", "undone 3 steps"):
        assert figure in told, told


def test_reports_without_times_are_refused(tmp_path: Path) -> None:
    old = [StepReported(1, 0.0, {"step_time_s": 1.0})]
    with pytest.raises(UsageError, match="no times of phases"):
        diagnose(old)
    with pytest.raises(UsageError, match=r"no metrics\.jsonl"):
        read_steps(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"at": 0, "step": 0, "metrics": {"val/x": 1}}) + "\n")
    with pytest.raises(UsageError, match="no report of a training step"):
        read_steps(tmp_path)


def test_of_a_step_that_was_made_again_the_last_report_counts(tmp_path: Path) -> None:
    lines = [
        {"at": at, "step": step, "metrics": {"step_time_s": 1.0, "loss": float(at)}}
        for at, step in enumerate((1, 2, 3, 2, 3))
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"at": 9, "step_time_s"'
    (tmp_path / "metrics.jsonl").write_text(text)
    assert [(one.step, one.metrics["loss"]) for one in read_steps(tmp_path)] == [(1, 0.0), (2, 3.0), (3, 4.0)]


def test_steps_after_one_that_was_made_again_do_not_count(tmp_path: Path) -> None:
    """The run reached step 6, went back to the checkpoint of step 2, and has made step 3 again so far."""
    lines = [
        {"at": at, "step": step, "metrics": {"step_time_s": 1.0, "time/train_s": 1.0, "steps_lost": float(lost)}}
        for at, (step, lost) in enumerate([*((step, 0) for step in range(1, 7)), (3, 4)])
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    steps = read_steps(tmp_path)
    assert [one.step for one in steps] == [1, 2, 3]
    found = diagnose(steps)
    assert (found.first, found.last) == (2, 3) and "restarts have undone 4 steps" in found.notes


def test_phases_follow_each_other() -> None:
    now = [0.0]
    phases = StepPhases(lambda: now[0])

    def pass_by(seconds: float) -> None:
        now[0] += seconds

    last: dict[str, float] = {}
    for _ in range(2):
        phases.begin()
        pass_by(1)
        phases.end("wait")
        pass_by(2)
        phases.end("train")
        pass_by(0.5)
        last = phases.report()
        pass_by(4)
    assert last == {"time/between_s": 4.0, "time/wait_s": 1.0, "time/train_s": 2.0, "step_time_s": 3.5}


def test_a_folder_without_a_run_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", str(tmp_path)]) == 2
    assert "metrics.jsonl" in capsys.readouterr().err
