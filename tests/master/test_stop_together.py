"""The step at which all ranks stop: as a state machine, and under any order in which ranks, news and notice come."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh.agent.worker.stopping import Stopping
from rlmesh.errors import UsageError
from rlmesh.job.context import JobInfo, StopRequest, WorkerContext
from rlmesh.job.restarts import RestartEvent
from rlmesh.job.status import Alarm, CallStats, MetricRecord
from rlmesh.master import events as ev
from rlmesh.master.context import MemberId
from rlmesh.master.decisions.stop_together import StopTogether
from tests.master.bench import Bench, job, role
from tests.own_time import HANG_S, OwnTime

RANKS = 3
JOB = job(role("TRAINER", 2), role("SERVER"))


class Link:
    """Joins a member's context to what it knows of a stop, without a master."""

    def __init__(self) -> None:
        self.known = Stopping()
        self.stopped_at: list[int] = []

    def boundary(self, step: int) -> StopRequest | None:
        return self.known.boundary(step)

    def stopping(self, step: int) -> None:
        self.stopped_at.append(step)

    def report(self, record: MetricRecord) -> None:
        raise AssertionError(record)

    def alarm(self, alarm: Alarm) -> None:
        raise AssertionError(alarm)

    def take_call_stats(self) -> tuple[CallStats, ...]:
        return ()

    def take_events(self, wait_s: float) -> tuple[RestartEvent, ...]:
        return ()

    def listen(self, listener: object) -> None:
        raise AssertionError(listener)

    def tell_listeners(self) -> None:
        pass


def member(link: Link, rank: int = 0) -> WorkerContext:
    return WorkerContext(JobInfo("toy", "t"), "TRAINER", rank, 2, link)


class Rank:
    """One rank, step by step; its news is what the master is told, in order, and later."""

    def __init__(self, rank: int, first: int, stride: int) -> None:
        self.id: MemberId = ("TRAINER", rank)
        self.link = Link()
        self.context = member(self.link, rank)
        self.step, self.stride = first, stride
        self.orders: list[ev.Action] = []
        self.done = False

    def waits(self) -> bool:
        return self.link.known._held

    def advance(self) -> None:
        request = self.context.step_boundary(self.step)
        if request is not None:
            self.done = True
        self.step += self.stride


@given(st.data())
def test_all_ranks_stop_at_the_same_step_in_any_order(data: st.DataObject) -> None:
    first = data.draw(st.integers(0, 5), "first")
    ranks = {r.id: r for r in (Rank(n, first, 1) for n in range(RANKS))}
    together = StopTogether(2.5)
    news: list[tuple[MemberId, int | None]] = []
    assert together.notice("SIGUSR1", 60, 5, 0.0)
    asked = False

    def perform(actions: list[ev.Action]) -> None:
        for action in actions:
            assert isinstance(action, ev.HoldSteps | ev.SetStop)
            for who in action.members:
                ranks[who].orders.append(action)

    for _ in range(400):
        choices = [f"advance {n}" for n, r in enumerate(ranks.values()) if not r.done and not r.waits()]
        choices += [f"order {n}" for n, r in enumerate(ranks.values()) if r.orders]
        choices += ["news"] if news else []
        choices += [] if asked else ["ask"]
        if not choices:
            break
        what, _, number = data.draw(st.sampled_from(choices)).partition(" ")
        if what == "ask":
            asked = True
            perform(together.begin(ranks))
        elif what == "news":
            perform(together.step_held(*news.pop(0)))
        elif what == "advance":
            ranks["TRAINER", int(number)].advance()
        else:
            rank = ranks["TRAINER", int(number)]
            order = rank.orders.pop(0)
            if isinstance(order, ev.HoldSteps):
                news.append((rank.id, rank.link.known.hold()))
            else:
                assert isinstance(order, ev.SetStop)
                rank.link.known.ask(order.request)
    if all(rank.done for rank in ranks.values()):
        stops = {rank.link.stopped_at[0] for rank in ranks.values()}
        assert len(stops) == 1
        assert together.request is not None
        assert together.request.step in (None, *stops)
        for rank in ranks.values():
            assert together.stopped(rank.id, rank.link.stopped_at[0]) == ""
        assert together.last_step == stops.pop()
    else:
        # Only draws that ran out leave somebody on the way; nobody stopped elsewhere.
        assert len({rank.link.stopped_at[0] for rank in ranks.values() if rank.done}) <= 1


