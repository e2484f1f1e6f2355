"""Roles that share a process: each is called, acts and is restarted as itself, and all of them with the process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlmesh import DLJobBuilder
from rlmesh.builders.config import DLJob
from rlmesh.cli.commands.logs import files
from rlmesh.cli.commands.ps import member_lines
from rlmesh.cli.commands.status import status_lines
from rlmesh.driver.outcome import JobResult
from rlmesh.errors import JobFailed, JobSpecError
from rlmesh.job.status import FailureInfo
from rlmesh.master.decisions.failover import FailoverCoordinator, Restart
from rlmesh.master.jobspec import RestartRule
from rlmesh.testing import LocalCluster
from tests.master import fused_job


def run(job: DLJob, out: Path, **options: Any) -> tuple[dict[str, Any], JobResult]:
    with LocalCluster(run_root=out.parent, **options):
        result = job.submit("fused")
    assert all(report.clean for report in result.exit_reports)
    return json.loads(out.read_text()), result


def test_each_role_is_itself_in_a_process_with_others(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    seen, result = run(fused_job.build("look", out), out)
    actors, rollouts = seen["actors"], seen["rollouts"]
    for rank in range(2):
        actor, rollout = actors[rank], rollouts[rank]
        assert (actor["name"], rollout["name"]) == (f"ACTOR:{rank}", f"ROLLOUT:{rank}")
        assert actor["made_as"] == actor["set_up_as"] == f"ACTOR:{rank}"
        assert rollout["made_as"] == rollout["set_up_as"] == f"ROLLOUT:{rank}"
        assert actor["pid"] == rollout["pid"] and actor["main"] and rollout["main"]
        assert actor["fused"] == rollout["fused"] == ["ACTOR", "ROLLOUT"]
        assert actor["devices"] == rollout["devices"] and len(actor["devices"]) == 1
    assert actors[0]["pid"] != actors[1]["pid"] and actors[0]["devices"] != actors[1]["devices"]
    assert seen["weights"] == [1.0, 2.0], "the object of the other role, without a copy"
    names = ["ROLLOUT:0", "ROLLOUT:1", "ACTOR:0", "ACTOR:1"]
    assert seen["async"] == names and seen["pool"] == names
    assert seen["stream"] == ["ROLLOUT:1"] * 3 + ["ACTOR:1"] * 2
    assert seen["noted"] == [[list(range(200))] * 2, [[-number for number in range(200)]] * 2]
    assert seen["reentrant"] == ["WouldDeadlock"] * 2, "they share a main thread"
    assert "raised by ROLLOUT:0" in seen["own_error"]
    # How people see it.
    lines = list(member_lines(result.status))
    assert any(line.startswith("  ROLLOUT:1 ") and line.endswith("in the process of ACTOR:1") for line in lines)
    assert any(line.startswith("  ROLLOUT ") and "fused with ACTOR" in line for line in status_lines(result.status))
    logs = files(result.run_dir / "logs")
    assert logs["ROLLOUT:0"].read_text() == logs["ACTOR:0"].read_text()
    assert "ACTOR:0 is set up" in logs["ROLLOUT:0"].read_text()
    teardowns = (result.run_dir / "teardowns").read_text().split()
    assert sorted(teardowns) == sorted(names)


def test_a_killed_process_brings_all_of_its_roles_back(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    seen, result = run(fused_job.build("killed", out), out)
    before, after = seen["before"], seen["after"]
    assert seen["errors"] == [["PeerLost", "ACTOR", 1], ["PeerLost", "ROLLOUT", 1]]
    assert seen["meanwhile"] == [1, 1], "calls made meanwhile wait for the new process"
    assert [m["incarnation"] for m in after] == [0, 1, 0, 1]
    assert before[0]["pid"] == after[0]["pid"] and seen["others"][0] == seen["others"][1]
    assert after[1]["pid"] == after[3]["pid"] != before[1]["pid"]
    assert after[3]["because"].startswith("ROLLOUT:1 because of ACTOR:1")
    assert sorted(seen["events"]) == sorted(
        [role, [1], phase] for role in ("ACTOR", "ROLLOUT") for phase in ("restarting", "ready")
    )
    (record,) = result.status.restarts
    assert record.unit == "ACTOR+ROLLOUT:1" and record.scope == "member"


def test_a_new_master_takes_over_processes_with_several_roles(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    seen, result = run(fused_job.build("masterless", out), out)
    pids = [member["pid"] for member in seen["before"]]
    assert [member["pid"] for member in seen["alone"]] == pids
    assert [member["incarnation"] for member in seen["again"]] == [0, 1, 0, 1]
    assert seen["again"][0]["pid"] == seen["again"][2]["pid"] == pids[0]
    assert seen["again"][1]["pid"] == seen["again"][3]["pid"] != pids[1]
    assert result.status.extra["masters"] == "2"


def test_the_strictest_scope_holds(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    job = fused_job.build("killed", out)
    job.workloads["ROLLOUT"].restart = "role"  # type: ignore[assignment]
    seen, _ = run(job, out)
    assert [m["incarnation"] for m in seen["after"]] == [1, 1, 1, 1]
    assert seen["others"][0] == seen["others"][1]


def test_where_one_role_is_never_restarted_the_job_fails_once(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    job = fused_job.build("killed", out)
    job.workloads["ROLLOUT"].restart = "never"  # type: ignore[assignment]
    with LocalCluster(run_root=tmp_path), pytest.raises(JobFailed) as caught:
        job.submit("fused")
    first, *others = caught.value.exceptions
    assert "ACTOR:1" in str(first) and "killed by SIGKILL" in str(first)
    assert not any("ROLLOUT:1 (pid" in str(other) and "SIGKILL" in str(other) for other in others)


def test_what_one_role_raises_is_the_cause_of_the_end_of_its_process(tmp_path: Path) -> None:
    job = fused_job.build("look", tmp_path / "out.json", raises=True)
    with LocalCluster(run_root=tmp_path), pytest.raises(JobFailed) as caught:
        job.submit("fused")
    first = caught.value.exceptions[0]
    assert "ROLLOUT:" in str(first) and "no engine" in str(first)
    assert not any("exited with code" in str(error).splitlines()[0] for error in caught.value.exceptions)


def test_the_trainer_may_share_a_process_with_the_role_that_it_calls(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    seen, _ = run(fused_job.build_with_trainer(out), out)
    (actor,) = seen["actors"]
    assert seen["name"] == "TRAINER:0" and actor["pid"] == seen["pid"] and actor["name"] == "ACTOR:0"
    assert not actor["main"], "run() has the main thread"


@pytest.mark.slow
def test_ranks_of_a_fused_group_form_one_process_group(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    builder = DLJobBuilder().config({"scenario": "look", "out": str(out)}).device_type("CPU")
    builder.role("JUDGE").run(fused_job.Judge).total(2).resource(cpu=0)
    builder.role("ACTOR").train(fused_job.Ranks).total(2).resource(cpu=0)
    builder.role("TRAINER").run(fused_job.RanksTrainer).resource(cpu=0)
    seen, _ = run(builder.with_fusion("ACTOR", "JUDGE").build(), out)
    assert seen["ranks"] == seen["judged"] == [["0", "2"], ["1", "2"]]
    assert seen["sums"] == [3.0, 3.0] and seen["again"] == [3.0, 3.0]


RULES = {
    "A": RestartRule("member", max_restarts=5, on_error=True),
    "B": RestartRule("role", max_restarts=2),
    "C": RestartRule("member"),
}


def test_the_policy_of_a_process_is_the_strictest_one() -> None:
    coordinator = FailoverCoordinator(RULES, {"A": 2, "B": 2, "C": 1}, [("A", "B")])
    for role in ("A", "B"):
        decision = coordinator.decide(FailureInfo("died", role, 1), [], 0.0)
        assert isinstance(decision, Restart)
        assert decision.record.unit == "A+B" and decision.budget == 2
        assert decision.members == (("A", 0), ("A", 1), ("B", 0), ("B", 1))
        assert not coordinator.restarts_errors(role)
    alone = coordinator.decide(FailureInfo("died", "C", 0), [], 0.0)
    assert isinstance(alone, Restart) and alone.members == (("C", 0),)


def test_what_cannot_be_one_process_is_said_before_the_start() -> None:
    builder = DLJobBuilder().device_type("CPU")
    builder.role("ACTOR").run(fused_job.Trainer).total(2).env({"MODE": "a"})
    builder.role("ROLLOUT").run(fused_job.Trainer).env({"MODE": "b"}).with_groups(prefill=1, decode=2)
    builder.with_fusion("ACTOR", "ROLLOUT").with_fusion("ACTOR").with_fusion("ACTOR", "ROLOUT")
    builder.with_separation("ACTOR", "ROLLOUT")
    with pytest.raises(JobSpecError) as caught:
        builder.build()
    text = str(caught.value)
    assert "fusion of ACTOR, ROLLOUT: role ROLLOUT has groups" in text
    assert "the same number of members: ACTOR has 2, ROLLOUT has 3" in text
    assert "ACTOR and ROLLOUT both have a run()" in text
    assert "MODE cannot have several values in one process: ACTOR 'a', ROLLOUT 'b'" in text
    assert "fusion of ACTOR: needs at least two roles" in text
    assert "role ACTOR is in another fusion already" in text
    assert "the job has no role 'ROLOUT'. Did you mean" in text
    assert "to be kept apart as well" in text
