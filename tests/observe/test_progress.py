from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from rlmesh.observe.views.progress import Change, JobProgress, sparkline
from tests.observe.samples import call, member, record, status


def test_changes_are_per_role_and_only_when_something_changed() -> None:
    progress = JobProgress()
    first = status(member("ACTOR", 0, "starting"), member("ACTOR", 1, "bound"), member("REWARD", 0, "ready"))
    assert progress.update(first) == [Change("ACTOR", "2 starting"), Change("REWARD", "1 ready")]
    assert progress.update(first) == []
    later = status(member("ACTOR", 0, "ready"), member("ACTOR", 1, "starting"), member("REWARD", 0, "ready"))
    assert progress.update(later) == [Change("ACTOR", "1 ready, 1 starting")]


def test_reports_that_come_again_count_once() -> None:
    progress = JobProgress()
    first, second, third = (record(step, call("ACTOR"), step_time_s=1.0) for step in range(3))
    progress.update(status(records=(first, second)))
    progress.update(status(records=(first, second)))
    progress.update(status(records=(second, third), records_from=1))
    (trainer,) = progress.time_use.callers()
    assert (trainer.steps, trainer.roles[0].calls) == (3, 1)


def test_the_step_is_that_of_the_role_that_times_its_steps() -> None:
    progress = JobProgress()
    trainer, actor = record(7, step_time_s=0.5, total_steps=40), record(900, role="ACTOR", grad_norm=1.0)
    progress.update(status(records=(trainer, actor)))
    assert (progress.step, progress.total_steps) == (7, 40)


def test_a_metric_is_the_mean_over_its_members_and_skips_what_is_not_finite() -> None:
    progress = JobProgress()
    both = (record(0, rank=0, kl=1.0), record(0, rank=1, kl=3.0))
    progress.update(status(records=(*both, record(1, kl=math.nan), record(2, kl=5.0))))
    assert progress.values("kl") == [2.0, 5.0] and progress.values("unknown") == []


def test_sparkline_shows_rise_flat_and_nothing() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0, 2.0], 8) == "▁▁"
    assert sparkline([], 8) == "" and sparkline([1.0], 0) == ""
    assert sparkline([-1.7e308, 1.7e308], 8) == sparkline([0.0, 1.1e-308], 8) == "▁█"


@given(st.lists(st.floats(-1e300, 1e300) | st.just(math.nan), max_size=300), st.integers(1, 60))
def test_sparkline_fits_its_width(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(width, sum(map(math.isfinite, values)))
