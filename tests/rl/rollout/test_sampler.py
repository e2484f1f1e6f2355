"""`Sampler`: all pipelines with engines that answer at different times, die, or are killed by a prompt."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlmesh.errors import PeerLost, Restarting
from rlmesh.rl.rollout.buffer import GroupSlot, SampleBuffer
from rlmesh.rl.rollout.engine_loads import EngineLoads
from rlmesh.rl.rollout.judging import judge
from rlmesh.rl.rollout.ledger import LEDGER, Ledger, faults_of, read_rows
from rlmesh.rl.rollout.pipeline import Pipeline
from rlmesh.rl.rollout.requests import sample_seed, sample_seeds
from rlmesh.rl.rollout.role_engines import kind_of
from rlmesh.rl.rollout.sampler import Sampler
from rlmesh.rl.rollout.silence import Silence
from rlmesh.rl.types import Episode, Failed, Group, Outcome, Score
from tests.own_time import HANG_S
from tests.rl.rollout.fakes import FakeEngines, draw_from, group_of, scored

SIZE, PROMPTS, STEPS = 4, 12, 9
PIPELINES = ("sync", "one-step-off", "async(staleness=1)", "async(staleness=3)")
DIED = "the scorer's process ended"


def total(episode: Episode) -> Outcome:
    return episode.outcomes["r"]


class Loop:
    """A training loop without training, over fake engines and a real ledger."""

    def __init__(
        self, folder: Path, engines: FakeEngines, pipeline: str, *, refill: float = 0.0, steps: int = STEPS,
        score: Callable[[Sequence[Group]], list[Group]] = scored, in_flight: int = 2,
        extra: int = 0, deadline_s: float = HANG_S,
    ) -> None:  # fmt: skip
        rules = Pipeline.parse(pipeline)
        self.engines, self.steps, self.path = engines, steps, folder / LEDGER
        settings = {"staleness": rules.staleness, "batch_size": SIZE}
        self.ledger = Ledger(folder, settings, lambda: 0.0)
        self.notes: list[str] = []
        self.revived = 0
        self.reports: list[dict[str, float]] = []
        self.taken: list[list[int]] = []
        buffer = SampleBuffer(SIZE, rules.staleness, steps, extra=extra, refill=refill, record=self.ledger.record)
        self.sampler = Sampler(
            buffer, draw_from(PROMPTS), engines, score,
            lambda group: judge(group, total, dynamic=refill > 0, died=DIED), pipeline=rules, samples=2, seed=0,
            in_flight=in_flight, background=rules.staleness > 0, deadline_s=deadline_s, note=self.notes.append,
            revive=self.revive,
        )  # fmt: skip

    def revive(self) -> None:
        self.revived += 1
        self.engines.push(self.engines.version)

    def begin(self, version: int = 0) -> None:
        self.engines.push(version)
        self.sampler.advance(version)

    def step(self, step: int) -> None:
        groups = self.sampler.take(step)
        assert len(groups) == SIZE and all(group.episodes[0].outcomes for group in groups)
        self.taken.append([int(group.episodes[0].ids[1]) for group in groups])
        self.sampler.drain()
        self.sampler.trained(step)
        self.engines.push(step)
        self.reports.append(self.sampler.report())
        self.sampler.advance(step)

    def run(self) -> None:
        self.begin()
        for step in range(1, self.steps + 1):
            self.step(step)
        self.ledger.flush()

    def close(self) -> None:
        self.sampler.close()
        self.ledger.close()
        self.engines.close()


@contextmanager
def loop(folder: Path, engines: FakeEngines, pipeline: str, **options: Any) -> Iterator[Loop]:
    made = Loop(folder, engines, pipeline, **options)
    try:
        yield made
    finally:
        made.close()


def tenfold(position: int) -> float:
    """Every third prompt takes ten times as long."""
    return 10.0 if position % 3 == 0 else 1.0


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("count", [1, 2])
def test_each_prompt_is_trained_once_per_epoch_however_slow(tmp_path: Path, pipeline: str, count: int) -> None:
    with loop(tmp_path, FakeEngines(count, tenfold), pipeline) as made:
        made.run()
        assert [place for taken in made.taken for place in taken] == list(range(SIZE * STEPS))
        assert faults_of(made.path) == []
        rows = [row for row in read_rows(made.path) if row.state == "trained"]
        for epoch in range(3):
            assert sorted(row.prompt for row in rows if row.epoch == epoch) == list(range(PROMPTS))
        assert max(report["buffer/staleness_max"] for report in made.reports) <= made.sampler.pipeline.staleness


@pytest.mark.parametrize("count", [1, 2])
def test_one_step_off_samples_each_step_with_the_version_before_the_last(tmp_path: Path, count: int) -> None:
    with loop(tmp_path, FakeEngines(count, tenfold), "one-step-off") as made:
        made.run()
        rows = [row for row in read_rows(made.path) if row.state == "trained"]
        assert all(row.oldest == row.newest == max((row.step or 0) - 2, 0) for row in rows)
        # Each round is one request per engine, so responses do not depend on times.
        parts = sorted(positions for _, _, positions in made.engines.asked)
        share = SIZE // count
        assert parts == [tuple(range(at, at + share)) for at in range(0, SIZE * STEPS, share)]


def test_responses_go_on_across_a_push(tmp_path: Path) -> None:
    with loop(tmp_path, FakeEngines(2, tenfold), "async(staleness=2)") as made:
        made.engines.stuck = {9}
        made.begin()
        until = time.monotonic() + HANG_S
        while not any(9 in positions for _, _, positions in made.engines.asked):
            assert time.monotonic() < until and not threading.Event().wait(0.001)
        made.step(1)
        made.step(2)
        made.engines.release()
        for step in range(3, STEPS + 1):
            made.step(step)
        made.ledger.flush()
        (row,) = [row for row in read_rows(made.path) if row.position == 9]
        assert (row.step, row.oldest, row.newest, row.asked) == (3, 0, 2, 1), "begun with version 0, ended with 2"
        assert made.reports[2]["buffer/mixed_versions"] >= 1 / SIZE and made.reports[2]["buffer/staleness_max"] == 2
        assert faults_of(made.path) == []


def test_engines_wait_while_the_buffer_is_full(tmp_path: Path) -> None:
    with loop(tmp_path, FakeEngines(2), "async(staleness=2)") as made:
        made.begin()
        full = threading.Event()

        def look() -> bool:
            return made.sampler.buffer.counts()["ready"] == 3 * SIZE

        while not look():
            assert not full.wait(0.01)
        before = len(made.engines.asked)
        assert before == 3 * SIZE and not full.wait(0.1) and len(made.engines.asked) == before
        made.step(1)
        assert made.reports[0]["buffer/engines_wait_s"] > 0.05


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_group_whose_engine_dies_is_asked_for_elsewhere(tmp_path: Path, pipeline: str) -> None:
    killed: list[int] = []

    def kills(position: int) -> bool:
        if position == 5 and not killed:
            killed.append(position)
            return True
        return False

    with loop(tmp_path, FakeEngines(2, tenfold, kills), pipeline) as made:
        made.run()
        assert faults_of(made.path) == [] and killed and made.revived == 0
        assert [place for taken in made.taken for place in taken] == list(range(SIZE * STEPS))
        rows = {row.position: row for row in read_rows(made.path)}
        assert rows[5].asked == 2 and rows[5].deaths == 1
        assert sum(report["buffer/asked_again"] for report in made.reports) >= 1


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_engines_join_and_leave_between_pushes(tmp_path: Path, pipeline: str) -> None:
    """Engine 1 leaves with all that it samples; later two others come."""
    engines = FakeEngines(2, tenfold)
    with loop(tmp_path, engines, pipeline) as made:
        made.begin()
        made.step(1)
        engines.count = 1
        engines.kill(1)
        for step in range(2, 5):
            made.step(step)
        before = len(engines.asked)
        engines.count = 3
        for step in range(5, STEPS + 1):
            made.step(step)
        made.ledger.flush()
        assert {rank for rank, _, _ in engines.asked[before:]} == {0, 1, 2}
        assert faults_of(made.path) == []
        assert [place for taken in made.taken for place in taken] == list(range(SIZE * STEPS))


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_an_engine_that_restarts_is_asked_once_it_has_weights(tmp_path: Path, pipeline: str) -> None:
    """Steps go on without it. It gets weights with the next push, or before, while the training waits for samples."""
    engines = FakeEngines(2, tenfold)
    with loop(tmp_path, engines, pipeline) as made:
        made.begin()
        made.step(1)
        engines.kill(1)
        engines.absent = {1}
        for step in range(2, 5):
            made.step(step)
        before = len(engines.asked)
        # What is sampled far ahead may all have been asked for before version 2.
        assert made.revived == 0 and {rank for rank, version, _ in engines.asked if version > 1} <= {0}
        engines.back = True
        for step in range(5, STEPS + 1):
            made.step(step)
        made.ledger.flush()
        # Step 5 waits for samples only if none are made ahead of it.
        assert made.revived == (pipeline == "sync") or made.sampler.pipeline.name == "async"
        assert {rank for rank, _, _ in engines.asked[before:]} == {0, 1}
        if made.sampler.pipeline.drains:  # what is sampled in one request is the same without engine 1
            assert {len(positions) for _, _, positions in engines.asked} == {SIZE // 2}
        assert faults_of(made.path) == []
        assert [place for taken in made.taken for place in taken] == list(range(SIZE * STEPS))


def test_the_only_engine_dies_and_gets_weights_again(tmp_path: Path) -> None:
    killed: list[int] = []

    def kills(position: int) -> bool:
        killed.append(position)
        return killed.count(5) == 1 and position == 5

    engines = FakeEngines(1, kills=kills)
    with loop(tmp_path, engines, "sync") as made:
        made.run()
        assert made.revived == 1 and faults_of(made.path) == []


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("count", [1, 2])
def test_a_prompt_that_kills_two_engines_is_set_aside(tmp_path: Path, pipeline: str, count: int) -> None:
    with loop(tmp_path, FakeEngines(count, tenfold, lambda position: position == 6), pipeline) as made:
        made.run()
        assert faults_of(made.path) == []
        rows = {row.position: row for row in read_rows(made.path)}
        assert rows[6].state == "failed" and rows[6].reason.startswith("poison: 2 engines died of it")
        assert rows[6].deaths == 2 and {row.deaths for row in rows.values() if row.position > 6 + 3 * SIZE} == {0}
        assert {row.position for row in rows.values() if row.state != "trained"} == {6}
        assert [len(taken) for taken in made.taken] == [SIZE] * STEPS
        assert len(made.notes) == 1 and "position 6 (epoch 0" in made.notes[0]
        assert sum(report["buffer/poisoned"] for report in made.reports) == 1


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("count", [1, 2])
def test_bystanders_of_a_crash_are_neither_lost_nor_blamed(tmp_path: Path, pipeline: str, count: int) -> None:
    """Several prompts kill, beside prompts whose engine is killed from outside."""
    outside: list[int] = []

    def shot(position: int) -> bool:
        if position in (2, 3, 17) and position not in outside:
            outside.append(position)
            return True
        return False

    poison = {5, 6, 13}
    engines = FakeEngines(count, tenfold, lambda position: position in poison, shot)
    with loop(tmp_path, engines, pipeline) as made:
        made.run()
        assert faults_of(made.path) == [] and sorted(set(outside)) == [2, 3, 17]
        rows = {row.position: row for row in read_rows(made.path)}
        assert {row.position for row in rows.values() if row.state != "trained"} == poison
        assert all(rows[position].reason.startswith("poison: ") for position in poison)
        taken = [place for step in made.taken for place in step]
        assert taken == [place for place in range(SIZE * STEPS + 3) if place not in poison]
        # A prompt that kills gets its second engine with nothing else.
        last = {position: positions for _, _, positions in engines.asked for position in positions}
        assert all(last[position] == (position,) for position in poison)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_an_engine_that_is_killed_from_outside_again_and_again_says_little(tmp_path: Path, pipeline: str) -> None:
    """The kernel may kill for lack of memory without being seen, so three deaths are enough, the last ones alone."""
    with loop(tmp_path, FakeEngines(2, tenfold, outside=lambda position: position == 6), pipeline) as made:
        made.run()
        rows = {row.position: row for row in read_rows(made.path)}
        assert rows[6].reason.startswith("poison: 3 engines died of it")
        assert {row.position for row in rows.values() if row.state != "trained"} == {6}
        asked = [positions for _, _, positions in made.engines.asked if 6 in positions]
        assert asked[-1] == (6,) and faults_of(made.path) == []


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("killed by SIGSEGV", "crashed"),
        ("killed by SIGABRT", "crashed"),
        ("exited with code 70", "crashed"),
        ("killed by SIGKILL (out of memory: its peak was 9 MiB, and it had asked for 9 MiB)", "crashed"),
        ("killed by SIGKILL", "died"),
        ("was ended by SIGTERM: its node is drained", "died"),
        ("killed by SIGKILL; its last lines:\n    exited with code 1", "died"),
        ("the connection was lost", "died"),
    ],
)
def test_the_end_of_a_process_says_whether_it_crashed(how: str, kind: str) -> None:
    error = PeerLost("gone")
    error.reason = f"ROLLOUT rank 0 (pid 9 on box) {how}"
    assert kind_of(error) == kind
    begun = PeerLost("gone", executed="no")
    begun.reason = error.reason
    assert kind_of(begun) == "no weights", "the request was not begun"
    assert kind_of(Restarting("again", executed="no")) == "no weights" and kind_of(ValueError("no")) == "error"


def test_a_suspect_is_asked_for_alone() -> None:
    loads = EngineLoads(round_size=0, in_flight=4)
    loads.serve([0, 1])
    slots = [GroupSlot(position, (0, position), suspect=7 * (position == 1)) for position in range(5)]
    plan = loads.plan(slots)
    assert plan[0] == (0, [slots[1]]) and all(rank == 1 for rank, _ in plan[1:]) and len(plan) == 5
    for rank, part in plan:
        loads.begin(rank, part, 0.0)
    assert all(rank == 1 for rank, _ in loads.plan([GroupSlot(9, (0, 9))])) and loads.end(0, [slots[1]]).alone
    # What an engine samples when it is lost is lost together.
    deaths = [loads.end(1, [slot], lost=True).death for slot in slots[2:]]
    loads.serve([1])
    loads.begin(1, [slots[2]], 0.0)
    assert deaths == [1, 1, 1] and loads.end(1, [slots[2]], lost=True).death == 2


@pytest.mark.parametrize("pipeline", ["sync", "one-step-off", "async"])
def test_a_prompt_whose_scorer_dies_twice_is_set_aside(tmp_path: Path, pipeline: str) -> None:
    calls: list[int] = []

    def score(groups: Sequence[Group]) -> list[Group]:
        found = []
        for group in scored(groups):
            position = int(group.episodes[0].ids[1])
            if position == 3 or (position == 7 and 7 not in calls):
                calls.append(position)
                bad = Episode(group.episodes[0].turns, outcomes={"r": Failed(f"{DIED} with exit code -11")})
                group = Group(group.key, (bad, *group.episodes[1:]), group.row)
            found.append(group)
        return found

    with loop(tmp_path, FakeEngines(2), pipeline, score=score) as made:
        made.run()
        rows = {row.position: row for row in read_rows(made.path)}
        assert rows[3].state == "failed" and "its scorer died twice" in rows[3].reason and calls.count(3) == 2
        assert rows[7].state == "trained", "one death is no proof"
        assert faults_of(made.path) == []


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_groups_of_equal_rewards_are_replaced(tmp_path: Path, pipeline: str) -> None:
    def score(groups: Sequence[Group]) -> list[Group]:
        return scored(groups, lambda group, number: 1.0 if int(group.episodes[0].ids[1]) % 3 == 0 else number)

    with loop(tmp_path, FakeEngines(2, tenfold), pipeline, refill=2.0, score=score) as made:
        made.run()
        taken = [place for step in made.taken for place in step]
        assert taken == [place for place in range(2 * SIZE * STEPS) if place % 3][: SIZE * STEPS]
        assert faults_of(made.path) == []
        dropped = sum(report["buffer/dropped"] for report in made.reports)
        rows = [row for row in read_rows(made.path) if row.state == "dropped"]
        assert dropped == len(rows) > 0 and all("the reward 1" in row.reason for row in rows)


@pytest.mark.parametrize("pipeline", ["sync", "async"])
def test_a_refill_has_a_bound(tmp_path: Path, pipeline: str) -> None:
    with loop(tmp_path, FakeEngines(2), pipeline, refill=1.0, score=lambda g: scored(g, lambda *_: 0.0)) as made:
        made.run()
        assert sum(report["buffer/dropped"] for report in made.reports) == SIZE * STEPS
        assert faults_of(made.path) == []


def test_a_group_without_a_reward_is_replaced(tmp_path: Path) -> None:
    def score(groups: Sequence[Group]) -> list[Group]:
        return [
            Group(group.key, tuple(Episode(e.turns, outcomes={"r": Failed("no")}) for e in group.episodes), group.row)
            if int(group.episodes[0].ids[1]) == 2
            else group
            for group in scored(groups)
        ]

    with loop(tmp_path, FakeEngines(1), "sync", score=score) as made:
        made.run()
        assert made.taken[0] == [0, 1, 3, 4] and faults_of(made.path) == []
        assert made.reports[0]["buffer/failed"] == 1
        assert len(made.notes) == 1 and "position 2 (epoch 0" in made.notes[0] and "reason='no'" in made.notes[0]


@pytest.mark.parametrize("pipeline", ["sync", "async"])
def test_rewards_that_always_fail_end_the_run(tmp_path: Path, pipeline: str) -> None:
    def score(groups: Sequence[Group]) -> list[Group]:
        return [
            Group(group.key, tuple(Episode(e.turns, outcomes={"r": Failed("no truth")}) for e in group.episodes))
            for group in groups
        ]

    with loop(tmp_path, FakeEngines(1), pipeline, score=score) as made:
        made.begin()
        with pytest.raises(RuntimeError, match=r"no response of the batch has a reward.*no truth"):
            made.sampler.take(1)


@pytest.mark.parametrize("pipeline", ["sync", "one-step-off", "async"])
@pytest.mark.parametrize("where", ["engine", "score"])
def test_an_error_ends_the_wait(tmp_path: Path, pipeline: str, where: str) -> None:
    class Broken(FakeEngines):
        def ask(self, rank: int, requests: Any) -> Any:
            if where == "engine":
                raise KeyError("broken")
            return super().ask(rank, requests)

    def score(groups: Sequence[Group]) -> list[Group]:
        raise KeyError("broken")

    with loop(tmp_path, Broken(1), pipeline, score=score) as made:
        made.begin()
        with pytest.raises(KeyError, match="broken"):
            made.sampler.take(1)


@pytest.mark.parametrize("pipeline", ["sync", "one-step-off", "async"])
def test_a_wait_without_any_answer_says_who_is_waited_for(
    tmp_path: Path, pipeline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlmesh.rl.rollout.sampler.TELL_S", 0.1)
    engines = FakeEngines(1)
    engines.hold()
    with loop(tmp_path, engines, pipeline, deadline_s=0.3) as made:
        made.begin()
        count = 2 if pipeline == "async" else 4
        with pytest.raises(TimeoutError) as raised:
            made.sampler.take(1)
        told = str(raised.value)
        assert told.startswith("the training waits for the groups of step 1, and nothing has come for 0.3 s: ")
        third = "drawn" if count == 2 else "sampling"
        assert f"position 0 is sampling; position 1 is sampling; position 2 is {third}" in told
        assert f"engine 0 samples {count} groups (positions 0, 1" in told
        assert ") and got its last request 0 s ago; groups: " in told and " sampled (0 of them ready)" in told
        assert len(made.notes) == 1 and "nothing has come for 0.1 s" in made.notes[0]
        engines.go_on()


def test_the_work_of_engines_is_described() -> None:
    loads = EngineLoads(round_size=0, in_flight=2)
    loads.serve([0, 1, 2])
    loads.begin(1, [GroupSlot(27, (0, 27))], 10.0)
    loads.begin(2, [GroupSlot(28, (0, 28)), GroupSlot(29, (0, 29))], 12.0)
    assert loads.described(15.0) == (
        "engine 0 samples nothing; engine 1 samples 1 group (position 27) and got its last request 5 s ago; "
        "engine 2 samples 2 groups (positions 28, 29) and got its last request 3 s ago"
    )


@pytest.mark.parametrize("pipeline", ["one-step-off", "async"])
def test_a_wait_for_a_reward_says_so(tmp_path: Path, pipeline: str) -> None:
    goes_on = threading.Event()

    def score(groups: Sequence[Group]) -> list[Group]:
        assert goes_on.wait(HANG_S)
        return scored(groups)

    with loop(tmp_path, FakeEngines(1), pipeline, deadline_s=0.3, score=score) as made:
        made.begin()
        with pytest.raises(TimeoutError, match=r"engine 0 samples nothing; rewards score positions 0, 1"):
            made.sampler.take(1)
        goes_on.set()


def test_a_wait_for_the_end_of_sampling_has_a_deadline(tmp_path: Path) -> None:
    with loop(tmp_path, FakeEngines(1), "one-step-off", deadline_s=0.3) as made:
        made.engines.stuck = {10}
        made.begin()
        made.step(1)
        made.sampler.take(2)
        with pytest.raises(TimeoutError, match=r"waits for the end of sampling, .*position 10 is sampling"):
            made.sampler.drain()


def test_answers_that_come_slowly_are_waited_for(tmp_path: Path) -> None:
    """The deadline is of the time without any answer, and not of the whole wait."""
    clock, engines = [0.0], FakeEngines(1)
    with loop(tmp_path, engines, "sync", deadline_s=10.0) as made:
        made.sampler._clock = lambda: clock[0]
        answered = made.sampler._scored

        def slowly(*given: Any) -> None:
            clock[0] += 9.0
            answered(*given)

        made.sampler._scored = slowly  # type: ignore[method-assign, assignment]
        for step in range(1, 4):
            made.begin(step - 1) if step == 1 else None
            made.step(step)
        assert clock[0] == 27.0


class Clock:
    """A clock that goes on by 9 s at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 9.0
        return self.now


