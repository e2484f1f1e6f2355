from __future__ import annotations

import pytest

from rlmesh.observe.time_use import TimeUse, format_time_use
from tests.observe.samples import call, record


def test_averages_are_per_step_and_the_longest_wait_comes_first() -> None:
    use = TimeUse()
    for step in range(4):
        calls = (call("REWARD", wall_s=0.1), call("ROLLOUT", wall_s=0.3, calls=2))
        use.add(record(step, *calls, step_time_s=0.5))
    (trainer,) = use.callers()
    assert (trainer.caller, trainer.steps) == ("TRAINER", 4)
    assert trainer.step_s == pytest.approx(0.5)
    assert [role.role for role in trainer.roles] == ["ROLLOUT", "REWARD"]
    assert trainer.roles[0].waited_s == pytest.approx(0.3) and trainer.roles[0].calls == 2
    assert trainer.overhead_s == pytest.approx(0.012)
    assert trainer.overhead_fraction == pytest.approx(0.024)
    assert trainer.own_s == pytest.approx(0.1)


def test_the_member_waited_for_is_the_one_that_cost_most_not_the_one_seen_most() -> None:
    usual, rare = call("ACTOR", "update", wall_s=0.1), call("ACTOR", "update", wall_s=2.0, slowest_rank=1)
    reports = [record(step, usual, step_time_s=1) for step in range(5)]
    reports.append(record(5, rare, step_time_s=3))
    (trainer,) = TimeUse(reports).callers()
    assert (trainer.roles[0].slowest_method, trainer.roles[0].slowest_rank) == ("update", 1)


def test_overlapping_calls_share_the_step() -> None:
    calls = [call(role, wall_s=0.4, share_s=0.1) for role in ("ACTOR", "CRITIC", "REWARD", "REFERENCE")]
    (trainer,) = TimeUse([record(0, *calls, step_time_s=0.5)]).callers()
    assert sum(role.waited_s for role in trainer.roles) == pytest.approx(1.6)
    assert trainer.own_s == pytest.approx(0.1)


def test_without_the_metric_the_step_time_is_what_lies_between_reports() -> None:
    reports = [record(step, call("ACTOR"), rank=rank) for step in range(5) for rank in range(2)]
    (trainer,) = TimeUse(reports).callers()
    assert trainer.step_s == pytest.approx(1.0)  # samples.record puts one second between steps


def test_what_was_called_outside_of_timed_steps_is_not_part_of_them() -> None:
    before = record(0, call("ACTOR", "load_model", wall_s=60.0), heldout_accuracy=0.4)
    steps = [record(step, call("ACTOR", wall_s=0.2), step_time_s=0.5) for step in (1, 2)]
    (trainer,) = TimeUse([before, *steps]).callers()
    assert trainer.steps == 2 and trainer.roles[0].waited_s == pytest.approx(0.2)


def test_calls_to_the_jobs_own_processes_are_left_out() -> None:
    (trainer,) = TimeUse([record(1, call("@master", "ready"), call("ACTOR"), step_time_s=0.5)]).callers()
    assert [role.role for role in trainer.roles] == ["ACTOR"]


def test_roles_that_call_nobody_are_left_out() -> None:
    assert TimeUse([record(0, role="ACTOR", grad_norm=1.0)]).callers() == ()
    assert format_time_use(()) == []


def test_the_table_says_who_was_waited_for_and_what_rlmesh_cost() -> None:
    generate = call("ROLLOUT", "generate", slowest_rank=1)
    reports = [record(step, generate, step_time_s=0.25) for step in range(3)]
    head, columns, row = format_time_use(TimeUse(reports).callers())
    assert head == "time per step of TRAINER: 0.250 s over 3 steps, of which rlmesh itself 6.0 ms (2.4 %)"
    assert columns.split("  ")[1] == "waiting for" and columns.endswith("mostly for")
    numbers = ["1.0", "0.2000", "0.1900", "0.0000", "0.0040", "6.00", "2.40"]
    assert row.split() == ["ROLLOUT", *numbers, "generate", "on", "rank", "1"]
