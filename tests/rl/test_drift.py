"""The gap between engine and trainer, and its alarm."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given

from rlmesh.cli.commands.status import end_lines, status_lines
from rlmesh.observe.files.event_log import read_events
from rlmesh.rl import reference
from rlmesh.rl.drift import LIMITS, DriftAlarm, DriftLimits, drift
from rlmesh.run_directory.records import read_end, write_end
from rlmesh.testing import LocalCluster
from tests.rl import drifting_job
from tests.rl.batches import Batch, batches, poisoned


@given(batches())
def test_drift_agrees_with_numpy(batch: Batch) -> None:
    trainer = batch.normal(1)
    engine = trainer + 0.1 * batch.normal(2)
    found = drift(
        torch.tensor(poisoned(trainer, batch.mask)),
        torch.tensor(poisoned(engine, batch.mask)),
        torch.tensor(batch.mask),
    )
    assert (found.mean_abs, found.max_abs, found.k3) == pytest.approx(
        reference.drift(trainer, engine, batch.mask), abs=1e-5
    )
    assert found.tokens == batch.mask.sum()


def test_the_alarm_speaks_beyond_the_limits_only(caplog: pytest.LogCaptureFixture) -> None:
    base = torch.full((4, 8), -1.0)
    mask = torch.ones(4, 8, dtype=torch.bool)
    alarm = DriftAlarm("float32")
    with caplog.at_level(logging.WARNING):
        assert alarm.check(drift(base, base + 1e-4, mask), version=3)["drift_alarm"] == 0
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        metrics = alarm.check(drift(base, base + 0.01, mask), version=4, who="ROLLOUT:1")
    assert metrics["drift_alarm"] == 1 and metrics["log_prob_gap"] == pytest.approx(0.01, rel=1e-3)
    assert "trainer and ROLLOUT:1 differ by 0.01 on average over 32 tokens of version 4" in caplog.text
    # What is too far in float32 is usual in bfloat16.
    assert DriftAlarm("bfloat16").check(drift(base, base + 0.01, mask), version=4)["drift_alarm"] == 0


def test_the_alarm_stops_after_as_many_batches_in_a_row_as_its_patience_says() -> None:
    base, mask = torch.zeros(1, 4), torch.ones(1, 4, dtype=torch.bool)
    far = drift(base, base + 1, mask)
    alarm = DriftAlarm(DriftLimits(0.1, 0.1), patience=2, stop=True)
    assert alarm.check(far, version=1)["drift_alarm"] == 0
    assert alarm.check(drift(base, base, mask), version=1)["drift_alarm"] == 0
    alarm.check(far, version=2)
    with pytest.raises(RuntimeError, match="in 2 batches in a row"):
        alarm.check(far, version=3)
    with pytest.raises(ValueError, match=r"no limits are known for 'float31': use one of float32"):
        DriftAlarm("float31")
    assert sorted(LIMITS.values(), key=lambda limits: limits.k3) == list(LIMITS.values())


@pytest.mark.slow
def test_in_a_job_it_is_an_event_and_the_status_shows_it(tmp_path: Path) -> None:
    """Each time that it begins; not at every step."""
    with LocalCluster(run_root=tmp_path):
        result = drifting_job.build().submit("drifting")
    events = [entry for entry in read_events(Path(result.run_dir)) if entry["event"] == "AlarmRaised"]
    assert [entry["who"] for entry in events] == ["TRAINER:0"] * 2
    assert [entry["alarm"]["step"] for entry in events] == [0, 3]
    text = "log-probs of trainer and ROLLOUT differ by 0.25 on average over 8 tokens of version 4"
    assert text in events[1]["alarm"]["text"]
    shown = [line for line in status_lines(result.status) if line.startswith("  alarm: TRAINER:0, step ")]
    assert len(shown) == 2 and text in shown[1]
    write_end(result.status)
    end = read_end(Path(result.run_dir))
    assert end is not None and [line for line in end_lines(end) if "alarm" in line] == shown
