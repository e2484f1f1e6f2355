"""Trackers: their names, their queue, and processes that raise, hang and die; W&B, MLflow and trackio themselves."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlmesh import Trackers
from rlmesh.cli.main import main
from rlmesh.errors import UsageError
from rlmesh.job.status import MetricRecord
from rlmesh.observe.files.metric_files import METRICS_FILE, MetricsWriter
from rlmesh.observe.trackers.mlflow_tracker import mlflow_name
from rlmesh.observe.trackers.process import TrackerDelivery, TrackerState, state_file
from rlmesh.observe.trackers.protocol import RunInfo, metrics_of, tracker_faults
from rlmesh.observe.trackers.reports import Report, ReportQueue, ReportReader
from tests.observe import odd_trackers, tracked_job
from tests.own_time import HANG_S

ODD = odd_trackers.__name__


def record(step: int, role: str = "TRAINER", rank: int = 0, **metrics: float) -> MetricRecord:
    return MetricRecord(1e9 + step, role, rank, step, metrics or {"loss": 1 / step})


def write(run_dir: Path, *steps: int) -> None:
    writer = MetricsWriter(run_dir)
    for step in steps:
        metrics: dict[str, Any] = {"loss": 1 / step, "val/openai/gsm8k/mean@4": step / 10}
        writer.write(record(step, **metrics))
    writer.close()


def shown(run_dir: Path) -> list[dict[str, Any]]:
    file = run_dir / "shown.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def steps(run_dir: Path) -> list[int]:
    return [one["step"] for one in shown(run_dir) if "step" in one]


# Names


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["wand"], "there is no tracker 'wand'; did you mean 'wandb'?"),
        (["comet"], "there are tensorboard, wandb, mlflow, trackio, and module:Class"),
        (["nowhere.at.all:Mine"], "there is no module 'nowhere.at.all'"),
        ("wandb", "expected a list of names, such as ['wandb'], got 'wandb'"),
    ],
)
def test_names_are_checked_before_any_process(names: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as raised:
        Trackers(names)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise OSError('no licence')", "importing broken_package fails: OSError: no licence"),
        (
            "import no_such_module",
            "importing broken_package fails: ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("raise ValueError('out of range')", "importing broken_package fails: ValueError: out of range"),
        ("", "there is no module 'broken_package.mine' in this folder or on PYTHONPATH"),
    ],
)
def test_a_package_that_fails_is_not_one_that_is_absent(
    program: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_package").mkdir()
    (tmp_path / "broken_package" / "__init__.py").write_text(program)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert list(tracker_faults(["broken_package.mine:Tracker"])) == [f"'broken_package.mine:Tracker': {said}"]
    finally:
        sys.modules.pop("broken_package", None)


def test_a_package_that_is_missing_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlmesh.observe.trackers import protocol

    monkeypatch.setattr(protocol, "find_spec", lambda module: None)
    with pytest.raises(UsageError) as raised:
        Trackers(["wandb:project", "mlflow"])
    assert "'wandb:project' needs wandb: pip install 'rlmesh[wandb]'" in str(raised.value)
    assert "'mlflow' needs mlflow and sqlalchemy: pip install 'rlmesh[mlflow]'" in str(raised.value)


def test_submit_and_launch_refuse_wrong_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="did you mean 'mlflow'"):
        tracked_job.job().submit("x", run_dir=tmp_path / "run", trackers=["mlflw"])
    assert not (tmp_path / "run").exists()
    assert main(["launch", "--tracker", "wanddb", tracked_job.__file__]) == 2
    assert "did you mean 'wandb'" in capsys.readouterr().err


def test_the_trainers_metrics_have_plain_names() -> None:
    assert metrics_of(record(1, reward_mean=0.5)) == {"reward_mean": 0.5}
    assert metrics_of(record(1, role="ACTOR", rank=1, lr=0.5)) == {"ACTOR:1/lr": 0.5}
    assert mlflow_name("val/openai/gsm8k/mean@4") == "val/openai/gsm8k/mean_at_4"
    assert mlflow_name("TRAINER:1/lösung") == "TRAINER:1/l_sung"


# The queue


def test_the_queue_drops_the_oldest_and_counts() -> None:
    queue = ReportQueue(3)
    for step in range(1, 6):
        queue.put(Report(record(step), step))
    assert (len(queue), queue.lost) == (3, 2)
    first = queue.first()
    assert first is not None and first.record.step == 3
    queue.put(Report(record(6), 6))  # drops the one that is being delivered
    queue.done(first)
    assert len(queue) == 3 and queue.lost == 3
    queue.end()
    for step in (4, 5, 6):
        report = queue.first()
        assert report is not None and report.record.step == step
        queue.done(report)
    assert queue.first() is None


def test_the_reader_follows_the_file_and_skips_torn_lines(tmp_path: Path) -> None:
    reader = ReportReader(tmp_path)
    assert [*reader.read()] == []
    write(tmp_path, 1, 2)
    assert [one.record.step for one in reader.read()] == [1, 2]
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"at": 1, "role"')
    assert [*reader.read()] == []
    write(tmp_path, 3)  # a new writer removes the torn line
    found = [*reader.read()]
    assert [one.record.step for one in found] == [3]
    assert found[-1].end == (tmp_path / METRICS_FILE).stat().st_size
    assert [*ReportReader(tmp_path, found[-1].end).read()] == []


class Impatient(ReportQueue):
    """A queue whose pauses take no time, and are counted."""

    def __init__(self) -> None:
        super().__init__(100)
        self.pauses: list[float] = []

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)


def test_a_failure_is_logged_once_and_the_report_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made: list[odd_trackers.Writes] = []

    class Fails(odd_trackers.Writes):
        def log(self, record: MetricRecord) -> None:
            if record.step == 2 and len(made) < 4:
                raise ConnectionError("refused")
            super().log(record)

    def make() -> odd_trackers.Writes:
        made.append(Fails())
        return made[-1]

    queue = Impatient()
    for step in (1, 2, 3):
        queue.put(Report(record(step), step * 10))
    queue.end()
    state, path = TrackerState("id"), tmp_path / "trackers" / "fails.json"
    with caplog.at_level(logging.WARNING):
        TrackerDelivery("fails", make, RunInfo(tmp_path, "job"), queue, state, path).work()
    assert steps(tmp_path) == [1, 2, 3] and len(made) == 4
    assert caplog.text.count("failed, and is tried again: ConnectionError: refused") == 1
    assert "works again after 3 attempts" in caplog.text
    assert queue.pauses == [1.0, 2.0, 4.0]
    assert TrackerState.read(path) == TrackerState("id", 30, 0, "")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


# Processes


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2]), *sys.path])


def test_a_tracker_gets_all_reports_and_goes_on_in_the_next_start(tmp_path: Path) -> None:
    trackers = Trackers([f"{ODD}:Writes", "tensorboard"], finish_s=120.0)
    with trackers.following(tmp_path, "job"):
        write(tmp_path, 1, 2, 3)
    assert steps(tmp_path) == [1, 2, 3] and shown(tmp_path)[-1] == {"closed": True}
    assert shown(tmp_path)[0]["val/openai/gsm8k/mean@4"] == 0.1
    with trackers.following(tmp_path, "job"):
        write(tmp_path, 4)
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_a_tracker_that_raises_and_hangs_ends_with_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = f"{ODD}:RaisesThenHangs"
    with Trackers([name], finish_s=4.0).following(tmp_path, "job"):
        write(tmp_path, *range(1, 8))
    assert steps(tmp_path) == [1, 2, 3] and {"hangs": 4} in shown(tmp_path)
    log = (tmp_path / "logs" / f"tracker-{state_file(tmp_path, name).stem}.log").read_text()
    assert log.count("failed, and is tried again: RuntimeError: no connection") == 1
    assert "did not take 4 reports within 4 s" in log
    assert "4 reports were not shown" in caplog.text
    # The next start delivers them.
    with Trackers([f"{ODD}:Writes"], finish_s=120.0).following(tmp_path, "job"):
        pass
    assert steps(tmp_path)[-4:] == [4, 5, 6, 7]


@pytest.mark.parametrize("when", ["during the run", "at its end"])
def test_a_tracker_whose_process_dies_is_started_again(
    when: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, *range(1, 6))
    with Trackers([f"{ODD}:Dies"], finish_s=120.0).following(tmp_path, "job"):
        if when == "during the run":
            wait_for(tmp_path / "died")
    assert set(steps(tmp_path)) == {1, 2, 3, 4, 5}
    assert caplog.text.count("died (7); it is started again") == 1


def test_a_tracker_whose_process_dies_again_and_again_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 1, 2, 3)
    with Trackers([f"{ODD}:AlwaysDies"], finish_s=120.0).following(tmp_path, "job"):
        pass
    assert set(steps(tmp_path)) == {1, 2}
    assert f"the process of tracker {ODD}:AlwaysDies died again (7): its last reports are lost" in caplog.text


def wait_for(file: Path) -> None:
    import time

    deadline = time.monotonic() + HANG_S
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_tracker_that_cannot_open_costs_its_reports(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Trackers([f"{ODD}:CannotOpen"], finish_s=1.5).following(tmp_path, "job"):
        write(tmp_path, 1, 2)
    assert "2 reports were not shown, it fails: ConnectionError: no server" in caplog.text


@pytest.mark.slow
def test_a_job_is_not_harmed_by_its_tracker(tmp_path: Path) -> None:
    command = [sys.executable, tracked_job.__file__, str(tmp_path / "run")]
    done = subprocess.run(
        [*command, f"{ODD}:Writes", f"{ODD}:CannotOpen"], capture_output=True, text=True, timeout=240,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert steps(tmp_path / "run") == list(range(1, 11))
    assert "10 reports were not shown, it fails: ConnectionError" in done.stderr


# The trackers themselves


REASON = "is not installed: pip install 'rlmesh[{}]'"


@pytest.mark.slow
@pytest.mark.engines
def test_wandb_has_the_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb " + REASON.format("wandb"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    with Trackers(["wandb:tests"], finish_s=120.0).following(tmp_path, "job"):
        write(tmp_path, 1, 2, 3)
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    found = subprocess.run(
        [sys.executable, "-c", _READ_WANDB, str(file)], capture_output=True, text=True, timeout=HANG_S, check=True
    )
    rows = [json.loads(line) for line in found.stdout.splitlines()]
    history = [row for row in rows if "step" in row]
    assert [row["step"] for row in history] == [1, 2, 3]
    assert history[2]["val/openai/gsm8k/mean@4"] == 0.3 and history[1]["loss"] == 0.5
    assert {"project": "tests", "name": "job"} in rows
    assert stat.S_IMODE((tmp_path / "wandb").stat().st_mode) == 0o700


_READ_WANDB = """
import json, sys
from pathlib import Path
from wandb.proto import wandb_internal_pb2

