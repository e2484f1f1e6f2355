"""`Validation` in the background of a step: what waits for it, and what its failure costs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rlmesh import JobInfo, WorkerContext, acting_as
from rlmesh.errors import PeerLost, UsageError, WeightsNotReady, WeightSyncError
from rlmesh.rl.engines.rollout import Sample, SamplingParams
from rlmesh.rl.evaluation.validation import Validation
from rlmesh.rl.rollout.silence import Silence
from rlmesh.rl.trainers.trainer import Trainer
from tests.own_time import HANG_S

STEPS, SAVED = 9, 4


class Recorded:
    """The reports and alarms of a worker."""

    def __init__(self) -> None:
        self.reports: dict[int, dict[str, float]] = {}
        self.alarms: list[str] = []

    def report(self, *, step: int, total_steps: int, **metrics: float) -> None:
        self.reports[step] = metrics

    def alarm(self, text: str) -> None:
        self.alarms.append(text)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    found = Recorded()
    monkeypatch.setattr(WorkerContext, "report", lambda self, **given: found.report(**given))
    monkeypatch.setattr(WorkerContext, "alarm", lambda self, text: found.alarm(text))
    return found


class QuietEngines:
    """Members of which one samples as many tokens as `tokens` says."""

    ranks = (0,)
    tokens = 0

    def options(self, **given: Any) -> list[Any]:
        return [SimpleNamespace(call=lambda method: SimpleNamespace(result=lambda: self.tokens))]


def trainer(**settings: Any) -> Any:
    """A trainer whose step `SAVED` has begun a checkpoint, without roles."""
    made: Any = Trainer()
    given: dict[str, Any] = {
        "validation": [{}], "validate_every": 2, "steps": STEPS, "keep_best": "",
        "evaluation": SimpleNamespace(background=True), "schedule": SimpleNamespace(staleness=0),
        "rollout": SimpleNamespace(deadline_s=HANG_S),
    }  # fmt: skip
    made.settings = SimpleNamespace(**given | settings)
    made.__dict__ |= {
        "actor": object(), "engines": QuietEngines(), "shares": False, "algorithm": SimpleNamespace(needs=()),
        "checkpoints": SimpleNamespace(writer=SimpleNamespace(begun=SAVED)), "tell": lambda text: None,
    }  # fmt: skip
    made.validation = Validation(made)
    return made


class DrawsItself(Trainer):
    def draw(self, prompts: Any, params: Any) -> list[Any]:
        return []


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_any_pipeline_validates_in_the_background(told: Recorded, staleness: int) -> None:
    """Ahead of training, once the engines are idle or never; else once the step has its groups."""
    order: list[str] = []
    made = trainer(schedule=SimpleNamespace(staleness=staleness))

    def await_idle() -> bool:
        order.append("idle")
        return True

    made.buffer = SimpleNamespace(await_idle=await_idle)

    def validate(step: int) -> dict[str, float]:
        order.append(f"validates {step}")
        return {}

    made.validation.run = validate
    assert made.validation.postpone(2)
    link: Any = None
    with acting_as(WorkerContext(JobInfo("job", "id", None), "TRAINER", 0, 1, link)):
        made.validation.begin(ahead=staleness == 0)
        assert order == [] and made.validation._running is None
        made.validation.begin(ahead=staleness > 0)
        made.validation.end()
    assert order == (["idle"] if staleness else []) + ["validates 2"] and 2 in told.reports


def test_engines_that_were_not_idle_are_not_validated(told: Recorded) -> None:
    made = trainer(schedule=SimpleNamespace(staleness=1))
    made.buffer = SimpleNamespace(await_idle=lambda: False)
    made.validation.run = lambda step: pytest.fail("the run goes back")
    assert made.validation.postpone(2)
    made.validation.begin(ahead=True)
    made.validation.drop()
    assert told.reports == {}


def test_a_trainer_that_samples_ahead_by_itself_validates_between_steps() -> None:
    for kind, staleness, possible in ((Trainer, 1, True), (DrawsItself, 1, False), (DrawsItself, 0, True)):
        made = trainer(schedule=SimpleNamespace(staleness=staleness))
        made.__class__ = kind
        assert made.validation.postpone(2) == possible


def test_a_validation_that_hangs_ends_the_run(told: Recorded) -> None:
    ends = threading.Event()
    made = trainer(rollout=SimpleNamespace(deadline_s=0.05))
    try:
        with pytest.raises(TimeoutError, match=r"step 2, in which nothing has moved for rollout\.deadline_s"):
            run_in_background(made, lambda step: {"val/never": float(ends.wait(HANG_S))})
    finally:
        ends.set()
        made.validation._thread.join(HANG_S)
    assert told.alarms == ["the training waits for the validation of step 2, for more than 0.05 s"]


def test_a_validation_that_samples_on_is_waited_for(told: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline is of silence, and not of a whole validation."""
    clock, ends, made = [0.0], threading.Event(), trainer(rollout=SimpleNamespace(deadline_s=1000.0))

    class Ticking(Silence):
        def __init__(self, progress: Any, deadline_s: float) -> None:
            super().__init__(progress, deadline_s, lambda: clock[0])

        def look(self) -> None:
            clock[0] += 400.0
            made.engines.tokens += 1
            super().look()
            if clock[0] > 4000.0:
                ends.set()

    monkeypatch.setattr("rlmesh.rl.evaluation.validation.LOOK_S", 0.001)
    monkeypatch.setattr("rlmesh.rl.evaluation.validation.Silence", Ticking)
    run_in_background(made, lambda step: {"val/over": float(ends.wait(HANG_S))})
    assert told.reports == {2: {"val/over": 1.0}}