def test_a_boundary_waits_until_the_step_is_set() -> None:
    link = Link()
    context = member(link)
    assert context.step_boundary(4) is None
    assert link.known.hold() == 4
    answers: list[StopRequest | None] = []
    thread = threading.Thread(target=lambda: answers.append(context.step_boundary(5)))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    request = StopRequest("SIGUSR1", 5, 10.0)
    link.known.ask(request)
    thread.join(HANG_S)
    assert answers == [request]
    assert link.stopped_at == [5]


def test_a_boundary_does_not_wait_for_a_dead_master(monkeypatch: pytest.MonkeyPatch, own_time: OwnTime) -> None:
    monkeypatch.setattr("rlmesh.agent.worker.stopping.HOLD_S", 0.02)
    link = Link()
    context = member(link)
    link.known.hold()
    began = time.monotonic()
    assert context.step_boundary(0) is None
    assert context.step_boundary(1) is None
    assert time.monotonic() - began >= 0.02 and own_time.since(began) < 1.0


def test_a_rank_beyond_the_step_is_an_error() -> None:
    link = Link()
    context = member(link)
    assert context.step_boundary(7) is None
    link.known.ask(StopRequest("SIGUSR1", 5))
    with pytest.raises(UsageError, match=r"TRAINER:0 \(pid \d+\) went on to step 8 although all ranks stop at step 5"):
        context.step_boundary(8)
    assert link.stopped_at == []


def test_a_request_that_is_overlooked_is_an_error_and_repeating_a_step_is_not() -> None:
    link = Link()
    context = member(link)
    link.known.ask(StopRequest("SIGUSR1", 5))
    assert context.step_boundary(5) is not None
    assert context.step_boundary(5) is not None
    with pytest.raises(UsageError, match="return from run"):
        context.step_boundary(6)


def test_a_stop_at_once_is_more_urgent_than_one_at_a_step() -> None:
    link = Link()
    context = member(link)
    link.known.ask(StopRequest("SIGUSR1", 50))
    assert context.step_boundary(5) is None
    link.known.ask(StopRequest("SIGTERM"))
    link.known.ask(StopRequest("SIGUSR1", 60))
    request = context.step_boundary(6)
    assert request is not None
    assert request.reason == "SIGTERM"


def notice(bench: Bench, within_s: float = 60.0) -> list[ev.Action]:
    return without_questions(bench.send(ev.NoticeGiven("SIGUSR1", within_s, 7.0)))


def without_questions(actions: list[ev.Action]) -> list[ev.Action]:
    """The master asks from time to time what members do, for other reasons."""
    return [action for action in actions if not isinstance(action, ev.AskProgress)]


def hold(bench: Bench, steps: dict[int, int | None]) -> list[ev.Action]:
    actions: list[ev.Action] = []
    for rank, step in steps.items():
        actions += bench.send(ev.StepHeld("TRAINER", rank, 0, step, answered=step is not None))
    return actions


def test_the_master_sets_the_step_after_the_last_one_that_was_told() -> None:
    bench = Bench(JOB)
    bench.running()
    assert notice(bench) == [ev.HoldSteps((("TRAINER", 0), ("TRAINER", 1)), "SIGUSR1")]
    (told,) = hold(bench, {0: 4, 1: 6})
    assert told == ev.SetStop((("TRAINER", 0), ("TRAINER", 1)), StopRequest("SIGUSR1", 7, 60.0))
    assert notice(bench) == [], "a second notice changes nothing"
    for rank in (0, 1):
        bench.send(ev.StoppedAt("TRAINER", rank, 0, 7))
        bench.finish(f"TRAINER:{rank}")
    stop = StopRequest("SIGUSR1", 7, 60.0)
    assert bench.took(ev.Teardown) == [ev.Teardown(("TRAINER", 0), stop), ev.Teardown(("TRAINER", 1), stop)]
    bench.exit_all()
    assert bench.took(ev.Teardown)[-1] == ev.Teardown(("SERVER", 0), stop)
    bench.exit_all()
    status = bench.manager.status()
    assert (status.stage, status.stopped_at, status.resumable) == ("stopped", 7, True)


