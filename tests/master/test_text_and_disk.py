"""Texts that cannot be encoded, and disks without room: the job goes on, and is saved while that is possible."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.master.launched import Launched

SCRIPT = Path(__file__).with_name("text_and_disk_job.py")
LIMITED = (
    "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0})); "
    "sys.argv = [{1!r}]; runpy.run_path({1!r}, run_name='__main__')"
)
SHOWN = r"half of an emoji: \ud83d"


@pytest.fixture
def what(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("WHAT", "text")
    return monkeypatch


def run_of(folder: Path) -> Path:
    (run,) = (folder / "runs").iterdir()
    return run


@pytest.mark.slow
@pytest.mark.case("b03")
def test_text_that_cannot_be_encoded_is_escaped_everywhere(tmp_path: Path, what: pytest.MonkeyPatch) -> None:
    with Launched([str(SCRIPT)], tmp_path) as job:
        job.wait_for(r"odd/.*ud83d")
        master = job.pid_of("prime_master")
        os.kill(master, signal.SIGKILL)
        job.wait_for("master 2 of this job")
        assert job.ended() == 0, job.output
    run = run_of(tmp_path)
    assert f"TRAINER:0 | {SHOWN}" in job.output and "stage succeeded" in job.output
    assert SHOWN in (run / "logs" / "TRAINER-0.log").read_text()
    assert "cannot be saved" not in (run / "logs" / "master.log").read_text()
    (incident,) = (run / "incidents").glob("*.txt")
    assert SHOWN in incident.read_text()
    content = json.loads(incident.with_suffix(".json").read_text())
    assert content["first_cause"]["message"].endswith("half of an emoji: \ud83d"), "JSON gives it back"
    assert "started again" in content["outcome"]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == 2 * list(range(60))
    assert records[7]["metrics"] == {"odd/\ud83d": 7.0}
    assert any(rb"odd/\ud83d" in path.read_bytes() for path in (run / "tensorboard").iterdir())
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["alarm"]["text"] for event in events if event["event"] == "AlarmRaised"]
    with closing(sqlite3.connect(run / "state.db")) as store:
        assert store.execute("SELECT text FROM job WHERE name = 'stage'").fetchone() == ("succeeded",)
        assert store.execute("SELECT count(*) FROM masters").fetchone() == (2,)
    assert json.loads((run / "end.json").read_text())["stage"] == "succeeded"


@pytest.mark.slow
@pytest.mark.case("a17")
@pytest.mark.parametrize("limit", [65536, 4096])
def test_a_job_survives_a_limit_on_the_size_of_files(limit: int, tmp_path: Path, what: pytest.MonkeyPatch) -> None:
    what.setenv("WHAT", "disk")
    with Launched(["-c", LIMITED.format(limit, str(SCRIPT))], tmp_path) as job:
        assert job.ended() == 0, job.output
    run = run_of(tmp_path)
    assert "stage succeeded" in job.output
    alarms = re.findall(r"what it prints is lost, since its log cannot be written: File too large", job.output)
    assert alarms, job.output
    assert job.output.count("alarm: TRAINER:0") <= 1, "each member warns once"
    assert all(path.stat().st_size <= limit for path in run.rglob("*") if path.is_file())
    assert json.loads((run / "end.json").read_text())["stage"] == "succeeded"
    assert json.loads((run / "job.json").read_text())["workloads"]
    for line in (run / "metrics.jsonl").read_text().splitlines():
        json.loads(line)
    assert list(run.glob(".*")) == [], "no draft is left"


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[list[str]]:
    """The beginning of a command that runs with a disk of 400 kB at ``tmp_path/runs``, which goes with it."""
    folder = tmp_path / "runs"
    folder.mkdir()
    mount = f'mount -t tmpfs -o size=400k none {folder} && exec "$@" '
    begin = ["unshare", "-m", "sh", "-c", mount, "sh"]
    try:
        subprocess.run([*begin, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no disk can be mounted here: {error}")
    yield begin


FULL = """
import os, runpy, sys
from pathlib import Path
sys.argv = [{0!r}]
try:
    runpy.run_path({0!r}, run_name="__main__")
finally:
    (run,) = Path("runs").iterdir()
    for path in run.rglob("*"):
        if path.suffix == ".json" and path.is_file():
            print("JSON", path.name, path.read_text().strip()[-1:])
    print("FREE", os.statvfs(run).f_bavail)
"""


@pytest.mark.slow
@pytest.mark.case("a17")
def test_a_job_survives_a_full_disk(tiny_disk: list[str], tmp_path: Path, what: pytest.MonkeyPatch) -> None:
    what.setenv("WHAT", "disk")
    inner = [*tiny_disk, sys.executable, "-c", FULL.format(str(SCRIPT))]
    words = ["-c", f"import os; os.execvp({inner[0]!r}, {inner!r})"]
    with Launched(words, tmp_path) as job:
        assert job.ended() == 0, job.output
    assert "stage succeeded" in job.output
    assert "its log cannot be written: No space left on device" in job.output
    found = dict(re.findall(r"JSON (\S+) (.?)", job.output))
    assert found["job.json"] == "}"
    assert set(found.values()) == {"}"}, "files are whole, or not there"
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 4096
