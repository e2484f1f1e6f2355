"""Trainings by each pipeline: same samples and same weights, whatever happens between."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlmesh.errors import CallTimeout, PeerLost, SourceRestarted, StaleIncarnation, WeightSyncError
from rlmesh.rl.algorithms import GRPO
from rlmesh.rl.rewards import Reward
from rlmesh.rl.rollout.ledger import LEDGER, faults_of, read_rows
from rlmesh.rl.rollout.role_engines import push_to_all
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.trainer import Trainer
from tests.rl import run_job
from tests.rl.conftest import make_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return make_tiny(tmp_path_factory.mktemp("model"))


def run_of(model: Path, pipeline: str, **rollout: Any) -> Run:
    run = run_job.make(str(model), "grpo", "auto")
    return replace(
        run, pipeline=pipeline, rewards=[Reward(run_job.is_a, inline=True)], rollout=replace(run.rollout, **rollout),
        algorithm=GRPO(samples=4, correction=None if pipeline == "sync" else "token"),
    )  # fmt: skip


def reports(run_dir: Path) -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["metrics"] for line in lines if "reward_mean" in line["metrics"]}


@pytest.mark.parametrize("pipeline", [pytest.param("sync", marks=pytest.mark.slow), "one-step-off"])
def test_a_run_that_breaks_off_goes_on_with_the_same_samples_and_weights(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipeline: str
) -> None:
    calm = run_of(model, pipeline).here(run_dir=tmp_path / "calm")
    finish: Callable[..., None] = Trainer.finish

    def breaks(self: Any, step: int, *args: Any) -> None:
        if step == 6:
            raise ConnectionError("the power is off")
        finish(self, step, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "finish", breaks)
        with pytest.raises(ConnectionError):
            run_of(model, pipeline).here(run_dir=tmp_path / "broken")
    broken = run_of(model, pipeline).here(run_dir=tmp_path / "broken")
    weights = [(folder.model / "model.safetensors").read_bytes() for folder in (calm, broken)]
    assert weights[0] == weights[1]
    assert faults_of(tmp_path / "broken" / LEDGER) == []
    rows = list(read_rows(tmp_path / "broken" / LEDGER, void=True))
    assert {row.step for row in rows if row.void and row.state == "trained"} <= {5, 6} and any(row.void for row in rows)
    staleness = int(pipeline != "sync")
    assert all(
        report["buffer/staleness_max"] == staleness for step, report in reports(calm.run_dir).items() if step > 1
    )


def test_dynamic_sampling_keeps_the_batch_whole(model: Path, tmp_path: Path) -> None:
    run = run_of(model, "one-step-off", dynamic_sampling=True, refill=3.0, oversampling=1.5)
    result = run.here(run_dir=tmp_path / "run")
    found = reports(result.run_dir)
    assert faults_of(tmp_path / "run" / LEDGER) == []
    dropped = [row for row in read_rows(tmp_path / "run" / LEDGER) if row.state == "dropped"]
    assert dropped and sum(report["buffer/dropped"] for report in found.values()) == len(dropped)


def lost(cause: Exception | None, receiver: str | None = None) -> WeightSyncError:
    error = WeightSyncError("nothing was committed")
    error.receiver, error.__cause__ = receiver, cause
    return error


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (lost(None, "ROLLOUT:1"), True),
        (lost(StaleIncarnation("it was restarted since")), True),
        (lost(PeerLost("killed by SIGKILL")), True),
        (lost(ValueError("no such tensor")), False),
        (lost(None), False),
        (SourceRestarted("the actor lost its training"), False),
    ],
)
def test_a_push_is_made_again_if_an_engine_was_lost(error: Exception, again: bool) -> None:
    settings = SimpleNamespace(rollout=SimpleNamespace(deadline_s=60.0))
    trainer: Any = SimpleNamespace(hold=lambda role: None, engines="engines", settings=settings)
    pushes: list[int] = []

    def push() -> None:
        pushes.append(1)
        if len(pushes) == 1 or not again:
            raise error

    if again:
        Trainer._push(trainer, push)
        assert len(pushes) == 2
        with pytest.raises(type(error)):
            Trainer._push(trainer, lambda: (_ for _ in ()).throw(error))
    else:
        with pytest.raises(type(error)):
            Trainer._push(trainer, push)
        assert len(pushes) == 1


def starts() -> WeightSyncError:
    return lost(CallTimeout("its member has not published an endpoint yet", executed="no"))


@pytest.mark.parametrize(("attempts", "pushed"), [(9, True), (14, False)])
def test_an_engine_that_starts_slowly_is_waited_for(attempts: int, pushed: bool) -> None:
    """Each attempt waits for a minute; a large model takes minutes to load."""
    clock, calls = [0.0], list[str]()

    def push() -> None:
        clock[0] += 60.0
        calls.append("push")
        if len(calls) <= 2 * attempts:
            raise starts()

    def make() -> None:
        push_to_all(push, lambda: None, lambda: calls.append("after"), wait_s=600.0, clock=lambda: clock[0])

    if pushed:
        make()
        assert calls.count("push") == attempts + 1 and calls.count("after") == attempts
    else:
        with pytest.raises(WeightSyncError):
            make()
        assert clock[0] == 600.0
    asked = lost(CallTimeout("no answer", executed="maybe"))
    with pytest.raises(WeightSyncError):
        push_to_all(lambda: (_ for _ in ()).throw(asked), lambda: None, lambda: None, wait_s=600.0)


@pytest.mark.slow
def test_engines_of_a_job_sample_while_it_trains(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One-step-off gives the same numbers with two engines as in one process; async keeps its bound."""
    monkeypatch.chdir(tmp_path)
    here = run_of(model, "one-step-off").here(run_dir=tmp_path / "here")
    job = run_of(model, "one-step-off", engines=2).submit("off", view="none")
    rewards = [{s: report["reward_mean"] for s, report in reports(one.run_dir).items()} for one in (here, job)]
    assert rewards[0] == pytest.approx(rewards[1], abs=1e-6) and len(rewards[0]) == 8
    ahead = run_of(model, "async(staleness=2)", engines=2).submit("async", view="none")
    for one in (job, ahead):
        assert faults_of(one.run_dir / LEDGER) == []
    assert max(report["buffer/staleness_max"] for report in reports(ahead.run_dir).values()) == 2
    assert all(report["drift_alarm"] == 0 for report in reports(ahead.run_dir).values())
