"""Steps that a member makes again after a restart: the newest reports stand, wherever somebody reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh.job.status import MetricRecord
from rlmesh.observe.files.metric_files import METRICS_FILE, MetricsWriter, read_records
from rlmesh.observe.files.repeated_steps import Replays, current_reports
from rlmesh.observe.run_report import step_times
from rlmesh.observe.time_use import TimeUse
from rlmesh.observe.views.progress import JobProgress
from rlmesh.observe.views.summary import closing_lines, headline_metrics
from tests.observe.samples import call, record, status


def reports(sender: str, steps: Iterable[int], reward: float, rank: int = 0) -> list[MetricRecord]:
    calls = call("ROLLOUT", wall_s=1.0 + reward, share_s=1.0 + reward)
    return [
        replace(record(step, calls, rank=rank, reward_mean=reward, step_time_s=2.0 + reward), sender=sender)
        for step in steps
    ]


REPLAYED = [*reports("T:0.0/1", range(1, 7), 0.0), *reports("T:0.1/2", range(4, 8), 1.0)]
CURVE = [(1, 0.0), (2, 0.0), (3, 0.0), (4, 1.0), (5, 1.0), (6, 1.0), (7, 1.0)]


@pytest.mark.case("b19")
def test_views_show_the_newest_run_of_a_step() -> None:
    progress = JobProgress()
    progress.update(status(records=tuple(REPLAYED)))
    assert progress.curves["reward_mean"].points() == CURVE
    (use,) = progress.time_use.callers()
    assert use.steps == 7 and use.step_s == pytest.approx((3 * 2.0 + 4 * 3.0) / 7)
    assert use.roles[0].waited_s == pytest.approx((3 * 1.0 + 4 * 2.0) / 7) and use.roles[0].calls == 1
    assert any("over 7 steps" in line for line in closing_lines(progress, status(), None, 0.0))
    assert ("reward_mean", 1.0) in headline_metrics(progress)


@pytest.mark.case("b19")
def test_files_are_read_as_the_views_show_them(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    for number, report in enumerate(REPLAYED, 1):
        writer.write(replace(report, number=number))
    writer.close()
    read = list(read_records(tmp_path / METRICS_FILE))
    assert [(report.step, report.metrics["reward_mean"]) for report in read] == CURVE
    assert len(list(read_records(tmp_path / METRICS_FILE, replaced=True))) == 10
    times = step_times(read)
    assert times is not None and times.parts["ROLLOUT"][3] == pytest.approx(2.0, abs=0.01)
    assert TimeUse(read).callers()[0].steps == 7


@pytest.mark.case("b19")
@pytest.mark.parametrize("again_from", [3, 6], ids=["several steps", "the last step"])
@pytest.mark.parametrize("new_master", [False, True], ids=["one master", "the next master"])
def test_tensorboard_shows_each_step_once(again_from: int, new_master: bool, tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    writer = MetricsWriter(tmp_path)
    for report in reports("T:0.0/1", range(7), 0.0):
        writer.write(replace(report, number=1 + report.step))
        writer.write(record(report.step, role="ACTOR", grad_norm=float(report.step)))
        if report.step == 4:
            writer.write(replace(record(4, heldout_accuracy=0.25), sender="T:0.0/1"))
    if new_master:
        writer.close()
        for path in (tmp_path / "tensorboard").iterdir():
            path.rename(path.with_name(path.name.replace("events.out.tfevents.", "events.out.tfevents.0")))
        writer = MetricsWriter(tmp_path)
    for report in reports("T:0.1/2", range(again_from, 9), 1.0):
        writer.write(replace(report, number=1 + report.step))
        if report.step == 4:
            writer.write(replace(record(4, heldout_accuracy=0.5), sender="T:0.1/2"))
    writer.close()
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    shown = [(event.step, event.value) for event in events.Scalars("TRAINER/reward_mean")]
    assert shown == [(step, float(step >= again_from)) for step in range(9)]
    assert [event.step for event in events.Scalars("ACTOR/grad_norm")] == list(range(7)), "others keep theirs"
    accuracy = [(event.step, event.value) for event in events.Scalars("TRAINER/heldout_accuracy")]
    assert accuracy == [(4, 0.5 if again_from <= 4 else 0.25)]


def test_files_of_tensorboard_are_in_the_order_of_their_writers_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for start, clock in enumerate((2e9, 1e9, 1e9)):  # the clock is set back, and two masters begin in one second
        monkeypatch.setattr("rlmesh.observe.files.tensorboard.time.time", lambda clock=clock: clock)
        writer = MetricsWriter(tmp_path)
        for step in range(3 * start, 3 * start + 3):
            writer.write(replace(record(step, x=float(start)), sender=f"T/{start}", number=step + 1))
        writer.close()
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("TRAINER/x")] == list(range(9))


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 1), st.floats(-1, 1)), max_size=40),
)
def test_a_view_that_sees_reports_one_by_one_ends_where_a_reader_does(
    made: list[tuple[int, int, int, float]],
) -> None:
    records = [replace(record(step, rank=rank, x=x), sender=f"{sender}") for sender, step, rank, x in made]
    progress, replays = JobProgress(), Replays()
    left: list[MetricRecord] = []
    progress.update(status(records=tuple(records)))
    for report in records:
        stands, replaced = replays.take(report)
        left = [one for one in left if not any(one is old for old in replaced)] + ([report] if stands else [])
    assert left == current_reports(records)
    sums: dict[int, list[float]] = {}
    for report in left:
        sums.setdefault(report.step, []).append(report.metrics["x"])
    shown = dict(progress.curves["x"].points()) if sums else {}
    assert shown == pytest.approx({step: sum(values) / len(values) for step, values in sums.items()})


def test_what_is_kept_to_be_replaced_is_bounded() -> None:
    replays = Replays(most_steps=10)
    for report in reports("T:0.0/1", range(100), 0.0):
        replays.take(report)
    known = [replays.take(report)[1] != [] for report in reports("T:0.1/2", range(99, -1, -1), 1.0)]
    assert known == [True] * 10 + [False] * 90


LOST = [
    *reports("T:0.0/1", range(1, 7), 0.0),
    *(replace(one, metrics={**one.metrics, "steps_lost": 2.0}) for one in reports("T:0.0/1", range(5, 8), 1.0)),
    replace(record(6, heldout_accuracy=0.5), sender="T:0.0/1"),
    *(replace(one, metrics={**one.metrics, "steps_lost": 3.0}) for one in reports("T:0.0/1", range(7, 9), 2.0)),
]
"""The trainer's process stays, and goes back twice since another role has lost its state: by two steps, and by one."""


def test_steps_that_one_process_makes_again_count_once(tmp_path: Path) -> None:
    curve = [(step, 0.0 if step < 5 else 1.0 if step < 7 else 2.0) for step in range(1, 9)]
    progress = JobProgress()
    progress.update(status(records=tuple(LOST)))
    assert progress.curves["reward_mean"].points() == curve
    assert progress.curves["heldout_accuracy"].points() == [(6, 0.5)]
    assert progress.time_use.callers()[0].steps == 8
    writer = MetricsWriter(tmp_path)
    for number, report in enumerate(LOST, 1):
        writer.write(replace(report, number=number))
    writer.close()
    read = read_records(tmp_path / METRICS_FILE)
    assert [(one.step, one.metrics["reward_mean"]) for one in read if "reward_mean" in one.metrics] == curve


def test_several_reports_of_a_step_count_together() -> None:
    several = [*reports("T", (1, 1, 2), 0.0), replace(record(1, heldout_accuracy=0.5), sender="T")]
    assert current_reports(several) == several
