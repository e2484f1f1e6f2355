"""The life of a job, without any process: what happens, what the master does about it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmesh.job.status import ExitInfo, MetricRecord
from rlmesh.master import events as ev
from tests.master.bench import Bench, job, node, role

PPO = (role("TRAINER"), role("ACTOR", 2, "elastic"), role("ROLLOUT", 2))


def test_start_waits_for_all_agents_then_for_ports_then_spawns() -> None:
    bench = Bench(job(*PPO, nnodes=2))
    assert bench.send(ev.AgentRegistered(node(0))) == []
    assert bench.send(ev.AgentRegistered(node(1))) == [ev.ReservePort("ACTOR", 0)]
    actions = bench.send(ev.PortReserved("ACTOR", 29500))
    spawned = [m for action in actions if isinstance(action, ev.Spawn) for m in action.members]
    assert sorted(spawned) == sorted(bench.manager.context.members)
    assert bench.manager.ports == {"ACTOR": 29500}


def test_each_bound_member_gets_a_newer_book() -> None:
    bench = Bench(job(*PPO))
    bench.register()
    for name in bench.names():
        bench.bind(name)
    books = [action.book for action in bench.took(ev.PublishBook)]
    assert [book.version for book in books] == [1, 2, 3, 4, 5]
    assert [m.endpoint for m in books[0].members] == ["ipc:///tmp/TRAINER:0", None, None, None, None]
    assert all(m.endpoint for m in books[-1].members)


def test_members_run_when_all_are_ready() -> None:
    bench = Bench(job(*PPO))
    bench.register()
    for name in bench.names():
        bench.bind(name)
        bench.ready(name)
        assert bench.stage == ("running" if name == bench.names()[-1] else "starting")
    assert len(bench.took(ev.BeginRun)) == 5
    assert bench.manager.status().first_serving_s == 1.0
    assert bench.manager.status().all_serving_s == 1.0


def test_job_ends_with_the_trainer_after_everybodys_teardown() -> None:
    bench = Bench(job(*PPO), has_run=("TRAINER", "ROLLOUT"))
    bench.running()
    assert (bench.state("TRAINER:0"), bench.state("ACTOR:0"), bench.state("ROLLOUT:1")) == (
        "running", "ready", "running"
    )  # fmt: skip
    bench.finish("TRAINER:0")
    assert bench.took(ev.Teardown) == [ev.Teardown(("TRAINER", 0))]
    bench.exit("TRAINER:0")
    assert bench.stage == "stopping"
    assert len(bench.took(ev.Teardown)) == 5
    assert bench.took(ev.AskToStop)[-1].members == (("ROLLOUT", 0), ("ROLLOUT", 1))
    bench.exit_all()
    assert bench.stage == "succeeded"
    assert {bench.state(name) for name in bench.names()} == {"exited"}


def test_without_trainer_all_roles_with_run_drive() -> None:
    bench = Bench(job(role("A", 2), role("B"), role("C", driver=False)), has_run=("A", "C"))
    bench.running()
    bench.finish("A:0")
    assert bench.stage == "running"
    bench.finish("A:1")
    assert bench.stage == "stopping"
    assert {action.member for action in bench.took(ev.Teardown)} == {("A", 0), ("A", 1)}


def test_named_drivers_win_over_trainer() -> None:
    bench = Bench(job(role("TRAINER"), role("B", driver=True)), has_run=("TRAINER", "B"))
    bench.running()
    bench.finish("TRAINER:0")
    assert bench.stage == "running"
    bench.finish("B:0")
    assert bench.stage == "stopping"


def test_run_that_ends_before_it_was_known_to_begin() -> None:
    bench = Bench(job(role("TRAINER")))
    bench.up()
    bench.finish("TRAINER:0")
    bench.exit_all()
    assert bench.stage == "succeeded"


@pytest.mark.parametrize(("roles", "message"), [
    ((role("TRAINER"), role("A")), "TRAINER:0 should drive the job but has no run"),
    ((role("A"), role("B")), "no role drives the job"),
])  # fmt: skip
def test_a_job_that_nobody_drives_fails(roles: tuple[object, ...], message: str) -> None:
    bench = Bench(job(*roles), has_run=())  # type: ignore[arg-type]
    bench.running()
    bench.tick(0.3)
    bench.exit_all()
    assert bench.stage == "failed"
    assert message in bench.manager.context.failures[0].message


def test_a_killed_member_fails_the_job_at_once() -> None:
    bench = Bench(job(*PPO))
    bench.running()
    bench.exit("ROLLOUT:1", None, 9)
    (lost,) = bench.took(ev.AnnounceLoss)
    assert (lost.exit.role, lost.exit.rank) == ("ROLLOUT", 1)
    (stop,) = bench.took(ev.StopMembers)
    assert len(stop.members) == 4
    assert ("ROLLOUT", 1) not in stop.members
    bench.exit_all()
    assert bench.stage == "failed"
    (failure,) = bench.manager.status().failures
    assert failure.message == "ROLLOUT:1 (pid 1004 on box) was killed by SIGKILL while it served calls"
    assert failure.exit is not None
    assert failure.exit.last_log_lines == ("last words",)


def test_leaving_without_a_word_fails_the_job_even_with_code_0() -> None:
    bench = Bench(job(*PPO))
    bench.running()
    bench.exit("ROLLOUT:0", 0)
    assert bench.manager.context.failures[0].message.startswith(
        "ROLLOUT:0 (pid 1003 on box) exited with code 0 before the job had ended"
    )


def test_consequence_of_a_death_that_is_reported_first_is_not_the_cause() -> None:
    """The trainer's call fails before the agent has reported the death that made it fail."""
    bench = Bench(job(*PPO))
    bench.running()
    bench.fail("TRAINER:0", "PeerLost: ROLLOUT:0 is gone", from_call=True)
    assert not bench.took(ev.StopMembers)
    bench.exit("TRAINER:0", 1, after_s=0.02)
    bench.exit("ROLLOUT:0", None, 9, after_s=0.03)
    bench.exit_all()
    assert bench.stage == "failed"
    first, second = bench.manager.status().failures
    assert first.role == "ROLLOUT"
    assert "SIGKILL" in first.message
    assert second.role == "TRAINER"