@pytest.mark.parametrize("keep_best", ["val/reward_mean", "-val/letters/mean@1"])
def test_a_checkpoint_does_not_miss_the_metric_of_the_best_one(keep_best: str) -> None:
    validation = trainer(keep_best=keep_best).validation
    assert not validation.postpone(SAVED), "its checkpoint would be complete without the metric, and pruned"
    assert validation.postpone(SAVED + 2), "no checkpoint waits for it"
    assert trainer(keep_best="reward_mean").validation.postpone(SAVED)


def run_in_background(made: Any, work: Callable[[int], dict[str, float]]) -> None:
    made.validation.run = work
    assert made.validation.postpone(2)
    made.validation.begin()
    link: Any = None
    with acting_as(WorkerContext(JobInfo("job", "id", None), "TRAINER", 0, 1, link)):
        made.validation.end()


def test_an_engine_that_dies_costs_a_validation_and_not_the_run(told: Recorded) -> None:
    pushes: list[str] = []
    made = trainer()
    made._push = lambda push: pushes.append("push")
    made.__dict__ |= {"weight_sync": SimpleNamespace(catch_up=None), "hold": lambda role: None}

    def work(step: int) -> dict[str, float]:
        made.push_again()  # as `generate` does for an engine without weights
        return {}

    run_in_background(made, work)
    assert pushes == [], "the actor has later weights by then"
    assert told.reports == {} and len(told.alarms) == 1
    assert told.alarms[0].startswith("the validation of step 2 is missing, and training goes on: an engine was lost")
    made.push_again()
    assert pushes == ["push"], "on the loop's own thread"


@pytest.mark.parametrize("error", [PeerLost("died"), WeightsNotReady("none"), WeightSyncError("late")])
def test_lost_engines_are_told(told: Recorded, error: Exception) -> None:
    def work(step: int) -> dict[str, float]:
        raise error

    run_in_background(trainer(), work)
    assert len(told.alarms) == 1


def test_another_error_ends_the_run(told: Recorded) -> None:
    def work(step: int) -> dict[str, float]:
        raise UsageError("the reward has a fault")

    with pytest.raises(UsageError, match="has a fault"):
        run_in_background(trainer(), work)


def test_a_validation_that_takes_long_is_told(told: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlmesh.rl.evaluation.validation.LONG_S", 0.01)
    slow = threading.Event()

    def alarm(self: WorkerContext, text: str) -> None:
        told.alarm(text)
        slow.set()

    monkeypatch.setattr(WorkerContext, "alarm", alarm)
    run_in_background(trainer(), lambda step: {"val/alarmed": float(slow.wait(HANG_S))})
    assert told.reports == {2: {"val/alarmed": 1.0}}
    assert told.alarms == ["the training waits for the validation of step 2, for more than 0.01 s"]


def test_numbers_come_under_their_own_step(told: Recorded) -> None:
    run_in_background(trainer(), lambda step: {"val/reward_mean": 0.5})
    assert told.reports == {2: {"val/reward_mean": 0.5}} and told.alarms == []


@pytest.mark.parametrize(
    ("last", "validates"), [({"loss": 1.0, "step_time_s": 3.0}, True), ({"val/reward_mean": 1.0}, False)]
)
def test_a_validation_that_a_stop_prevented_is_made_when_the_run_goes_on(
    told: Recorded, last: dict[str, float], validates: bool
) -> None:
    class Role:
        def call(self, method: str, *given: Any) -> Any:
            return SimpleNamespace(result=lambda: [SAVED])

    made = trainer()
    nothing = SimpleNamespace(pause=lambda: None, advance=lambda version: None)
    made.version, made.holder, made.buffer = 0, None, nothing
    made.checkpoints = SimpleNamespace(step_after=lambda reached: SAVED, restore=lambda step: dict(last))
    made.__dict__ |= {
        "connect": lambda: None, "publish": lambda: None, "trained": lambda: [("actor", Role(), None)],
        "validate": lambda: {"val/reward_mean": 2.0},
    }  # fmt: skip
    link: Any = None
    with acting_as(WorkerContext(JobInfo("job", "id", None), "TRAINER", 0, 1, link)):
        made.begin()
    # With the step's other metrics: in views, the reports of a new process replace those of the one before.
    assert told.reports == ({SAVED: {"loss": 1.0, "val/reward_mean": 2.0}} if validates else {})
    assert made.last == ({**last, "val/reward_mean": 2.0} if validates else last)


def test_the_seed_of_a_response_does_not_depend_on_the_engines() -> None:
    def seeds(count: int) -> list[int]:
        found: dict[int, int] = {}

        def call_batch(method: str, rows: int, requests: Any, params: SamplingParams) -> list[Any]:
            samples = []
            for rank in range(count):
                for request in requests[rows * rank // count : rows * (rank + 1) // count]:
                    found[request.prompt[0]] = request.seeds[0]
                    samples.append([Sample.of(request.prompt, [1], [-0.5], 3, "stop")])
            return samples

        made = trainer()
        made.__dict__["engines"] = SimpleNamespace(call_batch=call_batch, role="ROLLOUT", ranks=())
        made.__dict__["weight_sync"] = SimpleNamespace(served=())
        made.settings.rollout = SimpleNamespace(params=lambda greedy, seed: SamplingParams(4, seed=seed))
        made.generate([[number] for number in range(6)], seed=5)
        return [found[number] for number in range(6)]

    assert seeds(1) == seeds(2) == seeds(4) and len(set(seeds(1))) == 6