def test_another_master_says_again_what_may_not_have_been_heard() -> None:
    bench = Bench(JOB)
    bench.running()
    notice(bench)
    (told,) = hold(bench, {0: 4, 1: 6})
    assert told in bench.send(ev.MasterReturned(2))
    for rank in (0, 1):
        bench.send(ev.StoppedAt("TRAINER", rank, 0, 7))
        bench.finish(f"TRAINER:{rank}")
    again = bench.send(ev.MasterReturned(3))
    stop = StopRequest("SIGUSR1", 7, 60.0)
    assert [a for a in again if isinstance(a, ev.Teardown)] == [ev.Teardown(("TRAINER", r), stop) for r in (0, 1)], (
        "without the request on_stop() would not be called"
    )
    assert not [a for a in again if isinstance(a, ev.SetStop | ev.AskToStop)]


def test_a_job_that_gets_to_its_end_first_has_succeeded() -> None:
    bench = Bench(JOB)
    bench.running()
    notice(bench)
    bench.finish("TRAINER:0")
    (told,) = hold(bench, {1: None})
    assert told == ev.SetStop((("TRAINER", 1),), StopRequest("SIGUSR1", None, 60.0))
    bench.finish("TRAINER:1")
    bench.exit_all()
    bench.exit_all()
    assert bench.stage == "succeeded"
    assert all(action.stop is None for action in bench.took(ev.Teardown))


def test_notice_during_the_start_ends_the_job_at_once() -> None:
    bench = Bench(JOB)
    bench.register()
    (stop,) = [action for action in notice(bench) if isinstance(action, ev.StopMembers)]
    assert stop.grace_s == 7.0
    bench.exit_all()
    assert (bench.stage, bench.manager.status().resumable) == ("stopped", True)


def test_notice_before_all_ranks_run_waits_for_them() -> None:
    bench = Bench(JOB)
    bench.up()
    assert notice(bench) == []
    begins = [bench.send(ev.RunBegan(*a.member, 0, a.member[0] == "TRAINER")) for a in bench.took(ev.BeginRun)]
    assert begins[-1] == [ev.HoldSteps((("TRAINER", 0), ("TRAINER", 1)), "SIGUSR1")]


def test_ranks_that_stop_at_different_steps_fail_the_job() -> None:
    bench = Bench(JOB)
    bench.running()
    notice(bench)
    hold(bench, {0: 4, 1: 6})
    bench.send(ev.StoppedAt("TRAINER", 0, 0, 7))
    bench.send(ev.StoppedAt("TRAINER", 1, 0, 8))
    bench.tick(1.0)
    bench.exit_all()
    assert bench.stage == "failed"
    (failure,) = bench.manager.status().failures
    assert "TRAINER:0 at step 7, TRAINER:1 at step 8" in failure.message


def test_ranks_that_wait_for_the_same_step_do_not_wait_for_ever() -> None:
    bench = Bench(JOB)
    bench.running()
    notice(bench, within_s=30.0)
    hold(bench, {0: 4, 1: 6})
    bench.send(ev.StoppedAt("TRAINER", 0, 0, 7))
    bench.finish("TRAINER:0")
    assert without_questions(bench.tick(29.0)) == []
    stops = [action for action in bench.tick(1.5) if isinstance(action, ev.StopMembers)]
    assert stops
    assert "TRAINER:1 was to stop at step 7, but is still in run() after 30 s" in bench.manager.context.note
    bench.exit_all()
    assert bench.manager.status().stage == "stopped"


def test_a_rank_that_is_started_again_is_told_the_step() -> None:
    together = StopTogether(2.5)
    assert together.run_began(("TRAINER", 0)) == []
    together.notice("SIGUSR1", 60, 5, 0.0)
    together.begin([("TRAINER", 0), ("TRAINER", 1)])
    assert together.run_ended(("TRAINER", 1)) == []
    assert together.run_began(("TRAINER", 1)) == [ev.HoldSteps((("TRAINER", 1),), "SIGUSR1")]
    assert together.step_held(("TRAINER", 1), None) == []
    (told,) = together.step_held(("TRAINER", 0), 9)
    assert isinstance(told, ev.SetStop)
    together.run_ended(("TRAINER", 0))
    assert together.run_began(("TRAINER", 0)) == [ev.SetStop((("TRAINER", 0),), told.request)]