def test_own_exception_is_the_cause_and_carries_its_exit() -> None:
    bench = Bench(job(*PPO))
    bench.running()
    bench.fail("TRAINER:0")
    bench.exit("TRAINER:0", 1, after_s=0.05)
    assert bench.stage == "running"
    bench.tick(0.3)
    assert bench.stage == "stopping"
    bench.exit_all()
    (failure,) = bench.manager.status().failures
    assert failure.message == "TRAINER:0 (pid 1000) failed in run(): ValueError: no"
    assert failure.remote_traceback == "Traceback …"
    assert failure.exit is not None
    assert bench.state("TRAINER:0") == "failed"


def test_what_follows_from_our_own_stop_is_no_failure() -> None:
    bench = Bench(job(*PPO))
    bench.running()
    bench.exit("ROLLOUT:0", None, 9)
    bench.fail("TRAINER:0", "PeerLost", from_call=True)
    bench.exit("TRAINER:0", 1)
    bench.exit_all()
    assert [failure.role for failure in bench.manager.status().failures] == ["ROLLOUT"]
    assert bench.state("TRAINER:0") == "exited"


def test_failure_in_setup_names_the_phase() -> None:
    bench = Bench(job(*PPO))
    bench.register()
    bench.bind("ACTOR:1")
    bench.fail("ACTOR:1", "OSError: no such file")
    bench.tick(0.3)
    bench.exit_all()
    assert bench.stage == "failed"
    message = bench.manager.context.failures[0].message
    assert message == "ACTOR:1 (pid 1002) could not be set up: OSError: no such file"


def test_failure_in_teardown_fails_the_job() -> None:
    bench = Bench(job(*PPO))
    bench.running()
    bench.finish("TRAINER:0")
    bench.fail("TRAINER:0", "OSError: disk full")
    bench.exit("TRAINER:0", 1)
    bench.tick(0.3)
    bench.exit_all()
    assert bench.stage == "failed"
    assert "failed in teardown(): OSError: disk full" in bench.manager.context.failures[0].message


def test_impossible_demand_spawns_nothing() -> None:
    bench = Bench(job(role("A", 9), accelerators=1000))
    bench.register()
    assert bench.stage == "failed"
    assert not bench.took(ev.Spawn)
    assert "slot 9 wanted, 4 there" in bench.manager.context.failures[0].message


