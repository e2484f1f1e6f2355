"""Members that wait for each other: found when they do, and only then."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmesh.master.monitoring.wait_circles import CircleWatch, circles_in
from rlmesh.runtime.serving.wait_report import MAIN, BlockedCalls, CallKey, Holder, QueuedCall
from rlmesh.testing import LocalCluster
from tests.master import circle_job
from tests.own_time import OwnTime


def holder(name: str, number: int, *waits_for: CallKey, caller: str = "T:0") -> Holder:
    return Holder(f"{caller}/{number}", f"{name}.go()", waits_for, 2.0, (caller, number))


def queued(call: CallKey, what: str, *behind: str) -> QueuedCall:
    return QueuedCall(call, f"{what}()", behind, 1.0)


def crossed() -> dict[str, BlockedCalls]:
    """A:0 and B:0 call each other, for a trainer's calls 1 and 2."""
    a, b = holder("A:0", 1, ("A:0", 10)), holder("B:0", 2, ("B:0", 20))
    return {
        "A:0": BlockedCalls((a,), (queued(("B:0", 20), "A:0.echo", a.key),)),
        "B:0": BlockedCalls((b,), (queued(("A:0", 10), "B:0.echo", b.key),)),
    }


@pytest.mark.case("b10")
def test_a_circle_is_drawn_and_both_of_its_calls_are_ended() -> None:
    (circle,) = circles_in(crossed())
    assert circle.members == ("A:0", "B:0") and set(circle.calls) == {("B:0", ("A:0", 10)), ("A:0", ("B:0", 20))}
    assert circle.text.startswith("A:0 → B:0 → A:0 wait for each other in a circle, for 2.0 s: A:0.go() waits for ")
    assert "B:0.echo(), which is queued behind B:0.go()" in circle.text and "@rpc(concurrent=n)" in circle.text


@pytest.mark.case("b10")
def test_a_circle_counts_when_all_in_it_have_said_so_twice() -> None:
    watch, reports = CircleWatch(), crossed()
    assert watch.take("A:0", 0, reports["A:0"], 1.0) == []
    assert watch.take("B:0", 0, reports["B:0"], 1.5) == [] and len(watch.circles()) == 1
    assert watch.take("A:0", 0, reports["A:0"], 2.0) == []
    (circle,) = watch.take("B:0", 0, reports["B:0"], 2.5)
    assert circle.members == ("A:0", "B:0")
    assert watch.take("A:0", 0, reports["A:0"], 3.0) == [], "it is told once"


def test_what_was_said_long_ago_or_by_another_incarnation_does_not_count() -> None:
    watch, reports = CircleWatch(), crossed()
    watch.take("A:0", 0, reports["A:0"], 1.0)
    assert watch.take("B:0", 0, reports["B:0"], 9.0) == [] and watch.circles() == []
    watch.take("A:0", 0, reports["A:0"], 9.1)
    watch.keep({"A:0": 1, "B:0": 0})
    watch.take("B:0", 0, reports["B:0"], 9.2)
    assert watch.circles() == []


def test_who_waits_behind_several_waits_for_the_first_of_them() -> None:
    reports = crossed()
    b = reports["B:0"].holders[0]
    free = holder("B:0", 3, ("B:0", 30))
    shared = queued(("A:0", 10), "B:0.echo", b.key, free.key)
    assert circles_in({**reports, "B:0": BlockedCalls((b, free), (shared,))}) == []
    waits_too = holder("B:0", 3, ("B:0", 20))
    (circle,) = circles_in({**reports, "B:0": BlockedCalls((b, waits_too), (shared,))})
    assert circle.members == ("A:0", "B:0")


def test_setup_that_calls_its_own_member_is_a_circle_of_one() -> None:
    own = Holder(MAIN, "A:0.setup()", (("A:0", 1),), 3.0)
    (circle,) = circles_in({"A:0": BlockedCalls((own,), (queued(("A:0", 1), "A:0.echo", MAIN),))})
    assert circle.text.startswith("A:0 → A:0 wait") and "A:0.setup() waits for A:0.echo(), which is" in circle.text


