"""A run directory belongs to one running job at a time."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rlmesh.errors import LaunchError
from rlmesh.run_directory.starts import hold
from tests.master.launched import TOY, Launched


def test_a_second_job_in_the_same_run_directory_is_refused_before_it_starts(tmp_path: Path) -> None:
    words = ["-m", "rlmesh.cli.main", "launch", "--view", "plain", "--run-dir", "run", str(TOY), "--"]
    with Launched([*words, "--sleep", "60"], tmp_path) as first:
        first.wait_for("step 1")
        with Launched(words, tmp_path) as second:
            assert second.ended() == 1
        assert f"another job runs in {tmp_path}/run (started by pid {first.process.pid} at 2" in second.output
        assert f"rlmesh stop {tmp_path}/run" in second.output
        assert first.process.poll() is None


@pytest.mark.slow
def test_a_job_that_was_killed_holds_its_run_directory_no_more(tmp_path: Path) -> None:
    words = ["-m", "rlmesh.cli.main", "launch", "--view", "plain", "--run-dir", "run", str(TOY), "--"]
    with Launched([*words, "--sleep", "60"], tmp_path) as first:
        first.wait_for("step 1")
        os.kill(first.process.pid, signal.SIGKILL)
        first.ended()
    with Launched(words, tmp_path) as third:
        # It waits for the guardian of the first one, which has five seconds to end what is below it.
        assert third.ended(60.0) == 0, "whoever is killed holds nothing any more"


def test_a_run_directory_is_let_go_with_the_descriptor(tmp_path: Path) -> None:
    held = hold(tmp_path)
    assert held is not None
    with pytest.raises(LaunchError, match=f"another job runs in {tmp_path} .started by pid {os.getpid()} at "):
        hold(tmp_path)
    (tmp_path / "held-by.json").write_text("half a fi")
    with pytest.raises(LaunchError, match=f"another job runs in {tmp_path}: two would spoil"):
        hold(tmp_path)
    os.close(held)
    again = hold(tmp_path)
    assert again is not None
    os.close(again)
