"""A job starts in a run directory when nothing of the one before is left there, and says nothing of it."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from rlmesh.agent.processes import ownership
from rlmesh.errors import LaunchError
from rlmesh.run_directory.records import END_FILE, forget_end, read_end
from rlmesh.run_directory.starts import await_guardians, note_end


def test_what_is_left_of_an_earlier_job_is_waited_for(tmp_path: Path) -> None:
    held = [ownership.hold_folder(str(tmp_path)) for _ in range(2)]
    guardians = [guardian for guardian in held if guardian is not None]
    assert len(guardians) == 2
    with pytest.raises(LaunchError, match=r"after 0\.1 s its guardian still runs"):
        await_guardians(tmp_path, 0.1)

    def end_all() -> None:
        for guardian in guardians:
            os.close(guardian)

    ended = threading.Timer(0.2, end_all)
    ended.start()
    await_guardians(tmp_path, 20.0)
    ended.join()
    await_guardians(tmp_path, 0.0)


def test_the_end_of_the_job_before_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps({"job_name": "old"}))
    (tmp_path / END_FILE).write_text("{}")
    (tmp_path / "exit-node1.json").write_text("{}")
    forget_end(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.json"]
    found = read_end(tmp_path)
    assert found is not None and found.stage == "lost"


def test_an_end_that_cannot_be_noted_is_told_and_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    note_end(tmp_path / "full", succeeded=True, stopped_at=None)
    assert "could not be noted in" in caplog.text
