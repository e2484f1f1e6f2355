"""Numbers that a member reports have all their digits wherever they are read back."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.metrics_core import GaugeMetricFamily

from rlmesh.errors import UsageError
from rlmesh.job.context import JobInfo, WorkerContext
from rlmesh.job.jsonable import jsonable
from rlmesh.job.status import CallStats, MetricRecord
from rlmesh.master.monitoring.metrics_page import page_text
from rlmesh.observe.files.event_log import plain
from rlmesh.observe.files.metric_files import METRICS_FILE, MetricsWriter, read_records
from rlmesh.observe.views.progress import JobProgress
from rlmesh.observe.views.summary import format_value
from tests.observe.samples import record, status

BIG = 2**53 + 1
"""The first int that is no float."""


class Link:
    def __init__(self) -> None:
        self.records: list[MetricRecord] = []

    def report(self, record: MetricRecord) -> None:
        self.records.append(record)

    def tell_listeners(self) -> None: ...

    def take_call_stats(self) -> tuple[CallStats, ...]:
        return ()


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def worker(link: Link) -> WorkerContext:
    return WorkerContext(JobInfo("j", "j1"), "TRAINER", 0, 1, link)  # type: ignore[arg-type]


def _written(tmp_path: Path, records: list[MetricRecord]) -> Iterator[dict[str, Any]]:
    writer = MetricsWriter(tmp_path)
    for each in records:
        writer.write(each)
    writer.close()
    assert writer.lost == 0

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is no JSON")

    for line in (tmp_path / METRICS_FILE).read_text().splitlines():
        yield json.loads(line, parse_constant=refuse)["metrics"]


@pytest.mark.case("b14")
def test_small_metrics_are_kept_in_full(tmp_path: Path, worker: WorkerContext, link: Link) -> None:
    given = {"lr": 3e-10, "ppo_kl": 1.23456789e-7, "grad_variance": 4.56789e-10, "least": 5e-324, "loss": 0.1}
    worker.report(step=1, **given)
    assert list(_written(tmp_path, link.records)) == [given]
    (read,) = read_records(tmp_path / METRICS_FILE)
    assert read.metrics == given


@pytest.mark.case("b14")
@pytest.mark.parametrize(("value", "kept"), [
    (BIG, BIG),
    (-(2**63), -(2**63)),
    (2**70, 2**70),
    (np.int64(BIG), BIG),
    (np.uint64(2**64 - 1), 2**64 - 1),
    (torch.tensor(BIG), BIG),
    (np.float32(1e-7), float(np.float32(1e-7))),
    (np.float64(1.23456789e-7), 1.23456789e-7),
    (torch.tensor(1.23456789e-7, dtype=torch.float64), 1.23456789e-7),
    (torch.tensor([2.5], requires_grad=True), 2.5),
    (True, 1),
    (np.True_, 1.0),
    (torch.tensor(False), 0),
])  # fmt: skip
def test_numbers_of_every_kind_keep_their_value(
    tmp_path: Path, worker: WorkerContext, link: Link, value: Any, kept: float
) -> None:
    worker.report(step=1, x=value)
    (written,) = _written(tmp_path, link.records)
    assert written["x"] == kept and type(written["x"]) is not bool
    (read,) = read_records(tmp_path / METRICS_FILE)
    assert read.metrics["x"] == kept and isinstance(read.metrics["x"], int) == isinstance(kept, int)


@pytest.mark.case("b14")
@given(st.dictionaries(st.text("abc", min_size=1), st.floats() | st.integers(-(10**300), 10**300), max_size=5))
def test_any_number_survives_the_file(tmp_path_factory: pytest.TempPathFactory, metrics: dict[str, Any]) -> None:
    path = tmp_path_factory.mktemp("run")
    (written,) = _written(path, [record(1, **metrics)])
    (read,) = read_records(path / METRICS_FILE)
    for name, value in metrics.items():
        same = read.metrics[name]
        assert (math.isnan(same) and math.isnan(value)) or (same == value and type(same) is type(value))
        if not math.isfinite(value):
            assert written[name] == str(value)


@pytest.mark.case("b14")
@pytest.mark.parametrize("value", [10**400, -(10**5000), 1j, "many"], ids=["big", "huge", "complex", "text"])
def test_what_is_no_number_is_refused_by_name(worker: WorkerContext, value: Any) -> None:
    with pytest.raises(UsageError, match=r"TRAINER:0: report\(\) got loss=.*which is not a number"):
        worker.report(step=1, loss=value)


@pytest.mark.case("b14")
def test_a_step_is_a_whole_number(worker: WorkerContext, link: Link) -> None:
    for step in (7.0, np.int64(7), torch.tensor(7)):
        worker.report(step=step)  # type: ignore[arg-type]
        assert (link.records[-1].step, type(link.records[-1].step)) == (7, int)
    for wrong in (2.7, math.nan, math.inf, 2**63, "seven"):
        with pytest.raises(UsageError, match=r"TRAINER:0: .*step=.*(whole number|64 bits|not a number)"):
            worker.report(step=wrong)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"step="):
            worker.step_boundary(wrong)  # type: ignore[arg-type]


@pytest.mark.case("b14")
def test_tensorboard_has_what_its_floats_can_hold(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    values: dict[str, Any] = {"lr": 3e-10, "kl": 1.23456789e-7, "tokens": BIG}
    list(_written(tmp_path, [record(1, **values)]))
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    for name, value in values.items():
        assert events.Scalars(f"TRAINER/{name}")[0].value == float(np.float32(value))


@pytest.mark.case("b14")
def test_prometheus_and_events_read_all_digits() -> None:
    family = GaugeMetricFamily("rlmesh_reported", "x", labels=("metric",))
    family.add_metric(("lr",), 3e-10)
    family.add_metric(("kl",), 1.23456789e-7)
    text = page_text([family])
    assert [float(line.rpartition(" ")[2]) for line in text.splitlines()[2:]] == [3e-10, 1.23456789e-7]
    assert plain({"lr": 3e-10, "x": math.nan}) == {"lr": 3e-10, "x": "nan"}


@pytest.mark.case("b14")
def test_the_description_of_a_job_is_json_whatever_its_numbers_are() -> None:
    values = {"a": np.float32("nan"), "b": torch.tensor(math.inf), "c": 3e-10, "d": np.array([math.nan, 1.0])}
    text = json.dumps(jsonable(values), allow_nan=False)
    assert json.loads(text) == {"a": "nan", "b": "inf", "c": 3e-10, "d": ["nan", 1.0]}


@pytest.mark.case("b14")
def test_views_show_small_numbers_and_whole_counts() -> None:
    assert [format_value(x) for x in (3e-10, 1.23456789e-7, 1234567, 0.5, math.nan, 1e12, -3.0)] == [
        "3e-10", "1.235e-07", "1234567", "0.5", "nan", "1e+12", "-3",
    ]  # fmt: skip
    progress = JobProgress()
    progress.update(status(records=(record(1, total_steps=math.nan, loss=2**1000), record(1, loss=0.5))))
    assert progress.total_steps is None and progress.values("loss") == [pytest.approx(2**999)]