# The log format of LevelDB after a header of 7 bytes: CRC (4), length (2), kind (1), data; the file is below one block.
content, at = Path(sys.argv[1]).read_bytes(), 7
assert len(content) < 1 << 15
while at + 7 <= len(content):
    size = int.from_bytes(content[at + 4 : at + 6], "little")
    record = wandb_internal_pb2.Record()
    record.ParseFromString(content[at + 7 : at + 7 + size])
    at += 7 + size
    if record.HasField("run"):
        print(json.dumps({"project": record.run.project, "name": record.run.display_name}))
    if record.HasField("history"):
        print(json.dumps({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}))
"""


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.parametrize("store", ["sqlite", "file"])
def test_mlflow_has_the_run_and_goes_on_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str) -> None:
    pytest.importorskip("mlflow", reason="mlflow " + REASON.format("mlflow"))
    pytest.importorskip("sqlalchemy", reason="sqlalchemy " + REASON.format("mlflow"))
    if store == "file":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path / 'mlruns'}")
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # since MLflow 3.7
    (tmp_path / "job.json").write_text(json.dumps({"user_config": {"actor": {"lr": 0.5}, "data": ["row"] * 2000}}))
    for new in ((1, 2), (3,)):
        with Trackers(["mlflow:tests"], finish_s=120.0).following(tmp_path, "job"):
            write(tmp_path, *new)
    uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    found = subprocess.run(
        [sys.executable, "-c", _READ_MLFLOW, uri], capture_output=True, text=True, timeout=HANG_S, check=True
    )
    run = json.loads(found.stdout.splitlines()[-1])
    assert run == {
        "name": "job", "status": "FINISHED", "params": {"actor.lr": "0.5"},
        "loss": [[1, 1.0], [2, 0.5], [3, pytest.approx(1 / 3)]], "mean": [[1, 0.1], [2, 0.2], [3, 0.3]],
    }  # fmt: skip


_READ_MLFLOW = """
import json, sys
from mlflow.tracking import MlflowClient

client = MlflowClient(tracking_uri=sys.argv[1])
(run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
history = lambda name: [[m.step, m.value] for m in client.get_metric_history(run.info.run_id, name)]
print(json.dumps({"name": run.info.run_name, "status": run.info.status, "params": run.data.params,
                  "loss": history("loss"), "mean": history("val/openai/gsm8k/mean_at_4")}))
"""


@pytest.mark.slow
@pytest.mark.engines
def test_trackio_has_the_run_and_goes_on_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio", reason="trackio " + REASON.format("trackio"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for new in ((1, 2), (3,)):
        with Trackers(["trackio:tests"], finish_s=120.0).following(tmp_path, "job"):
            write(tmp_path, *new)
    with sqlite3.connect(tmp_path / "trackio" / "tests.db") as store:
        rows = store.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    store.close()
    assert len({name for name, *_ in rows}) == 1 and rows[0][0].startswith("job-")
    assert [step for _, step, _ in rows] == [1, 2, 3]
    assert json.loads(rows[2][2])["val/openai/gsm8k/mean@4"] == 0.3