def test_a_spawn_that_fails_ends_the_job() -> None:
    bench = Bench(job(role("TRAINER")))
    bench.register()
    bench.send(ev.ActionFailed(0, "spawning TRAINER:0", "no memory"))
    bench.tick(0.3)
    bench.tick(6.5)
    assert bench.stage == "failed"
    assert "node node-0: spawning TRAINER:0 failed: no memory" in bench.manager.context.failures[0].message


def test_a_port_that_cannot_be_reserved_ends_the_job_at_once() -> None:
    bench = Bench(job(*PPO))
    bench.send(ev.AgentRegistered(node(0)))
    bench.send(ev.ActionFailed(0, "reserving a port for ACTOR", "none left"))
    bench.tick(0.3)
    assert bench.stage == "failed"


def test_stop_ends_everybody_and_is_no_failure() -> None:
    bench = Bench(job(*PPO))
    bench.running()
    bench.send(ev.StopRequested("Ctrl-C", 3.0))
    assert bench.took(ev.AskToStop)[0].reason == "Ctrl-C"
    assert bench.took(ev.StopMembers)[0].grace_s == 3.0
    bench.exit_all()
    assert bench.stage == "stopped"
    assert bench.manager.status().failures == ()


def test_stop_before_anything_was_spawned() -> None:
    bench = Bench(job(*PPO))
    bench.send(ev.StopRequested("Ctrl-C", 3.0))
    assert bench.stage == "stopped"


def test_agent_that_never_comes() -> None:
    bench = Bench(job(*PPO, nnodes=2))
    bench.send(ev.AgentRegistered(node(0)))
    bench.tick(10.0)
    bench.tick(0.3)
    assert bench.stage == "failed"
    assert "waited 10 s for the agent of node 1" in bench.manager.context.failures[0].message


@pytest.mark.parametrize(("bound", "limit_s", "what"), [
    (False, 20.0, "TRAINER:0 (pid unknown) did not start and bind its endpoint within 20 s, see limits(start_s=…)"),
    (True, 30.0, "TRAINER:0 (pid 1000) did not finish setup() within 30 s, see limits(setup_s=…)"),
])  # fmt: skip
def test_member_that_never_gets_ready(bound: bool, limit_s: float, what: str) -> None:
    bench = Bench(job(role("TRAINER")))
    bench.register()
    if bound:
        bench.bind("TRAINER:0")
    bench.tick(limit_s - 0.1)
    assert bench.manager.context.note == "waiting for 1 members to be set up: TRAINER:0"
    bench.tick(0.1)
    bench.tick(0.3)
    bench.exit_all()
    assert bench.stage == "failed"
    message = bench.manager.context.failures[0].message
    assert message == f"{what}; its last log lines:\nend of /runs/toy/logs/TRAINER-0.log"


def test_a_member_that_is_stopped_while_it_starts_is_told_so() -> None:
    bench = Bench(job(role("TRAINER")))
    bench.manager.activity_of = lambda member: f"stopped for {member.placement.rank + 4} s"
    bench.register()
    bench.tick(20.0)
    message = bench.manager.context.failures[0].message
    assert "did not start and bind its endpoint within 20 s (stopped for 4 s), see limits(start_s=…)" in message


def test_teardown_that_hangs_is_ended_and_the_job_still_succeeds() -> None:
    bench = Bench(job(role("TRAINER"), role("A")))
    bench.running()
    bench.finish("TRAINER:0")
    bench.exit("TRAINER:0")
    bench.tick(15.0)
    assert bench.took(ev.StopMembers)[0].members == (("A", 0),)
    bench.exit("A:0", None, 9)
    assert bench.stage == "succeeded"
    assert "A:0: teardown() took longer than 15 s" in bench.manager.context.note


def test_run_of_others_that_goes_on_is_ended_after_the_grace() -> None:
    bench = Bench(job(role("TRAINER"), role("A", 2)), has_run=("TRAINER", "A"))
    bench.running()
    bench.finish("A:1")
    bench.finish("TRAINER:0")
    bench.exit("TRAINER:0")
    assert bench.took(ev.AskToStop)[0].members == (("A", 0),)
    bench.exit("A:1")
    bench.tick(5.0)
    assert bench.took(ev.StopMembers)[0].members == (("A", 0),)
    bench.exit("A:0", None, 15)
    assert bench.stage == "succeeded"
    assert bench.manager.context.note == "A:0: run() did not stop; ended by a signal"


