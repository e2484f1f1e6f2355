"""What is known of a failure however busy a member is, and what is kept of a job's progress."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlmesh.cli.commands.status import status_lines
from rlmesh.errors import JobFailed
from rlmesh.observe.files.incidents import incident_files
from rlmesh.run_directory.starts import STARTS_FILE, note_start
from rlmesh.testing import LocalCluster
from tests.observe import holding_job


def test_an_incident_has_the_stacks_of_who_holds_the_interpreters_lock(tmp_path: Path) -> None:
    with LocalCluster(run_root=tmp_path):
        result = holding_job.build().submit("holding")
    (path,) = incident_files(result.run_dir)
    stacks = json.loads(path.read_text())["stacks"]
    assert "in hold_the_lock" in stacks["HOLDER:0"], stacks
    assert "HOLDER:0 (pid " in stacks["HOLDER:0"] and "of processor time" in stacks["HOLDER:0"]
    assert "holding_job.py" in stacks["TRAINER:0"]
    assert "VICTIM:0" not in stacks


def test_the_samples_trained_are_kept_shown_and_resumed(tmp_path: Path) -> None:
    run_dir, fails = tmp_path / "run", tmp_path / "fails"
    fails.touch()
    job = holding_job.build_learner(fails)
    with LocalCluster(run_root=tmp_path):
        with pytest.raises(JobFailed):
            job.submit("learn", run_dir=run_dir)
        with pytest.raises(JobFailed):
            job.submit("learn", run_dir=run_dir)
        # The next start does not know how this one ended: its driver was killed as well.
        (run_dir / STARTS_FILE).write_text('{"starts": 2}')
        fails.unlink()
        result = job.submit("learn", run_dir=run_dir)
    assert sorted(path.name for path in run_dir.glob("began-at-*")) == ["began-at-0", "began-at-32", "began-at-64"]
    assert result.status.samples_trained == 96
    assert "  samples trained: 96" in list(status_lines(result.status))
    assert note_start(run_dir) is None, "a job that succeeded is not resumed"


def test_a_folder_without_a_store_says_nothing_of_samples(tmp_path: Path) -> None:
    assert note_start(tmp_path) is None
    resume = note_start(tmp_path)
    assert resume is not None and (resume.count, resume.samples_trained) == (1, 0)
    (tmp_path / "state.db").write_bytes(b"torn")
    resume = note_start(tmp_path)
    assert resume is not None and resume.samples_trained == 0
