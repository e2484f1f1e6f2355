"""Members of real jobs that die or stall: what their callers see, with what the agent knows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlmesh.errors import JobFailed
from rlmesh.master.jobspec import TimeLimits
from rlmesh.testing import LocalCluster
from tests.own_time import HANG_S, OwnTime
from tests.runtime import dying_job


@pytest.mark.case("O1")
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("kill", "killed by SIGKILL"),
        ("exit", "exited with code 3"),
        ("os._exit", "exited with code 3"),
        ("segfault", "killed by SIGSEGV"),
    ],
)
def test_pending_calls_end_with_the_member_and_say_how(how: str, said: str, tmp_path: Path, own_time: OwnTime) -> None:
    out = tmp_path / "seen.json"
    # The trainer has a moment to look around before the failed job ends it.
    with LocalCluster(run_root=tmp_path, limits=TimeLimits(fail_grace_s=HANG_S)), pytest.raises(JobFailed, match=said):
        dying_job.build("death", out, "WORKER", how=how).submit("death")
    seen = json.loads(out.read_text())
    assert seen["left"] == 0, "calls were left waiting"
    assert own_time.of(seen["after_s"]) < 1
    own = [error for error in seen["errors"] if "SystemExit" in error]
    assert len(own) == (how == "exit"), "sys.exit is answered, then the process ends"
    for error in set(seen["errors"]) - set(own):
        assert f"WORKER rank 0 (pid {seen['pid']} on " in error and said in error
        assert f"pid {seen['pid']} speaks its last words" in error
    assert set(seen["executed"]) <= {"maybe", "yes"}
    text, executed, took_s = seen["again"]
    assert said in text and executed == "no" and own_time.of(took_s) < 0.1


def test_a_member_that_cannot_be_built_fails_the_calls_that_wait_for_it(tmp_path: Path) -> None:
    out = tmp_path / "seen.json"
    limits = TimeLimits(fail_grace_s=HANG_S)
    with LocalCluster(run_root=tmp_path, limits=limits), pytest.raises(JobFailed, match="it cannot be built"):
        dying_job.build_broken(out).submit("broken")
    text, executed = json.loads(out.read_text())
    assert "BROKEN:0 cannot answer count(): BROKEN rank 0 (pid " in text and "exited with code 1" in text
    assert "ValueError: it cannot be built" in text and executed in ("no", "maybe")


@pytest.mark.slow
def test_stalls_are_no_deaths(tmp_path: Path, own_time: OwnTime) -> None:
    """Twelve seconds without the interpreter's lock, and a stopped process: calls wait, at most until their deadline;
    nobody is declared dead."""
    out = tmp_path / "seen.json"
    with LocalCluster(run_root=tmp_path):
        dying_job.build("stalls", out, "NATIVE", "STOPPED").submit("stalls")
    seen = json.loads(out.read_text())
    text, is_timeout, executed, late_s = seen["late"]
    assert is_timeout and executed == "maybe" and late_s > 0.9 and own_time.of(late_s) < 2.5
    assert "STOPPED:0.count() gave no answer within its deadline" in text
    assert seen["held_s"] >= 12 and seen["counted"] == seen["after"] == 0
