"""Who hangs, by what members say about themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh.job.status import MemberProgress, MemberStack, Serving
from rlmesh.master import events as ev
from rlmesh.master.jobspec import RestartRule
from rlmesh.master.monitoring.diagnosis import (
    DiagnosisManager,
    Hang,
    Quiet,
    causes_of,
    describe_hang,
    narrowed,
    quiet_for,
)
from tests.master.bench import Bench, job, role

LIMIT_S = 600.0
KEY = ("ACTOR", 0, 0)


def running(since_s: float, quiet_s: float, *waits: str) -> MemberProgress:
    return MemberProgress(None, (Serving("ACTOR:0.update", since_s, "TRAINER:0", True),), quiet_s, waits)


@pytest.mark.parametrize(
    ("progress", "since_s", "for_s"),
    [
        (MemberProgress(quiet_s=10_000), 10_000, 0),  # idle
        (running(700, 700), 0, 700),
        (running(700, 5), 0, 5),  # it calls others
        (running(3, 10_000), 0, 3),  # it had been idle until the call came
        (running(3, 3), 650, 653),  # and has not answered since
        (MemberProgress(run_s=900, quiet_s=800), 0, 800),
        (MemberProgress(run_s=900, quiet_s=0), 0, 0),
    ],
)
def test_a_member_is_quiet_since_its_last_progress(progress: MemberProgress, since_s: float, for_s: float) -> None:
    assert quiet_for(progress, since_s)[0] == for_s


def quiet(name: str, *waits: str) -> Quiet:
    role_name, _, rank = name.partition(":")
    return Quiet((role_name, int(rank), 0), 700, "in run()", waits)


def names(hang: Hang | None) -> tuple[set[str], set[str]]:
    return ({c.name for c in hang.causes}, {o.name for o in hang.others}) if hang else (set(), set())


@pytest.mark.parametrize(
    ("hung", "moving", "causes", "others"),
    [
        ([], [], set(), set()),
        ([quiet("A:0")], [], {"A:0"}, set()),
        ([quiet("T:0", "A:0"), quiet("A:0")], [], {"A:0"}, {"T:0"}),
        ([quiet("T:0", "A:0"), quiet("A:0", "B:0"), quiet("B:0")], [], {"B:0"}, {"T:0", "A:0"}),
        ([quiet("T:0", "A:0")], ["A:0"], set(), set()),  # who waits for somebody that moves
        ([quiet("T:0", "A:0")], [], set(), set()),  # who waits for an idle one: the call's deadline ends it
        ([quiet("A:0", "B:0"), quiet("B:0", "A:0")], [], {"A:0", "B:0"}, set()),
        ([quiet("T:0", "A:0", "B:0"), quiet("A:0", "B:0"), quiet("B:0", "A:0")], [], {"A:0", "B:0"}, {"T:0"}),
        (
            [quiet("A:0", "B:0"), quiet("B:0", "A:0", "C:0"), quiet("C:0", "D:0"), quiet("D:0", "C:0")],
            [],
            {"C:0", "D:0"},
            {"A:0", "B:0"},
        ),  # a circle that waits for another one
        ([quiet("A:0"), quiet("A:1")], [], {"A:0", "A:1"}, set()),
    ],
)
def test_causes_are_told_from_those_that_wait_for_them(
    hung: list[Quiet], moving: list[str], causes: set[str], others: set[str]
) -> None:
    assert names(causes_of(hung, moving)) == (causes, others)


NAMES = st.sampled_from(["A:0", "B:0", "C:0", "D:0"])


@given(st.dictionaries(NAMES, st.lists(NAMES, max_size=3)), st.lists(NAMES))
def test_causes_are_some_of_those_that_are_quiet(waits: dict[str, list[str]], moving: list[str]) -> None:
    hung = [quiet(name, *of) for name, of in waits.items()]
    found = causes_of(hung, moving)
    if found is not None:
        assert found.causes
        assert {*found.causes, *found.others} <= set(hung)
        assert not set(found.causes) & set(found.others)
        assert all(not set(cause.waits_for) & set(moving) for cause in found.causes)


def stack(rank: int, file: str) -> MemberStack:
    text = f'Thread 0x1 (most recent call first):\n  File "a.py", line 1 in x\n\nCurrent thread 0x2 (most recent call first):\n  File "{file}", line 7 in work\n  File "main.py", line 2 in run\n'  # noqa: E501
    return MemberStack("ACTOR", rank, 0, 10 + rank, "runs", text=text)


@pytest.mark.case("n14")
def test_a_hang_in_a_circle_draws_it() -> None:
    hang = causes_of([quiet("T:0", "A:0"), quiet("A:0", "B:0"), quiet("B:0", "A:0")], [])
    assert hang is not None and [other.name for other in hang.others] == ["T:0"]
    assert "in a circle: A:0 → B:0 → A:0" in describe_hang(hang, {}, LIMIT_S, "", 0.0).message


def test_who_is_in_a_collective_waits_for_who_is_not() -> None:
    hang = Hang((quiet("ACTOR:0"), quiet("ACTOR:1")))
    stacks = {("ACTOR", 0, 0): stack(0, "/x/torch/distributed/c10d.py"), ("ACTOR", 1, 0): stack(1, "/u/mine.py")}
    assert stacks["ACTOR", 1, 0].frames == ("/u/mine.py:7 in work", "main.py:2 in run")
    assert names(narrowed(hang, stacks)) == ({"ACTOR:1"}, {"ACTOR:0"})
    stacks["ACTOR", 1, 0] = stack(1, "/x/torch/distributed/c10d.py")
    assert narrowed(hang, stacks) == hang


def test_a_member_that_does_not_answer_is_as_old_as_its_last_answer() -> None:
    manager = DiagnosisManager(LIMIT_S)
    manager.answered(KEY, running(1, 1), 100.0)
    for at in range(110, 700, 10):
        manager.missed(KEY, float(at))
        assert manager.find_hang({KEY}, (), float(at)) is None
    found = manager.find_hang({KEY}, (), 700.0)
    assert found is not None and found.causes[0].silent
    manager.answered(KEY, MemberProgress(), 701.0)
    assert manager.find_hang({KEY}, (), 10_000.0) is None, "it was slow, and is idle now"
    manager.missed(KEY, 10_000.0)
    assert manager.find_hang({KEY}, (), 10_000.0 + LIMIT_S - 1) is None
    assert manager.find_hang({KEY}, (), 10_000.0 + LIMIT_S) is not None, (
        "it was idle, and something keeps it from answering"
    )


def test_questions_are_asked_in_intervals() -> None:
    manager = DiagnosisManager(80.0)
    assert [at for at in range(100, 140) if manager.due(float(at))] == [100, 110, 120, 130]
    assert DiagnosisManager(0.1).poll_s == 0.2 and DiagnosisManager(1e6).poll_s == 15.0


@pytest.mark.parametrize("scope", ["member", "never"])
def test_a_hang_is_dealt_with_as_the_policy_says(scope: str) -> None:
    rule = RestartRule(scope)  # type: ignore[arg-type]
    bench = Bench(job(role("TRAINER", restart=rule), role("A", restart=rule)))
    bench.running()
    bench.tick(0.1)
    asked = bench.took(ev.AskProgress)[-1].members
    assert set(asked) == {("TRAINER", 0, 0), ("A", 0, 0)}
    working = MemberProgress(None, (Serving("A:0.work", 601, "TRAINER:0", True),), 601)
    bench.send(ev.ProgressSeen(("TRAINER", 0, 0), MemberProgress(650, (), 601, ("A:0",))))
    bench.send(ev.ProgressSeen(("A", 0, 0), working))
    (take,) = bench.took(ev.TakeStacks)
    assert set(take.members) == set(asked)
    assert bench.stage == "running", "nobody is ended before the stacks are there"
    told = MemberStack("A", 0, 0, 1001, "runs", text='Current thread 0x1:\n  File "a.py", line 3 in work\n')
    bench.send(ev.StacksTaken((told,), "/runs/toy/stacks.txt"))
    status = bench.manager.status()
    if scope == "never":
        assert bench.stage == "stopping"
        message = status.failures[0].message
    else:
        (record,) = status.restarts
        assert record.unit == "A:0"
        assert bench.took(ev.EndProcesses) == [ev.EndProcesses(0, (("A", 0, 0),), 0.0)]
        message = record.failure.message
    assert message.startswith("A:0 (pid 1001) hangs: in A:0.work() for TRAINER:0, without a report")
    for part in ("601 s (limit 600 s)", "its process runs", "at a.py:3 in work", "waiting: TRAINER:0 in run()",
                 "stacks of all members: /runs/toy/stacks.txt"):  # fmt: skip
        assert part in message


def test_stacks_that_do_not_come_hold_nobody_up() -> None:
    bench = Bench(job(role("TRAINER")))
    bench.running()
    bench.send(ev.ProgressSeen(("TRAINER", 0, 0), MemberProgress(650, (), 650)))
    bench.tick(9.9)
    assert bench.stage == "running"
    bench.tick(0.2)
    assert "it did not answer with its stacks" not in bench.manager.context.failures[0].message
    assert "TRAINER:0 hangs: in run()" in bench.manager.context.failures[0].message


def test_a_bad_device_fails_the_members_on_it() -> None:
    bench = Bench(job(role("TRAINER"), role("A", 2), accelerators=1000))
    bench.running()
    uuid = bench.member("A:1").placement.devices[0].device.uuid
    bench.send(ev.DeviceFailed(0, uuid, "Xid 79: it has fallen off the bus"))
    (failure,) = bench.manager.context.failures
    assert failure.role == "A" and failure.rank == 1 and failure.kind == "BadDevice"
    assert f"device {uuid} of node node-0 is bad: Xid 79" in failure.message
