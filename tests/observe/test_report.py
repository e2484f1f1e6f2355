from __future__ import annotations

import math
from pathlib import Path

import pytest

from rlmesh.job.status import MetricRecord
from rlmesh.observe.files.metric_files import MetricsWriter
from rlmesh.observe.run_report import OWN, RLMESH, draw_report, step_times
from tests.observe.samples import call, record


def _write(run_dir: Path, reports: list[MetricRecord]) -> None:
    writer = MetricsWriter(run_dir)
    for report in reports:
        writer.write(report)
    writer.close()


def _reports(steps: int) -> list[MetricRecord]:
    calls = (call("ROLLOUT", "generate", wall_s=0.3), call("ACTOR", "update", wall_s=0.1))
    return [
        record(s, *calls, reward_mean=0.4 + s / 1000, heldout_accuracy=0.5, kl=0.01 * s, step_time_s=0.5)
        for s in range(steps)
    ]


@pytest.mark.parametrize("steps", [1, 2, 150])
def test_a_picture_is_drawn_for_runs_of_any_length(tmp_path: Path, steps: int) -> None:
    pytest.importorskip("matplotlib")
    _write(tmp_path, _reports(steps))
    path = draw_report(tmp_path)
    assert path == tmp_path / "report.png"
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 20_000


def test_a_run_that_reported_other_things_is_drawn_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    _write(tmp_path, [record(step, loss=1.0, kl=math.nan) for step in range(3)])
    assert draw_report(tmp_path) is not None


def test_nothing_reported_is_no_picture(tmp_path: Path) -> None:
    assert draw_report(tmp_path) is None


def test_a_picture_that_cannot_be_saved_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("matplotlib")
    _write(tmp_path, _reports(2))
    (tmp_path / "report.png").mkdir()
    assert draw_report(tmp_path) is None
    assert "could not be written" in caplog.text


def test_the_parts_of_a_step_add_up_to_it() -> None:
    times = step_times(_reports(150))
    assert times is not None and times.caller == "TRAINER"
    assert list(times.parts) == [OWN, "ROLLOUT", "ACTOR", RLMESH]
    assert len(times.steps) <= 60
    assert times.parts[OWN][0] == pytest.approx(0.1)
    assert times.parts["ROLLOUT"][0] == pytest.approx(0.294)
    assert times.parts[RLMESH][0] == pytest.approx(0.012)
    assert times.fraction("ROLLOUT") == pytest.approx(0.588)
    assert sum(values[0] for values in times.parts.values()) == pytest.approx(0.5)


def test_what_was_called_before_the_first_step_is_not_drawn() -> None:
    before = record(0, call("ACTOR", "load_model", wall_s=60.0), call("@master"), heldout_accuracy=0.4)
    times = step_times([before, *_reports(3)[1:]])
    assert times is not None and times.steps == [1, 2]
    assert sum(values[0] for values in times.parts.values()) == pytest.approx(0.5)


def test_members_of_a_calling_role_are_averaged() -> None:
    reports = [record(0, call("REWARD"), rank=rank, step_time_s=0.4) for rank in range(4)]
    times = step_times(reports)
    assert times is not None
    assert sum(values[0] for values in times.parts.values()) == pytest.approx(0.4)


def test_no_calls_no_breakdown() -> None:
    assert step_times([record(0, kl=0.1)]) is None
