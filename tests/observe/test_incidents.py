"""Incident files: what they hold, and that they are there after any death."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from rlmesh.job.status import ExitInfo, FailureInfo
from rlmesh.observe.files.event_log import EventLog, entry_of, read_events
from rlmesh.observe.files.incidents import Incident, incident_files, incident_text, newest_incident, read_incident
from tests.master.launched import TOY, Launched, launch

LAUNCH = ("-m", "rlmesh.cli.main", "launch", "--view", "plain")


def exit_info(**values: Any) -> ExitInfo:
    given: dict[str, Any] = {"exit_code": None, "signal": 9, "at": 100.5, "last_log_lines": ("last words",)}
    return ExitInfo("REWARD", 0, 0, 77, **(given | values))


def test_events_survive_a_torn_line_and_a_new_master(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.add({"at": 1.0, "event": "One"})
    log.close()
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"at": 2.0, "ev')
    log = EventLog(tmp_path)
    log.add({"at": 3.0, "event": "Three", "text": "é"})
    log.close()
    assert [entry["event"] for entry in read_events(tmp_path)] == ["One", "Three"]
    assert [entry["event"] for entry in EventLog(tmp_path).recent] == ["One", "Three"]
    assert list(read_events(tmp_path / "none")) == []


def test_an_entry_is_dated_by_the_exit_and_named_by_its_member() -> None:
    from rlmesh.master.events import AnnounceLoss, MemberFailed

    entry = entry_of(AnnounceLoss(exit_info()), 200.0)
    assert (entry["at"], entry["event"], entry["who"]) == (100.5, "AnnounceLoss", "REWARD:0")
    assert entry["exit"]["signal"] == 9
    entry = entry_of(MemberFailed("A", 1, 0, "ValueError: x" * 1000), 200.0)
    assert (entry["at"], entry["who"]) == (200.0, "A:1") and len(entry["error"]) < 4100
    json.dumps(entry, allow_nan=False)


def test_files_are_replaced_whole_and_keep_their_name(tmp_path: Path) -> None:
    failure = FailureInfo("REWARD:0 (pid 77) was killed by SIGKILL", "REWARD", 0, 100.0, exit_info())
    incident = Incident(3, {"name": "j", "id": "j-1", "run_dir": str(tmp_path)}, 100.0, [failure])
    path = incident.write(tmp_path)
    assert path.name == "0003-REWARD-0.json"
    incident.failures = [FailureInfo("something that explains it better"), failure]
    incident.outcome = "the job failed"
    assert incident.write(tmp_path) == path
    assert [file.name for file in sorted(path.parent.iterdir())] == ["0003-REWARD-0.json", "0003-REWARD-0.txt"]
    assert incident_files(tmp_path) == [path] and newest_incident(tmp_path) == path.with_suffix(".txt")
    content = read_incident(path)
    assert content["first_cause"]["message"] == "something that explains it better"
    assert [f["message"] for f in content["followed"]] == [failure.message]
    text = incident_text(content)
    assert "FIRST CAUSE\n  something that explains it better" in text and "outcome: the job failed" in text


def only_incident(folder: Path) -> tuple[dict[str, Any], str]:
    (run,) = (folder / "runs").iterdir()
    (path,) = incident_files(run)
    return read_incident(path), path.with_suffix(".txt").read_text()


def test_a_killed_member_leaves_one_incident_that_tells_all(tmp_path: Path) -> None:
    with launch(tmp_path, "--sleep", "60") as job:
        job.wait_for("step 1")
        pid = int(job.wait_for(r"pid of ADDER:1 is (\d+)")[1])
        os.kill(pid, signal.SIGKILL)
        assert job.ended() == 1
        told = re.search(r"What happened, in order: (\S+)", job.output)
        assert told, job.output
        content, text = only_incident(tmp_path)
        assert Path(told[1]).read_text() == text
        assert f"incident: {told[1]}" in job.output
    first = content["first_cause"]
    assert (first["role"], first["rank"], first["exit"]["signal"]) == ("ADDER", 1, 9)
    assert content["outcome"] == "the job failed" and content["closed_at"] >= content["opened_at"]
    assert content["exits"]["ADDER:1"]["how"] == "killed by SIGKILL" and content["exits"]["ADDER:1"]["pid"] == pid
    assert content["exits"]["ADDER:1"]["peak_rss_bytes"] > 2**20
    assert content["memory_limits"]["ADDER:1"]["node_bytes"] > 2**30
    assert content["touched"].startswith("ADDER:1 is called by TRAINER:0 and calls nobody; its process group: ADDER:0")
    assert content["steps"]["TRAINER:0"] == 1
    assert set(content["stacks"]) == {"ADDER:0", "TRAINER:0"}
    # The trainer waits for the call that failed; on a busy machine it has heard so, and ended, before it is looked at.
    assert "toy_job.py" in content["stacks"]["TRAINER:0"] or "is gone" in content["stacks"]["TRAINER:0"]
    assert any(f"pid of ADDER:1 is {pid}" in line for line in content["last_lines"]["ADDER:1"])
    assert set(content["last_lines"]) == {"ADDER:0", "ADDER:1", "TRAINER:0"}
    assert content["config"]["workloads"]["ADDER"]["total"] == 2
    events = content["events"]
    assert [event["at"] for event in events] == sorted(event["at"] for event in events)
    kinds = [event["event"] for event in events]
    assert kinds.index("MemberBound") < kinds.index("MemberExited") < kinds.index("StopMembers")
    for part in (
        "FIRST CAUSE",
        "WHOM IT TOUCHED",
        "PROCESSES",
        "EVENTS",
        "LAST LINES OF ADDER:1",
        "STACKS OF TRAINER:0",
    ):
        assert part in text, part


@pytest.mark.slow
def test_a_restart_leaves_an_incident_that_says_how_it_ended(tmp_path: Path) -> None:
    with Launched([*LAUNCH, "--restart", "job", str(TOY), "--", "--sleep", "1.5"], tmp_path) as job:
        job.wait_for("step 1")
        os.kill(int(job.wait_for(r"pid of ADDER:1 is (\d+)")[1]), signal.SIGKILL)
        assert job.ended() == 0, job.output
        content, _ = only_incident(tmp_path)
    assert content["outcome"].startswith("job was started again (scope job) and served after"), content["outcome"]
    assert content["first_cause"]["exit"]["signal"] == 9
    assert "Restart" in str([event["event"] for event in content["events"]])


@pytest.mark.parametrize("who", ["-m rlmesh.agent", "guardian.py"])
def test_the_driver_tells_when_no_master_is_left(who: str, tmp_path: Path) -> None:
    with launch(tmp_path, "--sleep", "60") as job:
        job.wait_for("step 1")
        os.kill(job.pid_of(who), signal.SIGKILL)
        assert job.ended() == 1, job.output
        told = re.search(r"What happened, in order: (\S+)", job.output)
        assert told, job.output
        text = Path(told[1]).read_text()
    assert "FIRST CAUSE" in text and "LAST LINES OF TRAINER-0" in text
    assert "MemberReady" in text
