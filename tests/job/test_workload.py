"""What code inside a worker knows about itself, and the optional base classes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmesh import BaseRLTrainer, BaseRLWorkload, BaseTrainer, RLRoleType, current_worker
from rlmesh.errors import UsageError
from rlmesh.job.context import COLLOCATION_ENV, JobInfo, StopRequest, WorkerContext, set_current_worker
from rlmesh.job.restarts import RestartEvent
from rlmesh.job.status import Alarm, CallStats, MetricRecord
from rlmesh.runtime.connections.address_book import AddressBook, MemberAddress
from rlmesh.runtime.default_runtime import set_default_runtime
from rlmesh.runtime.runtime import Runtime
from tests.own_time import HANG_S

STATS = CallStats("ACTOR", "step", 1, 1.0, 0.9, 0.0, 0.0, 0.1, 0)


class Link:
    def __init__(self) -> None:
        self.records: list[MetricRecord] = []
        self.alarms: list[Alarm] = []
        self.request: StopRequest | None = None
        self.events: list[RestartEvent] = []
        self.listeners: list[Callable[[RestartEvent], object]] = []
        self.stopped_at: int | None = None

    def report(self, record: MetricRecord) -> None:
        self.records.append(record)

    def alarm(self, alarm: Alarm) -> None:
        self.alarms.append(alarm)

    def boundary(self, step: int) -> StopRequest | None:
        return self.request

    def stopping(self, step: int) -> None:
        self.stopped_at = step

    def take_events(self, wait_s: float) -> tuple[RestartEvent, ...]:
        return tuple(self.events)

    def listen(self, listener: Callable[[RestartEvent], object]) -> None:
        self.listeners.append(listener)

    def tell_listeners(self) -> None:
        for listener in self.listeners:
            for event in self.events:
                listener(event)

    def take_call_stats(self) -> tuple[CallStats, ...]:
        return (STATS,)


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def worker(link: Link) -> Iterator[Callable[[str], WorkerContext]]:
    def make(role: str) -> WorkerContext:
        context = WorkerContext(
            job_info=JobInfo("demo", "demo-1", {"lr": 1.0}, "CPU"),
            role=role,
            rank=1,
            world_size=2,
            link=link,
            local_rank=1,
            local_world_size=2,
            run_dir=Path("runs/demo"),
            clock=lambda: 12.5,
        )
        set_current_worker(context)
        return context

    yield make
    set_current_worker(None)


Make = Callable[[str], WorkerContext]


def test_outside_a_worker_there_is_no_current_worker() -> None:
    with pytest.raises(UsageError, match=r"which is not a worker of a job.*\.config\(\.\.\.\)"):
        current_worker()


def test_what_a_worker_knows(worker: Make) -> None:
    context = worker("ACTOR")
    assert current_worker() is context
    assert (context.name, context.rank, context.world_size, context.pid > 0) == ("ACTOR:1", 1, 2, True)
    assert current_worker().job_info.user_config == {"lr": 1.0}


def test_reports_arrive_with_the_step_of_the_last_boundary(worker: Make, link: Link) -> None:
    context = worker("TRAINER")
    context.report(loss=2, ok=True)
    context.report(step=7, loss=torch.tensor(0.5))
    context.report(kl=0.25)
    assert [(r.step, dict(r.metrics)) for r in link.records] == [
        (0, {"loss": 2.0, "ok": 1.0}),
        (7, {"loss": 0.5}),
        (7, {"kl": 0.25}),
    ]
    assert {(r.role, r.rank, r.at, r.calls) for r in link.records} == {("TRAINER", 1, 12.5, (STATS,))}


@pytest.mark.parametrize("value", ["many", None, [1.0], torch.zeros(2)])
def test_a_metric_is_a_number(worker: Make, value: Any) -> None:
    with pytest.raises(UsageError, match=r"TRAINER:1: report\(\) got loss=.*which is not a number"):
        worker("TRAINER").report(loss=value)


def test_step_boundary_returns_a_stop_request_at_its_step(worker: Make, link: Link) -> None:
    context = worker("TRAINER")
    assert [context.step_boundary() for _ in range(2)] == [None, None]
    assert context.step == 1
    link.request = StopRequest("preempted", step=6)
    assert context.step_boundary(5) is None
    assert context.step_boundary() is link.request
    link.request = StopRequest("Ctrl-C")
    assert context.step_boundary(0) is link.request


def test_base_classes_know_themselves(worker: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    worker("ACTOR")
    role = BaseRLWorkload()
    assert (role.name, role.role, role.rank, role.world_size) == ("ACTOR:1", "ACTOR", 1, 2)
    assert (role.local_rank, role.local_world_size, role.config) == (1, 2, {"lr": 1.0})
    assert (role.torch_master_addr, role.torch_master_port) == ("", -1)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1234")
    assert (role.torch_master_addr, role.torch_master_port) == ("127.0.0.1", 1234)


@pytest.mark.parametrize("role", RLRoleType)
def test_roles_can_ask_which_they_are(worker: Make, role: RLRoleType) -> None:
    worker(role.name)
    asked = BaseRLWorkload()
    answers = {
        "ACTOR": asked.is_actor_role(),
        "REFERENCE": asked.is_reference_role(),
        "ROLLOUT": asked.is_rollout_role(),
        "REWARD": asked.is_reward_role(),
        "CRITIC": asked.is_critic_role(),
    }
    assert [name for name, yes in answers.items() if yes] == [role.name for _ in range(role != RLRoleType.TRAINER)]


def test_a_role_knows_the_roles_on_its_device(worker: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    role = BaseRLWorkload()
    worker("ACTOR")
    assert not role.has_device_collocation()
    assert not role.is_actor_or_rollout_device_collocation()
    monkeypatch.setenv(COLLOCATION_ENV, "ACTOR,ROLLOUT")
    assert role.get_device_collocation() == {"ACTOR", "ROLLOUT"}
    assert role.is_actor_or_rollout_device_collocation()
    monkeypatch.setenv(COLLOCATION_ENV, "REWARD,REFERENCE")
    worker("REWARD")
    assert role.has_device_collocation()
    assert not role.is_actor_or_rollout_device_collocation()


def test_a_trainer_runs_init_then_fit(worker: Make) -> None:
    worker("TRAINER")
    done = []

    class Trainer(BaseTrainer):
        def init(self) -> None:
            done.append("init")

        def fit(self) -> None:
            done.append("fit")

    Trainer().run()
    assert done == ["init", "fit"]
    with pytest.raises(UsageError, match=r"BaseTrainer \(role TRAINER\) defines neither fit\(\) nor run\(\)"):
        BaseTrainer().run()


def test_a_trainer_has_the_handles_of_the_roles(worker: Make) -> None:
    worker("TRAINER")
    members = tuple(MemberAddress("ACTOR", rank, 0, f"ipc:///nowhere/{rank}") for rank in range(2))
    trainer = BaseRLTrainer()
    with Runtime.start(name="TRAINER:0", key=bytes(32), bind=False) as runtime:
        set_default_runtime(runtime)
        try:
            runtime.set_address_book(AddressBook(1, members))
            known = threading.Event()
            runtime.post(known.set)
            assert known.wait(HANG_S)
            assert [handle.name for handle in trainer.actors] == ["ACTOR:0", "ACTOR:1"]
            assert [trainer.rollouts, trainer.references, trainer.rewards, trainer.critics] == [[], [], [], []]
        finally:
            set_default_runtime(None)
