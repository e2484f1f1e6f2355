from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh.observe.files.metric_files import METRICS_FILE, MetricsWriter, read_records
from rlmesh.observe.files.tensorboard import EventFile
from tests.observe.samples import call, record


def test_reports_survive_the_way_through_the_file(tmp_path: Path) -> None:
    reports = [
        record(0, call("ROLLOUT", "generate", share_s=0.1), call("ACTOR"), reward_mean=0.25, step_time_s=0.5),
        record(1, reward_mean=math.nan, kl=-math.inf),
    ]
    writer = MetricsWriter(tmp_path)
    for report in reports:
        writer.write(report)
    read = list(read_records(tmp_path / METRICS_FILE))  # before close: nothing waits in the process
    writer.close()
    writer.close()
    assert read[0] == reports[0]
    assert math.isnan(read[1].metrics["reward_mean"]) and read[1].metrics["kl"] == -math.inf


def test_each_line_is_json_by_the_standard(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(record(3, call("ACTOR", wall_s=math.inf), reward_mean=math.nan))
    writer.close()
    line = (tmp_path / METRICS_FILE).read_text()

    def refuse(constant: str) -> float:
        raise AssertionError(constant)

    entry = json.loads(line, parse_constant=refuse)
    assert entry["metrics"] == {"reward_mean": "nan"} and entry["calls"][0]["wall_s"] == "inf"


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    path.write_bytes(b'{"at": 1.0, "role": "TRAI')
    writer = MetricsWriter(tmp_path)
    writer.write(record(5, reward_mean=0.5))
    writer.write(record(6, reward_mean=0.6))
    writer.close()
    assert [report.step for report in read_records(path)] == [5, 6]


def test_a_run_without_reports_reads_as_empty(tmp_path: Path) -> None:
    assert list(read_records(tmp_path / METRICS_FILE)) == []


def test_a_full_disk_is_one_warning_and_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(record(0, reward_mean=0.1))
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, data[: len(data) // 2]))
    with caplog.at_level(logging.WARNING):
        writer.write(record(1, reward_mean=0.2))
        writer.write(record(2, reward_mean=0.3))
    monkeypatch.undo()
    assert writer.lost == 2 and len(caplog.records) == 1
    assert "TRAINER:0 at step 1" in caplog.text and str(tmp_path) in caplog.text
    writer.write(record(3, reward_mean=0.4))
    writer.close()
    lines = (tmp_path / METRICS_FILE).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 3]
    assert "2 reports are missing" in caplog.text


def test_a_directory_that_cannot_be_made_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "taken").write_text("")
    writer = MetricsWriter(tmp_path / "taken")
    writer.write(record(0, reward_mean=0.1))
    writer.close()
    assert "could not be written" in caplog.text


def test_tensorboard_reads_what_is_written(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    writer = MetricsWriter(tmp_path)
    for step in range(300):
        writer.write(record(step, reward_mean=step / 300, kl=math.nan if step == 7 else 0.01))
        writer.write(record(step, role="ACTOR", rank=1, grad_norm=1e40))
    writer.close()
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["TRAINER/reward_mean", "TRAINER/kl", "ACTOR:1/grad_norm"]
    scalars = events.Scalars("TRAINER/reward_mean")
    assert [event.step for event in scalars] == list(range(300))
    assert scalars[150].value == pytest.approx(0.5) and scalars[150].wall_time == record(150).at
    assert math.isnan(events.Scalars("TRAINER/kl")[7].value)
    assert events.Scalars("ACTOR:1/grad_norm")[0].value == math.inf


@given(
    scalars=st.dictionaries(st.text(min_size=1, max_size=200), st.floats(), min_size=1, max_size=20),
    step=st.integers(-(2**63), 2**63 - 1),
)
def test_events_are_what_the_protocol_buffer_library_writes(
    tmp_path_factory: pytest.TempPathFactory, scalars: dict[str, float], step: int
) -> None:
    event_pb2 = pytest.importorskip("tensorboard.compat.proto.event_pb2")
    directory = tmp_path_factory.mktemp("events")
    file = EventFile(directory)
    file.add_scalars(scalars, step=step, at=1.5)
    file.close()
    (path,) = directory.iterdir()
    data = path.read_bytes()
    first = int.from_bytes(data[:8], "little")
    event = event_pb2.Event.FromString(data[12 + first + 4 + 12 : -4])
    assert event.wall_time == 1.5 and event.step == step
    assert [value.tag for value in event.summary.value] == list(scalars)
    for value, expected in zip(event.summary.value, scalars.values(), strict=True):
        if math.isfinite(expected) and abs(expected) < 3e38:
            assert value.simple_value == pytest.approx(expected, rel=1e-6, abs=1e-38)


def test_the_writer_needs_no_tensorboard() -> None:
    program = (
        "import sys; from rlmesh.observe.files.metric_files import MetricsWriter;"
        "heavy = {'tensorboard', 'numpy', 'torch', 'matplotlib'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
