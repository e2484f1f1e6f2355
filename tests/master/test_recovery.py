"""Restarts, without any process: what happens in which order, whatever else happens meanwhile."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmesh.job.restarts import Scope
from rlmesh.job.status import ExitInfo
from rlmesh.master import events as ev
from rlmesh.master.jobspec import RestartRule, RoleSpec
from tests.master.bench import Bench, job, role

MEMBER = RestartRule("member", max_restarts=2)
GROUP = RestartRule("role", max_restarts=2)


def roles(trainer: RestartRule = MEMBER) -> tuple[RoleSpec, ...]:
    return (
        role("TRAINER", restart=trainer),
        role("ACTOR", 2, "elastic", restart=GROUP),
        role("ROLLOUT", 2, restart=MEMBER),
    )


def running(*given: RoleSpec) -> Bench:
    bench = Bench(job(*(given or roles())), has_run=("TRAINER",))
    bench.running()
    bench.actions.clear()
    bench.reserved = 0
    return bench


def test_a_member_comes_back_alone() -> None:
    bench = running()
    actions = bench.send(ev.MemberExited(0, _exit(bench, "ROLLOUT:1")))
    kinds = [type(action) for action in actions]
    assert kinds == [ev.PublishBook, ev.TellRestart, ev.AnnounceLoss, ev.Spawn], (
        "who hears of the restart, or of the loss, calls the new incarnation"
    )
    (book,) = [action.book for action in bench.took(ev.PublishBook)]
    entry = book.find("ROLLOUT", 1)
    assert entry is not None and (entry.incarnation, entry.endpoint) == (1, None), "calls to it wait"
    assert bench.took(ev.Spawn) == [ev.Spawn(0, (("ROLLOUT", 1),))]
    assert (bench.stage, bench.state("ROLLOUT:1"), bench.state("ROLLOUT:0")) == ("running", "starting", "ready")
    bench.bind("ROLLOUT:1")
    assert bench.took(ev.PublishBook)[-1].book.find("ROLLOUT", 1).endpoint is None  # type: ignore[union-attr]
    bench.ready("ROLLOUT:1")
    assert bench.took(ev.PublishBook)[-1].book.find("ROLLOUT", 1).endpoint == "ipc:///tmp/ROLLOUT:1.1"  # type: ignore[union-attr]
    assert bench.took(ev.BeginRun) == [ev.BeginRun(("ROLLOUT", 1))]
    phases = [(a.event.role, a.event.ranks, a.event.phase, a.event.incarnations) for a in bench.took(ev.TellRestart)]
    assert phases == [("ROLLOUT", (1,), "restarting", (1,)), ("ROLLOUT", (1,), "ready", (1,))]
    (record,) = bench.manager.status().restarts
    assert record.ready_at is not None and "SIGKILL" in record.cause
    assert not bench.manager.status().failures
    bench.finish("TRAINER:0")
    bench.exit_all()
    bench.exit_all()
    assert bench.stage == "succeeded"


def _exit(bench: Bench, name: str) -> ExitInfo:
    member = bench.member(name)
    return ExitInfo(*member.key, member.pid, None, 9, bench.now)


def test_a_group_ends_as_a_whole_and_gets_a_new_port() -> None:
    bench = running()
    before = bench.manager.ports["ACTOR"]
    bench.exit("ACTOR:0", None, 9)
    assert bench.took(ev.EndProcesses) == [ev.EndProcesses(0, (("ACTOR", 1, 0),), 0.0)]
    assert bench.took(ev.ReservePort) == [ev.ReservePort("ACTOR", 0, before)]
    assert not bench.took(ev.Spawn), "the old process is still there"
    bench.reserve()
    assert not bench.took(ev.Spawn)
    bench.old_ones_go()
    assert bench.took(ev.Spawn) == [ev.Spawn(0, (("ACTOR", 0), ("ACTOR", 1)))]
    assert {loss.exit.rank for loss in bench.took(ev.AnnounceLoss)} == {0, 1}
    bench.bind("ACTOR:0")
    bench.ready("ACTOR:0")
    assert not bench.took(ev.BeginRun)
    bench.come_back("ACTOR:1")
    assert len(bench.took(ev.BeginRun)) == 2
    assert [bench.member(name).incarnation for name in bench.names()] == [0, 1, 1, 0, 0]


def test_two_ranks_at_once_are_one_restart() -> None:
    bench = running()
    bench.exit("ACTOR:1", None, 9)
    bench.exit("ACTOR:0", None, 9, incarnation=0)
    bench.reserve()
    assert len(bench.took(ev.Spawn)) == 1
    bench.come_back("ACTOR:0", "ACTOR:1")
    assert len(bench.manager.status().restarts) == 1


def test_what_the_others_of_the_group_raise_is_a_consequence() -> None:
    """The survivor's collective fails before its peer's death is known."""
    bench = running()
    bench.fail("ACTOR:1", "RuntimeError: Connection closed by peer")
    bench.exit("ACTOR:1", 1, after_s=0.02)
    bench.exit("ACTOR:0", None, 9, after_s=0.02)
    bench.reserve()
    bench.come_back("ACTOR:0", "ACTOR:1")
    bench.tick(1.0)
    assert bench.stage == "running" and not bench.manager.status().failures


def test_a_caller_that_does_not_cope_fails_the_job_and_the_death_is_the_first_cause() -> None:
    bench = running()
    bench.exit("ROLLOUT:0", None, 9)
    bench.fail("TRAINER:0", "PeerLost: ROLLOUT:0 cannot answer", from_call=True)
    bench.exit("TRAINER:0", 1)
    bench.tick(0.3)
    bench.exit_all()
    assert bench.stage == "failed"
    first, second = bench.manager.status().failures
    assert first.role == "ROLLOUT" and "SIGKILL" in first.message
    assert second.role == "TRAINER"


def test_later_restarts_are_held_back_and_one_too_many_ends_the_job() -> None:
    bench = running()
    bench.exit("ROLLOUT:0", None, 9)
    bench.come_back("ROLLOUT:0")
    bench.exit("ROLLOUT:0", None, 11)
    assert len(bench.took(ev.Spawn)) == 1
    assert bench.state("ROLLOUT:0") == "restarting"
    bench.tick(0.9)
    assert len(bench.took(ev.Spawn)) == 1
    bench.tick(0.2)
    assert len(bench.took(ev.Spawn)) == 2
    bench.come_back("ROLLOUT:0")
    bench.exit("ROLLOUT:0", None, 6)
    bench.exit_all()
    assert bench.stage == "failed"
    (failure,) = bench.manager.status().failures
    assert failure.kind == "RestartBudgetExhausted"
    assert "Its first failure" in failure.message and "killed by SIGKILL" in failure.message


def test_death_while_it_comes_back_is_a_failure_of_its_own() -> None:
    bench = running()
    bench.exit("ROLLOUT:0", None, 9)
    bench.bind("ROLLOUT:0")
    bench.exit("ROLLOUT:0", None, 9)
    assert bench.took(ev.AnnounceLoss)[-1].exit.served is False, "calls that were sent there never began"
    bench.tick(1.0)
    bench.come_back("ROLLOUT:0")
    assert (bench.member("ROLLOUT:0").incarnation, bench.stage) == (2, "running")
    assert len(bench.manager.status().restarts) == 2


def test_messages_of_the_old_process_do_not_move_the_new_one() -> None:
    bench = running()
    bench.exit("TRAINER:0", None, 9)
    bench.send(ev.RunFinished("TRAINER", 0, 0))
    bench.send(ev.MemberReady("TRAINER", 0, 0))
    bench.send(ev.MemberFailed("TRAINER", 0, 0, "late"))
    bench.send(ev.Spawned(0, (("ROLLOUT", 0, 7),)))
    assert (bench.state("TRAINER:0"), bench.stage) == ("starting", "running")
    assert bench.member("ROLLOUT:0").pid == 1003
    bench.come_back("TRAINER:0")
    assert bench.state("TRAINER:0") == "running", "run() starts again"


def test_errors_are_restarted_only_where_the_policy_says_so() -> None:
    bench = running(role("TRAINER", restart=RestartRule("member", on_error=True)), role("A", restart=MEMBER))
    bench.fail("TRAINER:0")
    bench.exit("TRAINER:0", 1)
    bench.tick(0.3)
    assert (bench.stage, bench.state("TRAINER:0")) == ("running", "starting")
    bench.come_back("TRAINER:0")
    bench.fail("A:0")
    bench.exit("A:0", 1)
    bench.tick(0.3)
    bench.exit_all()
    assert bench.stage == "failed"


def test_scope_job_restarts_every_member() -> None:
    bench = running(*roles(RestartRule("job")))
    bench.exit("TRAINER:0", None, 9)
    assert {key[:2] for action in bench.took(ev.EndProcesses) for key in action.processes} == {
        ("ACTOR", 0), ("ACTOR", 1), ("ROLLOUT", 0), ("ROLLOUT", 1)
    }  # fmt: skip
    bench.fail("ACTOR:0", "it was interrupted")
    bench.reserve()
    bench.old_ones_go()
    bench.come_back(*bench.names())
    assert {bench.member(name).incarnation for name in bench.names()} == {1}
    assert (bench.stage, bench.state("TRAINER:0")) == ("running", "running")


def test_a_restart_of_the_job_takes_over_a_smaller_one() -> None:
    bench = running(*roles(RestartRule("job")))
    bench.exit("ACTOR:0", None, 9)
    bench.exit("TRAINER:0", None, 9)
    bench.reserve()
    assert not bench.took(ev.Spawn), "ACTOR:1 and ROLLOUT are still there"
    bench.old_ones_go()
    (spawn,) = bench.took(ev.Spawn)
    assert len(spawn.members) == 5
    assert bench.member("ACTOR:1").incarnation == 1, "it had no second process that could have failed"


def test_an_old_process_that_does_not_go_ends_the_job() -> None:
    bench = running()
    bench.exit("ACTOR:0", None, 9)
    bench.tick(5.1)
    assert bench.stage == "stopping"
    assert "the end of its old process was not reported within 5 s" in bench.manager.context.failures[0].message


@pytest.mark.parametrize("moment", ["held back", "starting", "bound"])
def test_the_job_may_end_while_a_member_is_away(moment: str) -> None:
    bench = running()
    bench.exit("ROLLOUT:0", None, 9)
    if moment == "held back":
        bench.exit("ROLLOUT:0", None, 9)
    elif moment == "bound":
        bench.bind("ROLLOUT:0")
    bench.finish("TRAINER:0")
    for _ in range(3):
        bench.exit_all()
    assert bench.stage == "succeeded"


def test_a_run_that_had_finished_is_not_run_again() -> None:
    bench = Bench(job(role("A", 2, restart=MEMBER), role("B", restart=MEMBER)), has_run=("A", "B"))
    bench.running()
    bench.finish("A:0")
    bench.exit("A:0", None, 9)
    bench.actions.clear()
    bench.come_back("A:0")
    assert not bench.took(ev.BeginRun) and bench.state("A:0") == "finished"
    bench.finish("A:1")
    bench.finish("B:0")
    bench.exit_all()
    assert bench.stage == "succeeded"


def test_restarts_before_all_members_are_up() -> None:
    bench = Bench(job(*roles()))
    bench.register()
    bench.exit("ACTOR:1", None, 9)
    bench.reserve()
    bench.old_ones_go()
    bench.come_back(*bench.names())
    assert bench.stage == "running"
    assert len(bench.took(ev.BeginRun)) == 5


SCOPED: st.SearchStrategy[Scope] = st.sampled_from(["member", "role", "job", "never"])
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["bind", "ready", "began", "finish", "fail", "call", "exit", "kill", "old", "ports", "tick",
                         "stop"]),
        st.integers(0, 4),
        st.sampled_from([0.0, 0.05, 0.4, 2.0]),
    ),
    max_size=60,
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.tuples(SCOPED, SCOPED, SCOPED), st.booleans(), STEPS)
def test_every_history_of_restarts_ends(
    scopes: tuple[Scope, Scope, Scope], on_error: bool, steps: list[tuple[str, int, float]]
) -> None:
    """No exception, incarnations only grow, no second process of a member, and the job can always end."""
    rules = [RestartRule(scope, 3, on_error=on_error) for scope in scopes]
    bench = Bench(
        job(role("TRAINER", restart=rules[0]), role("ACTOR", 2, "elastic", restart=rules[1]),
            role("ROLLOUT", 2, restart=rules[2]))
    )  # fmt: skip
    bench.register()
    incarnations = [0] * 5
    for what, which, after_s in steps:
        bench.now += after_s
        name = bench.names()[which]
        if what == "bind" and bench.state(name) == "starting":
            bench.bind(name)
        elif what == "ready":
            bench.ready(name)
        elif what == "began":
            bench.send(ev.RunBegan(*bench.member(name).key, name == "TRAINER:0"))
        elif what == "finish":
            bench.finish(name)
        elif what in ("fail", "call"):
            bench.fail(name, from_call=what == "call")
        elif what in ("exit", "kill") and bench.member(name).spawned:
            bench.exit(name, *((0, None) if what == "exit" else (None, 9)))
        elif what == "old":
            bench.old_ones_go()
        elif what == "ports":
            bench.reserve()
        elif what == "stop":
            bench.send(ev.StopRequested("Ctrl-C", 3.0))
        bench.tick(0.0)
        now_at = [bench.member(n).incarnation for n in bench.names()]
        assert all(a <= b for a, b in zip(incarnations, now_at, strict=True))
        incarnations = now_at
        spawned = [member for action in bench.took(ev.Spawn) for member in action.members]
        for index, member in enumerate(bench.manager.context.members):
            assert spawned.count(member) <= incarnations[index] + 1
    if not bench.manager.ended:
        bench.send(ev.StopRequested("the end", 3.0))
        for _ in range(4):
            bench.tick(40.0)
    assert bench.manager.ended
