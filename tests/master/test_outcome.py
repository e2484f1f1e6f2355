"""What is said of a job at its end."""

from __future__ import annotations

from rlmesh.driver.outcome import cut_short, job_interrupted
from rlmesh.job.status import JobStatus, MemberState, MemberStatus


def status(*states: MemberState, killed: str = "") -> JobStatus:
    members = tuple(MemberStatus("A", rank, 0, 0, 100 + rank, state) for rank, state in enumerate(states))
    return JobStatus("j", "j-1", "stopping", 0.0, "/run", members, killed=killed)


def test_who_was_not_seen_to_end_is_told() -> None:
    last = cut_short(status("stopping", "exited", "failed", "running", killed="SIGKILL after 5 s: A:1"))
    assert last.stage == "stopped"
    assert [member.state for member in last.members] == ["exited", "exited", "failed", "exited"]
    said = str(job_interrupted("j", "SIGINT", last.killed))
    assert said == "job j was stopped: SIGINT (SIGKILL after 5 s: A:1; killed with their agents: A:0, A:3)"


def test_where_all_were_seen_to_end_nothing_is_told() -> None:
    assert cut_short(status("exited", "failed", "restarting")).killed == "", "one had no process"


def test_of_many_some_are_named() -> None:
    many: list[MemberState] = ["running"] * 1000
    told = cut_short(status(*many)).killed
    assert told == f"killed with their agents: {', '.join(f'A:{rank}' for rank in range(8))} and 992 more"