def test_end_that_is_never_reported_does_not_hold_the_job() -> None:
    bench = Bench(job(role("TRAINER"), role("A")))
    bench.running()
    bench.exit("A:0", None, 9)
    bench.tick(6.0)
    assert bench.stage == "failed"
    assert "TRAINER:0 (pid 1000): its end was never reported" in bench.manager.context.note


def test_lost_agent_names_its_node_and_members() -> None:
    bench = Bench(job(role("TRAINER"), role("A", 3), nnodes=2))
    bench.running()
    there = [p for p in bench.manager.context.plan.placements if p.node_rank == 1]  # type: ignore[union-attr]
    bench.send(ev.AgentLost(1, "was killed"))
    assert {(a.exit.role, a.exit.rank) for a in bench.took(ev.AnnounceLoss)} == {(p.role, p.rank) for p in there}
    bench.exit_all()
    assert bench.stage == "failed"
    assert bench.manager.context.failures[0].message.startswith("the agent of node node-1 was killed; its members")


def test_reports_move_the_step_and_are_numbered() -> None:
    bench = Bench(job(role("TRAINER")))
    bench.running()
    for step in range(3):
        bench.send(ev.Reported(MetricRecord(1.0, "TRAINER", 0, step, {"loss": 0.5})))
    status = bench.manager.status(records_from=1)
    assert [record.step for record in status.records] == [1, 2]
    assert status.records_from == 1
    assert status.members[0].step == 2


def test_messages_of_an_older_incarnation_are_ignored() -> None:
    bench = Bench(job(role("TRAINER")))
    bench.register()
    bench.send(ev.MemberBound("TRAINER", 0, 7, 1, "ipc:///x"))
    bench.send(ev.MemberReady("NOBODY", 0, 0))
    bench.send(ev.MemberExited(0, ExitInfo("TRAINER", 0, 7, 1, 1, None, 1.0)))
    assert bench.state("TRAINER:0") == "starting"


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["register", "bind", "ready", "began", "finish", "fail", "call", "exit", "kill", "stop",
                         "lost", "tick", "spawn failed"]),
        st.integers(0, 3),
        st.sampled_from([0.0, 0.05, 0.4, 7.0]),
    ),
    max_size=40,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_every_history_ends(steps: list[tuple[str, int, float]]) -> None:
    """Whatever happens in whatever order: no exception, states agree, and time alone ends the job."""
    bench = Bench(job(role("TRAINER"), role("ACTOR", 2, "elastic"), role("A")))
    for what, which, after_s in steps:
        bench.now += after_s
        names = bench.names()
        name = names[which] if names else "TRAINER:0"
        role_name, _, rank = name.partition(":")
        ident = (role_name, int(rank), 0)
        if what == "register":
            bench.register()
        elif what == "bind" and names:
            bench.bind(name)
        elif what == "ready":
            bench.ready(name)
        elif what == "began":
            bench.send(ev.RunBegan(*ident, role_name == "TRAINER"))
        elif what == "finish":
            bench.finish(name)
        elif what in ("fail", "call"):
            bench.fail(name, from_call=what == "call")
        elif what in ("exit", "kill") and names:
            bench.exit(name, *((0, None) if what == "exit" else (None, 9)))
        elif what == "stop":
            bench.send(ev.StopRequested("Ctrl-C", 3.0))
        elif what == "lost":
            bench.send(ev.AgentLost(0, "was killed"))
        elif what == "spawn failed":
            bench.send(ev.ActionFailed(0, "spawning", "no"))
        else:
            bench.tick(0.0)
        status = bench.manager.status()
        if status.stage == "succeeded":
            assert not status.failures
            assert {m.state for m in status.members} <= {"exited", "failed"}
        if status.stage == "failed":
            assert status.failures
        if status.stage in ("succeeded", "failed", "stopped"):
            assert all(member.gone for member in bench.manager.context.members.values())
    if bench.stage in ("starting", "stopping") or bench.manager.context.failures:
        for _ in range(8):
            bench.tick(40.0)
        assert bench.manager.ended


def test_a_failure_that_is_told_again_to_the_next_master_is_one_failure() -> None:
    bench = Bench(job(role("TRAINER"), role("ACTOR", 2)))
    bench.running()
    for _ in range(2):
        bench.fail("ACTOR:0")
    bench.fail("ACTOR:1")
    bench.tick(1.0)
    assert [(failure.role, failure.rank) for failure in bench.manager.status().failures] == [("ACTOR", 0), ("ACTOR", 1)]