class World:
    """Processes whose methods call each other at random, each with one place or two; what really happens."""

    def __init__(self, seed: int, processes: int) -> None:
        self.random = random.Random(seed)
        self.places = [self.random.choice([1, 1, 2]) for _ in range(processes)]
        self.running: list[list[int]] = [[] for _ in range(processes)]
        self.queues: list[list[int]] = [[] for _ in range(processes)]
        self.waits: dict[int, set[int]] = {}
        self.served_by: dict[int, int] = {}
        self.caller: dict[int, int] = {}
        self.cancels: list[tuple[int, int]] = []
        self.ids = 0

    def call(self, process: int, parent: int | None) -> int:
        self.ids += 1
        self.served_by[self.ids] = process
        self.caller[self.ids] = -1 if parent is None else self.served_by[parent]
        self.queues[process].append(self.ids)
        return self.ids

    def step(self, now: int) -> None:
        for process, queue in enumerate(self.queues):
            while queue and len(self.running[process]) < self.places[process]:
                self.running[process].append(queue.pop(0))
        self.cancels = [(at, call) for at, call in self.cancels if not self._cancelled(at, call, now)]
        if self.random.random() < 0.2:
            self.call(self.random.randrange(len(self.places)), None)
        busy = [call for calls in self.running for call in calls]
        if not busy:
            return
        call = self.random.choice(busy)
        if not self.waits.get(call):
            if self.random.random() < 0.6:
                others = self.random.sample(range(len(self.places)), self.random.choice([1, 1, 2]))
                self.waits[call] = {self.call(process, call) for process in others}
            else:
                self._end(call)
        elif self.random.random() < 0.02:  # its deadline: it gives up, and the news travels
            self.cancels += [(now + 3, other) for other in self.waits[call]]
            self.waits[call] = set()

    def _cancelled(self, at: int, call: int, now: int) -> bool:
        queue = self.queues[self.served_by[call]]
        if now >= at and call in queue:
            queue.remove(call)
        return now >= at

    def _end(self, call: int) -> None:
        self.running[self.served_by[call]].remove(call)
        for waited in self.waits.values():
            waited.discard(call)

    def report(self, process: int) -> BlockedCalls:
        holders = {
            f"c/{call}": Holder(f"c/{call}", f"P:{process}.m{call}()", self._keys(call), 1.0, self._key(call))
            for call in self.running[process]
            if self.waits.get(call)
        }
        if len(holders) < self.places[process]:
            return BlockedCalls(tuple(holders.values()))
        waiting = tuple(QueuedCall(self._key(c), f"P:{process}.q()", tuple(holders), 1.0) for c in self.queues[process])
        return BlockedCalls(tuple(holders.values()), waiting)

    def _keys(self, call: int) -> tuple[CallKey, ...]:
        return tuple(self._key(other) for other in sorted(self.waits[call]))

    def _key(self, call: int) -> CallKey:
        return f"P:{self.caller[call]}", call

    def stuck(self) -> set[int]:
        """The calls that run and will never end, if nobody gives up."""
        running = [list(calls) for calls in self.running]
        queues = [list(calls) for calls in self.queues]
        waits = {call: set(others) for call, others in self.waits.items()}
        moved = True
        while moved:
            moved = False
            for process, calls in enumerate(running):
                for call in [call for call in calls if not waits.get(call)]:
                    calls.remove(call)
                    for others in waits.values():
                        others.discard(call)
                    moved = True
                while queues[process] and len(calls) < self.places[process]:
                    calls.append(queues[process].pop(0))
                    moved = True
        return {call for calls in running for call in calls}


@pytest.mark.case("b10")
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 30), processes=st.integers(2, 5))
def test_no_circle_is_seen_where_there_is_none_and_none_is_overlooked(seed: int, processes: int) -> None:
    world, watch = World(seed, processes), CircleWatch()
    stuck_at: list[set[int]] = []
    for now in range(300):
        world.step(now)
        stuck_at.append(world.stuck())
        process = now % (4 * processes)
        if process < processes:
            for circle in watch.take(f"P:{process}", 0, world.report(process), now / 100):
                there = {int(key.partition("/")[2]) for _, key in circle.vertices}
                assert any(there <= stuck for stuck in stuck_at), "all of them were stuck at the same moment"
        if not world.cancels:
            whole = circles_in({f"P:{number}": world.report(number) for number in range(processes)})
            assert bool(whole) == bool(stuck_at[-1])