@pytest.mark.parametrize("pipeline", ["sync", "one-step-off"])
def test_a_round_that_takes_long_is_waited_for_as_long_as_its_engines_sample(
    tmp_path: Path, pipeline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlmesh.rl.rollout.sampler.LOOK_S", 0.001)
    engines, clock = FakeEngines(1), Clock()
    engines.hold()

    def tokens() -> dict[int, int]:
        if clock.now > 2000.0:
            engines.progress = dict  # type: ignore[method-assign]
        return {0: int(clock.now)}

    engines.progress = tokens  # type: ignore[method-assign]
    with loop(tmp_path, engines, pipeline, deadline_s=100.0) as made:
        made.sampler._silence = Silence(lambda: engines.progress(), 100.0, clock)
        made.begin()
        with pytest.raises(TimeoutError, match="position 0 is sampling"):
            made.sampler.take(1)
        assert 2000.0 < clock.now < 2400.0
        engines.go_on()


def test_a_slow_revival_is_no_silence_and_one_revival_after_another_is() -> None:
    clock = [0.0]
    silence = Silence(dict, 120.0, lambda: clock[0])
    silence.begin()
    clock[0] = 30.0
    silence.lost()
    clock[0] = 130.0
    silence.revived()
    assert silence.seconds == 0.0
    for _ in range(9):
        clock[0] += 50.0
        silence.revived()
    assert silence.seconds == 250.0
    silence.answered()
    clock[0] += 1.0
    silence.revived()
    assert silence.seconds == 0.0


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_engines_are_idle_before_a_push_or_never(tmp_path: Path, pipeline: str) -> None:
    with loop(tmp_path, FakeEngines(2, tenfold), pipeline) as made:
        made.begin()
        made.sampler.take(1)
        made.sampler.await_idle()
        if pipeline == "one-step-off":
            assert made.sampler.buffer.counts() == {"drawn": 0, "sampling": 0, "sampled": SIZE, "ready": SIZE}
        made.sampler.pause()
        assert made.sampler.await_idle()


def test_who_waits_for_idle_engines_is_told_of_a_pause(tmp_path: Path) -> None:
    engines, found = FakeEngines(1), list[bool]()
    engines.hold()
    with loop(tmp_path, engines, "one-step-off") as made:
        made.begin()
        drained, waits = made.sampler._is_drained, threading.Event()

        def looked() -> bool:
            waits.set()
            return drained()

        made.sampler._is_drained = looked  # type: ignore[method-assign]
        waiting = threading.Thread(target=lambda: found.append(made.sampler.await_idle()))
        waiting.start()
        assert waits.wait(HANG_S)
        made.sampler.pause()
        waiting.join(HANG_S)
        assert found == [False]
        engines.go_on()


def reached(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < end, "nothing moves"
        time.sleep(0.001)


def test_a_pause_ends_the_wait_for_idle_engines_in_the_middle_of_a_round(tmp_path: Path) -> None:
    """Nothing is scored after a pause, so groups without rewards are not waited for."""
    engines, found = FakeEngines(2), list[bool]()
    engines.stuck = {SIZE - 1}
    with loop(tmp_path, engines, "one-step-off") as made:
        made.begin()
        reached(lambda: made.sampler.buffer.counts()["sampled"] == SIZE // 2)
        drained, waits = made.sampler._is_drained, threading.Event()

        def looked() -> bool:
            waits.set()
            return drained()

        made.sampler._is_drained = looked  # type: ignore[method-assign]
        waiting = threading.Thread(target=lambda: found.append(made.sampler.await_idle()), daemon=True)
        waiting.start()
        assert waits.wait(HANG_S)
        made.sampler.pause()
        waiting.join(HANG_S / 4)
        assert found == [False]


def test_a_state_within_a_round_drops_the_groups_that_the_whole_round_drops(tmp_path: Path) -> None:
    """Two groups of a round have no differences, and one of them may be dropped: the first in drawing order, also if
    the engine of the other one has answered before the run stopped."""

    def score(groups: Sequence[Group]) -> list[Group]:
        return scored(groups, lambda group, number: 1.0 if int(group.episodes[0].ids[1]) in (4, 6) else number)

    def taken(folder: Path, *, stops: bool) -> list[list[int]]:
        folder.mkdir()
        engines = FakeEngines(2)
        with loop(folder, engines, "one-step-off", refill=1 / SIZE, score=score, steps=4) as made:
            if stops:
                engines.stuck = {4}
                made.begin()
                reached(lambda: made.sampler.buffer.counts() == {"drawn": 0, "sampling": 2, "sampled": 6, "ready": 4})
                state = made.sampler.state()
                made.sampler.pause()
                engines.release()
                made.ledger.go_back(0, state["cursor"], [slot["position"] for slot in state["slots"]])
                made.sampler.restore(state)
            made.run()
            assert faults_of(made.path) == []
        return made.taken

    whole = taken(tmp_path / "whole", stops=False)
    assert whole[1] == [5, 6, 7, 8]
    assert taken(tmp_path / "stopped", stops=True) == whole


def test_a_crash_within_a_round_drops_the_groups_that_the_whole_round_drops(tmp_path: Path) -> None:
    """After a crash, groups are sampled alone, one after the other, and the others of the round have their answers."""

    def score(groups: Sequence[Group]) -> list[Group]:
        return scored(groups, lambda group, number: 1.0 if int(group.episodes[0].ids[1]) in (5, 6) else number)

    def taken(folder: Path, *crashes: int) -> list[list[int]]:
        folder.mkdir()
        left = set(crashes)

        def kills(position: int) -> bool:
            crashed = position in left
            left.discard(position)
            return crashed

        with loop(folder, FakeEngines(2, kills=kills), "one-step-off", refill=1 / SIZE, score=score, steps=4) as made:
            made.run()
            assert faults_of(made.path) == []
        return made.taken

    whole = taken(tmp_path / "whole")
    assert whole[1] == [4, 6, 7, 8]
    assert taken(tmp_path / "crashed", 5) == whole


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_answers_from_before_a_return_are_ignored(tmp_path: Path, pipeline: str) -> None:
    """The run goes back to step 2 while engines sample for later steps."""
    with loop(tmp_path, FakeEngines(2, tenfold), pipeline) as made:
        made.begin()
        for step in range(1, 6):
            made.step(step)
        made.sampler.pause()
        made.ledger.go_back(2, 2 * SIZE)
        made.sampler.buffer.restore({"cursor": 2 * SIZE, "step": 3, "slots": []})
        made.begin(2)
        for step in range(3, STEPS + 1):
            made.step(step)
        made.ledger.flush()
        assert faults_of(made.path) == []
        rows = list(read_rows(made.path, void=True))
        assert sum(row.void and row.state == "trained" for row in rows) == 3 * SIZE
        assert len([row for row in rows if not row.void and row.state == "trained"]) == SIZE * STEPS


@pytest.mark.parametrize("pipeline", ["one-step-off", "async"])
def test_nothing_is_scored_between_pause_and_the_next_weights(
    tmp_path: Path, pipeline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actor restarts while a group is being scored, which is then found to be not worth training."""
    monkeypatch.setattr("rlmesh.rl.rollout.sampler.LOOK_S", 0.01)
    calls: list[int] = []
    began, goes_on = threading.Event(), threading.Event()

    def score(groups: Sequence[Group]) -> list[Group]:
        calls.append(len(groups))
        began.set()
        assert goes_on.wait(HANG_S)
        return scored(groups, lambda group, number: 0.0 if int(group.episodes[0].ids[1]) == 1 else number)

    with loop(tmp_path, FakeEngines(1), pipeline, refill=1.0, score=score) as made:
        made.begin()
        assert began.wait(HANG_S)
        made.engines.hold()
        made.sampler.pause()
        before = len(calls)
        assert not threading.Event().wait(0.2) and len(calls) == before
        made.ledger.go_back(0, 0)
        made.sampler.restore({"cursor": 0, "step": 1, "slots": []})
        goes_on.set()
        made.engines.go_on()
        made.begin()
        for step in range(1, STEPS + 1):
            made.step(step)
        made.ledger.flush()
        assert faults_of(made.path) == [] and made.taken[0] == [0, 2, 3, 4]


def test_engines_are_idle_once_a_step_has_its_groups(tmp_path: Path) -> None:
    """The push follows: what is asked for now would be sampled by weights that are too old."""

    def score(groups: Sequence[Group]) -> list[Group]:
        return scored(groups, lambda group, number: 1.0 if int(group.episodes[0].ids[1]) == 0 else number)

    with loop(tmp_path, FakeEngines(1), "sync", refill=1.0, extra=2, score=score) as made:
        made.begin()
        made.sampler.take(1)
        assert made.engines.asked == [(0, 0, (0, 1, 2, 3, 4, 5))]
        assert made.sampler.buffer.counts()["sampling"] == 0


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("count", [1, 2])
def test_weights_that_are_too_old_for_a_step_drop_nothing_of_it(tmp_path: Path, pipeline: str, count: int) -> None:
    def score(groups: Sequence[Group]) -> list[Group]:
        return scored(groups, lambda group, number: 1.0 if int(group.episodes[0].ids[1]) % 5 == 0 else number)

    with loop(tmp_path, FakeEngines(count, tenfold), pipeline, refill=2.0, extra=2, score=score) as made:
        made.run()
        assert faults_of(made.path) == []
        taken = [place for step in made.taken for place in step]
        assert taken == [place for place in range(2 * SIZE * STEPS) if place % 5][: SIZE * STEPS]
        dropped = [row for row in read_rows(made.path) if row.state == "dropped"]
        bound = made.sampler.pipeline.staleness
        assert dropped and all((row.step or 0) - 1 - (row.oldest or 0) <= bound for row in dropped)


def test_a_scoring_that_hangs_does_not_keep_a_run_from_ending(tmp_path: Path) -> None:
    began, goes_on, closed = threading.Event(), threading.Event(), threading.Event()

    def score(groups: Sequence[Group]) -> list[Group]:
        began.set()
        assert goes_on.wait(HANG_S)
        return scored(groups)

    made = Loop(tmp_path, FakeEngines(1), "async", score=score)

    def close() -> None:
        made.close()
        closed.set()

    made.begin()
    assert began.wait(HANG_S)
    thread = threading.Thread(target=close)
    thread.start()
    try:
        assert closed.wait(HANG_S / 2)
    finally:
        goes_on.set()
        thread.join(HANG_S)


def test_seeds_differ_by_run_position_and_number() -> None:
    seeds = {sample_seed(*one) for one in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)]}
    assert len(seeds) == 5 and all(0 <= seed < 2**31 for seed in seeds)


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, 2**40 + 1])
def test_seeds_of_many_groups_are_those_of_each_response(seed: int) -> None:
    draw = random.Random(seed)
    positions = [0, 1, 2**31, 2**32 - 1, *(draw.randrange(2**32) for _ in range(200))]
    for chosen, samples in [(positions, 5), (positions[:1], 1), ([2**32, 3], 2), ([], 4)]:
        each = [tuple(sample_seed(seed, place, number) for number in range(samples)) for place in chosen]
        assert sample_seeds(seed, chosen, samples) == each


def test_only_groups_that_teach_nothing_are_dropped() -> None:
    (group,) = scored([group_of(0, 0)], lambda group, number: 1.0)
    assert judge(group, total, dynamic=True, died=DIED).state == "dropped"
    assert judge(group, total, dynamic=False, died=DIED).state == "kept"
    assert isinstance(total(group.episodes[0]), Score)
