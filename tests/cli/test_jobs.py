"""``rlmesh status | logs | stacks | stop``: on a job that runs and after it has ended."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from rlmesh.cli.commands.logs import files
from rlmesh.cli.commands.status import end_lines, status_lines
from rlmesh.cli.job_choice import find_any, find_running, headline, matches
from rlmesh.cli.main import main
from rlmesh.errors import UsageError
from rlmesh.job.status import FailureInfo, JobStatus, MemberStatus
from rlmesh.run_directory.records import EndedJob, ended_jobs, list_file, read_end, remember, write_end
from tests.master.launched import launch


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main([*words])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_commands_on_a_job_that_runs_and_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with launch(tmp_path, "--sleep", "60") as job:
        job.wait_for("step 1")
        code, status = said(capsys, "status")
        assert code == 0 and re.search(r"ADDER  2 (ready|running|finished)", status) and "TRAINER  1 running" in status
        code, logs = said(capsys, "logs", "adder:1")
        assert code == 0 and "ADDER:1 | pid of ADDER:1" in logs and "ADDER:0" not in logs
        code, stacks = said(capsys, "stacks", "ADDER")
        assert code == 0 and "=== ADDER:0" in stacks and "=== TRAINER" not in stacks
        assert "in sleep" in stacks  # the method that holds the main thread
        assert said(capsys, "logs", "CRITIC") == (
            2, "rlmesh logs: the job has no member 'CRITIC'; it has ADDER:0, ADDER:1, TRAINER:0, agent:0, master\n"
        )  # fmt: skip
        code, stopped = said(capsys, "stop", "--grace", "5")
        assert code == 0, stopped
        assert "nothing of it is left on this machine" in stopped and "node 0: ended" in stopped
        assert job.ended() == 130
    assert "job toy was stopped: rlmesh stop" in job.output
    (run,) = map(str, (tmp_path / "runs").iterdir())
    for words in (("stacks", "--job", run), ("ps", run, "--pending"), ("stop", run)):
        code, told = said(capsys, *words)
        assert (code, told.partition(" after")[0]) == (2, f"rlmesh {words[0]}: {run} has ended: stopped"), told
    code, told = said(capsys, "logs", run)
    assert code == 2 and told.endswith(f"To name a job: --job {run}\n")
    code, status = said(capsys, "status")
    assert code == 1 and "  stopped after " in status
    whole = said(capsys, "logs", "TRAINER:0")[1].splitlines()
    assert "pid of TRAINER" in whole[0]  # the last lines depend on who was stopped first
    assert said(capsys, "logs", "TRAINER:0", "-n", "2")[1].splitlines() == whole[-2:]
    assert said(capsys, "stop") == (2, "rlmesh stop: no job of yours runs on this machine\n")
    assert "toy  stopped after" in said(capsys, "ps", "--all")[1]


@pytest.mark.slow
def test_logs_are_followed_until_the_job_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with launch(tmp_path, "--sleep", "2") as job:
        job.wait_for("step 0")
        code, logs = said(capsys, "logs", "-f")
        assert code == 0
        assert job.ended() == 0
    assert "ADDER:1 | teardown of ADDER:1" in logs
    assert logs.count("TRAINER:0 | step 1") == 1


def test_members_are_chosen_by_role_or_name() -> None:
    assert matches("A:1", None) and matches("A:1", "a") and matches("A:1", "A:1")
    assert not matches("A:1", "A:2") and not matches("AB:1", "A")


def test_log_files_by_name(tmp_path: Path) -> None:
    for name in ("A-10", "A-9", "B-X-0", "master", "agent-0"):
        (tmp_path / f"{name}.log").touch()
    assert list(files(tmp_path)) == ["A:9", "A:10", "B-X:0", "agent:0", "master"]


def member(rank: int, state: str, **more: object) -> MemberStatus:
    return MemberStatus("A", rank, more.pop("incarnation", 0), more.pop("node_rank", 0), 1, state, **more)  # type: ignore[arg-type]


def test_status_fits_in_few_lines() -> None:
    members = (member(0, "running", step=4), member(1, "running", step=6, node_rank=1, incarnation=2))
    status = JobStatus("j", "id", "running", 0.0, "/r", members, failures=(FailureInfo("A:1 died\nmore"),))
    assert list(status_lines(status)) == [
        "  running",
        "  A  2 running  steps 4 to 6  restarted: rank 1 2 times  on nodes 0, 1",
        "  first cause: A:1 died",
        "    more",
    ]


def test_the_end_of_a_job_is_kept_with_its_run(tmp_path: Path) -> None:
    status = JobStatus(
        "j", "id", "failed", 100.0, str(tmp_path), (member(0, "failed"),), failures=(FailureInfo("boom"),)
    )
    write_end(status, 160.0)
    end = read_end(tmp_path)
    assert end == EndedJob("id", "j", str(tmp_path), "failed", 100.0, 160.0, ("boom",), (("A:0", "failed"),))
    assert list(end_lines(end)) == ["  A  1 failed", "  first cause: boom"]
    assert headline(end) == f"id  j  failed after 1:00  {tmp_path}"


def test_a_job_whose_driver_died_is_known_as_lost(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"job_name": "j"}')
    end = read_end(tmp_path)
    assert end is not None and (end.stage, end.job_name) == ("lost", "j")
    (tmp_path / "job.json").write_text("half a fi")
    torn = read_end(tmp_path)
    assert torn is not None and torn.stage == "unreadable"
    assert read_end(tmp_path / "gone") is None


@pytest.mark.case("n12")
def test_the_runs_that_are_there_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for number in range(3):
        folder = tmp_path / f"run{number}"
        folder.mkdir()
        write_end(JobStatus("j", f"id-{number}", "succeeded", float(number), str(folder)), 10.0)
        remember(folder)
    remember(tmp_path / "gone")
    assert [job.job_id for job in ended_jobs([str(tmp_path / "run1")])] == ["id-0", "id-2"]
    found = find_any("id-2")
    assert isinstance(found, EndedJob) and found.job_id == "id-2"
    assert find_any(str(tmp_path / "run0")) == read_end(tmp_path / "run0")
    # Of several of one name the newest is meant.
    newest = find_any("j")
    assert isinstance(newest, EndedJob) and newest.job_id == "id-2"
    told = capsys.readouterr().err
    assert "the newest job called 'j' is shown; 2 more ended before it" in told
    assert f"{tmp_path}/run1, {tmp_path}/run0" in told
    code, out = said(capsys, "status", "j")
    assert code == 0 and out.startswith("id-2  j  succeeded")
    with pytest.raises(UsageError, match=r"id-2 has ended: succeeded after 0:08\. `rlmesh status id-2`"):
        find_running("id-2")
    with pytest.raises(UsageError, match="no job of yours runs"):
        find_running("x")
    with pytest.raises(UsageError, match=r"no job 'x' runs here .*see `rlmesh ps --all`"):
        find_any("x")


def test_the_list_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    list_file().parent.mkdir()
    list_file().write_text("".join(f"/{'x' * 200}/{n}\n" for n in range(1000)))
    remember("/new")
    kept = list_file().read_text().splitlines()
    assert len(kept) == 200 and kept[-1] == "/new"


def test_a_list_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    remember("/new")
    assert ended_jobs() == []
    write_end(JobStatus("j", "id", "failed", time.time(), str(tmp_path / "file")))


def test_the_end_is_one_json_object(tmp_path: Path) -> None:
    write_end(JobStatus("j", "id", "succeeded", 1.0, str(tmp_path)), 2.0)
    assert json.loads((tmp_path / "end.json").read_text())["stage"] == "succeeded"