def run(tmp_path: Path, rounds: list[circle_job.Calls], **options: Any) -> Any:
    out = tmp_path / "seen.json"
    with LocalCluster(run_root=tmp_path):
        result = circle_job.build(out, rounds, **options).submit("circle")
    assert not result.status.restarts and all(report.clean for report in result.exit_reports)
    return json.loads(out.read_text())


def assert_circle(answer: Any, *drawn: str) -> None:
    name, text = answer
    assert name == "WouldDeadlock" and any(f"{one} wait for each other in a circle" in text for one in drawn), text


@pytest.mark.case("b10")
def test_two_members_that_call_each_other_are_told(tmp_path: Path, own_time: OwnTime) -> None:
    ((seen, took_s),) = run(tmp_path, [[("A:0", "go", ["B:0"]), ("B:0", "go", ["A:0"])]])
    for answer in seen:
        assert_circle(answer, "A:0 → B:0 → A:0")
    assert own_time.of(took_s) < 5.0, "at the default hang_s"
    told = [json.loads(line) for line in next(tmp_path.glob("*/events.jsonl")).read_text().splitlines()]
    (found,) = [event for event in told if event["event"] == "CircleFound"]
    assert found["members"] == ["A:0", "B:0"]


@pytest.mark.slow
@pytest.mark.case("b10")
@pytest.mark.case("n14")
def test_circles_of_all_kinds_are_told_and_nothing_else_is(tmp_path: Path, own_time: OwnTime) -> None:
    circles: list[tuple[circle_job.Calls, str]] = [
        ([("A:0", "go", ["B:0"]), ("B:0", "go", ["C:0"]), ("C:0", "go", ["A:0"])], "A:0 → B:0 → C:0 → A:0"),
        ([("G:0", "go", ["G:1"]), ("G:1", "go", ["G:0"])], "G:0 → G:1 → G:0"),
        ([("A:0", "group", ["G"]), ("G:1", "go", ["A:0"])], "A:0 → G:1 → A:0"),
        ([("A:0", "go", ["C:0", "pass_on", "B"]), ("B:0", "go", ["A:0"])], "A:0 → C:0 → B:0 → A:0"),
        ([("A:0", "go_async", ["B"]), ("B:0", "go_async", ["A"])], "A:0 → B:0 → A:0"),
        ([("A:0", "go_gathering", ["B"]), ("B:0", "go_gathering", ["A"])], "A:0 → B:0 → A:0"),
        ([("A:0", "go", ["TRAINER:0", "on_main"])], "A:0 → TRAINER:0 → A:0"),
    ]
    others: circle_job.Calls = [
        ("A:0", "forget", ["B"]), ("B:0", "go", ["A:0"]), ("G:0", "patient", ["G"]), ("C:0", "go", ["G:1", "slow"]),
    ]  # fmt: skip
    answers = run(tmp_path, [*(calls for calls, _ in circles), others])
    for (calls, drawn), (seen, took_s) in zip(circles, answers[:-1], strict=True):
        assert len(seen) == len(calls)
        for answer in seen:
            assert_circle(answer, drawn)
        assert own_time.of(took_s) < 5.0, drawn
    assert answers[-1][0][:2] == ["done", "echo"] and answers[-1][0][3] == "slow"


@pytest.mark.case("b10")
def test_who_waits_for_a_circle_is_no_cause(tmp_path: Path) -> None:
    (seen, _), (after, _) = run(
        tmp_path, [[("A:0", "go", ["B:0"]), ("B:0", "go", ["A:0"])], [("A:0", "echo", [])]], hang_s=4.0
    )
    assert [name for name, _ in seen] == ["WouldDeadlock"] * 2 and after == ["echo"]


@pytest.mark.case("s04")
@pytest.mark.parametrize("whom", [{}, {"A": "B", "B": "A"}], ids=["its own member", "each other"])
def test_setup_that_waits_for_a_member_that_is_not_set_up_is_told(
    whom: dict[str, str], tmp_path: Path, own_time: OwnTime
) -> None:
    ((seen, _),) = run(tmp_path, [[("A:0", "what", []), ("B:0", "what", [])]], setup=whom)
    for answer in seen:
        assert answer[0] == "WouldDeadlock" and "setup() waits for" in answer[1]
