"""A node is lost, and a command of the user's brings another machine in its place."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from rlmesh import DLJobBuilder
from rlmesh.errors import JobSpecError
from tests.launcher.nodes import node
from tests.master.launched import alive, descendants

WANDER = Path(__file__).with_name("wander_job.py")

pytestmark = pytest.mark.slow


def test_another_machine_takes_the_place_of_a_lost_one(tmp_path: Path) -> None:
    """By the user's command, which is told where to go."""
    bring = tmp_path / "bring.sh"
    words = shlex.join([sys.executable, "-m", "rlmesh.cli.main", "launch"])
    bring.write_text(
        f"""set -eu
exec {words} --nnodes $RLMESH_NNODES --node-rank $RLMESH_NODE_RANK --rdzv-endpoint $RLMESH_RDZV_ENDPOINT \
  --key-file {tmp_path / "job.key"} --view plain
"""
    )
    with ExitStack() as stack:
        arguments = ["--relaunch", f"bash {bring}"]
        head = stack.enter_context(node(tmp_path, 0, 2, "127.0.0.1:0", *arguments, script=WANDER))
        endpoint = head.wait_for(r"node 0 of 2 listens at (\S+)")[1]
        other = stack.enter_context(node(tmp_path, 1, 2, endpoint))
        head.wait_for(r"places \[\(0, 0\), \(1, 0\)\]")
        lost = [other.process.pid, *descendants(other.process.pid)]
        os.kill(lost[0], signal.SIGKILL)
        head.wait_for(r"moved \[\(0, 0\), \(1, 1\)\]", 30.0)
        assert head.ended() == 0, head.output + (tmp_path / "run" / "relaunch.log").read_text()
        assert not [pid for pid in lost if alive(pid)]
    assert "WANDERER:1.1 is on node 1" in (tmp_path / "run" / "relaunch.log").read_text()


def test_what_is_no_command_is_told_before_anything_starts() -> None:
    with pytest.raises(JobSpecError, match="is not a command: No closing quotation"):
        DLJobBuilder().relaunch("ssh 'standby").role("A").run(len).build()
