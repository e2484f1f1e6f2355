"""Files of lines whose writer was killed in the middle of a write: the next writer removes the half line."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import cast

import pytest

from rlmesh import MetricRecord
from rlmesh.master.chaos import CHAOS_FILE, Chaos
from rlmesh.master.chaos_plan import parse_kill
from rlmesh.master.context import JobContext
from rlmesh.master.jobspec import JobSpec
from rlmesh.observe.files.append_file import AppendFile
from rlmesh.observe.files.event_log import EVENTS_FILE, EventLog
from rlmesh.observe.files.metric_files import METRICS_FILE, MetricsWriter, read_tail
from rlmesh.placement.demand import JobDemand
from rlmesh.run_directory import records
from rlmesh.runtime.runtime import Runtime
from rlmesh.tune.trial import TrialFiles


@pytest.mark.parametrize("before", [b"", b"one\n", b"one\ntwo\n", b"x" * 200_000 + b"\n", b"\n"])
@pytest.mark.parametrize("torn", [b"", b"half", b"h" * 65_536, b"h" * 200_000], ids=len)
def test_only_what_follows_the_last_line_break_is_removed(tmp_path: Path, before: bytes, torn: bytes) -> None:
    path = tmp_path / "lines"
    path.write_bytes(before + torn)
    file = AppendFile(path)
    file.append(b"new\n")
    file.append(b"part ")  # what this writer appends itself is never torn
    file.append(b"of a line\n")
    file.close()
    assert path.read_bytes() == before + b"new\npart of a line\n"


@pytest.mark.parametrize("failing", ["pread", "ftruncate"])
def test_nothing_is_appended_until_a_half_line_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\nhal")
    file = AppendFile(path)

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for _ in range(2):  # each append tries it again
        with monkeypatch.context() as patch:
            patch.setattr(f"rlmesh.private_files.os.{failing}", fails)
            with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                file.append(b"lost\n")
        assert path.read_bytes() == b"one\nhal" and not file.is_open
    file.append(b"two\n")
    file.close()
    assert path.read_bytes() == b"one\ntwo\n"


def test_results_wait_for_the_removal_of_a_half_line_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, path = TrialFiles(tmp_path), tmp_path / "results.jsonl"
    half = b'{"training_iteration": 1}\n{"training_it'
    path.write_bytes(half)

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr("rlmesh.private_files.os.ftruncate", fails)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            files.add({"training_iteration": 2, "timesteps_total": 10})  # type: ignore[arg-type]
    assert path.read_bytes() == half
    files.add({"training_iteration": 2, "timesteps_total": 10})  # type: ignore[arg-type]
    files.close()
    assert [json.loads(line)["training_iteration"] for line in path.read_text().splitlines()] == [1, 2]


def test_a_file_of_something_else_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "frames"
    path.write_bytes(b"\n\x01\x02")
    file = AppendFile(path, lines=False)
    file.append(b"\x03")
    file.close()
    assert path.read_bytes() == b"\n\x01\x02\x03"


def report(step: int) -> MetricRecord:
    return MetricRecord(10.0 + step, "TRAINER", 0, step, {"reward": 0.5}, sender="TRAINER:0.0/1", number=step)


def test_every_line_of_the_metrics_is_json_after_a_killed_master_at_each_byte(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(report(1))
    writer.write(report(2))
    writer.close()
    path = tmp_path / METRICS_FILE
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for size in range(first, len(whole) + 1):
        path.write_bytes(whole[:size])
        stored, _ = read_tail(path, 10)
        writer = MetricsWriter(tmp_path)
        for step in range(stored + 1, 4):  # the member sends what the new master has not
            writer.write(report(step))
        writer.close()
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3], size


def test_events_have_whole_lines_only(tmp_path: Path) -> None:
    (tmp_path / EVENTS_FILE).write_bytes(b'{"at": 1.0, "event": "One"}\n{"at": 2.0, "ev')
    log = EventLog(tmp_path)
    log.add({"at": 3.0, "event": "Three"})
    log.close()
    lines = (tmp_path / EVENTS_FILE).read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["One", "Three"]


def test_a_kill_that_happened_is_not_repeated_after_a_torn_line(tmp_path: Path) -> None:
    done, left = "ADDER:0@step=1", "ADDER:1@step=9"
    told = "".join(json.dumps(entry) + "\n" for entry in ({"at": 1.0, "kill": done},))
    (tmp_path / CHAOS_FILE).write_text(told + '{"at": 2.0, "kil')
    spec = JobSpec("j-1", "j", str(tmp_path), (), JobDemand((), ()))
    runtime = cast(Runtime, None)  # no kill is due
    chaos = Chaos(JobContext.initial(spec, 0.0), runtime, [parse_kill(done), parse_kill(left)], lambda: 0.0)
    assert chaos.done == [done]
    assert [str(kill) for kill in chaos.planned] == [left]


def test_results_of_a_trial_have_whole_lines_only(tmp_path: Path) -> None:
    files = TrialFiles(tmp_path)
    (tmp_path / "results.jsonl").write_text('{"training_iteration": 1}\n{"training_it')
    files.add({"training_iteration": 2, "timesteps_total": 10})  # type: ignore[arg-type]
    files.close()
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["training_iteration"] for line in lines] == [1, 2]


def test_a_run_directory_is_found_after_a_torn_line_in_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    records.remember(tmp_path / "one")
    path = records.list_file()
    with path.open("ab") as file:
        file.write(b"/half/a/pa")
    records.remember(tmp_path / "two")
    assert path.read_text().splitlines() == [str(tmp_path / "one"), "/half/a/pa", str(tmp_path / "two")]
