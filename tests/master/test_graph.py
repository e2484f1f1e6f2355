from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh import DLJobBuilder
from rlmesh.cli.commands.ps import ask
from rlmesh.errors import JobSpecError
from rlmesh.job.status import EdgeStats
from rlmesh.master.monitoring.graph import CallGraph, describe_touched, graph_lines
from rlmesh.run_directory.discovery import find_job, running_jobs
from tests.master.launched import launch
from tests.own_time import HANG_S


def seen(callee: str, method: str = "forward", calls: int = 1, failed: int = 0) -> EdgeStats:
    return EdgeStats(callee, method, calls, failed, 0.2 * calls, 0.1 * calls, 0.0, 1000 * calls, 10 * calls)


def ppo() -> CallGraph:
    """TRAINER calls all; ROLLOUT asks REWARD; ACTOR is a process group; CRITIC and REFERENCE share a device."""
    graph = CallGraph()
    for role, members in {"TRAINER": 1, "ACTOR": 2, "ROLLOUT": 2, "REWARD": 1, "CRITIC": 1, "REFERENCE": 1}.items():
        for rank in range(members):
            graph.add_member(role, rank)
    graph.declare_group("ACTOR")
    graph.declare_collocation(["CRITIC:0", "REFERENCE:0"])
    graph.observe("TRAINER:0", [seen(name) for name in ("ACTOR:0", "ACTOR:1", "ROLLOUT:0", "ROLLOUT:1")], 1.0)
    graph.observe("ROLLOUT:0", [seen("REWARD:0", "score")], 2.0)
    graph.declare("ROLLOUT", "REWARD")
    return graph


def test_a_failure_names_its_upstream_and_downstream() -> None:
    touched = ppo().touched_by(["REWARD:0"])
    assert touched.upstream == ("ROLLOUT:0", "ROLLOUT:1"), "one observed, one declared"
    assert touched.further_upstream == ("TRAINER:0",)
    assert touched.downstream == touched.peers == ()
    text = describe_touched(touched)
    assert text == ("REWARD:0 is called by ROLLOUT:0, ROLLOUT:1 (and through them by TRAINER:0) and calls nobody")
    assert ppo().touched_by(["ROLLOUT:1"]).downstream == ("REWARD:0",)


def test_a_group_and_a_device_are_touched_with_their_member() -> None:
    touched = ppo().touched_by(["ACTOR:1"])
    assert touched.peers == ("ACTOR:0",) and touched.upstream == ("TRAINER:0",)
    assert "its process group: ACTOR:0" in describe_touched(touched)
    assert ppo().touched_by(["CRITIC:0"]).cohabitants == ("REFERENCE:0",)


def test_cycles_end() -> None:
    graph = CallGraph()
    graph.observe("A:0", [seen("B:0")], 1.0)
    graph.observe("B:0", [seen("C:0")], 1.0)
    graph.observe("C:0", [seen("A:0")], 1.0)
    touched = graph.touched_by(["A:0"])
    assert (touched.upstream, touched.further_upstream, touched.downstream) == (("C:0",), ("B:0",), ("B:0",))


def test_counts_add_up_and_only_new_edges_change_the_shape() -> None:
    graph = ppo()
    version = graph.version
    graph.observe("TRAINER:0", [seen("ACTOR:0", calls=3, failed=1)], 9.0)
    assert graph.version == version
    (edge,) = [edge for edge in graph.edges() if edge.callee == "ACTOR:0"]
    assert (edge.stats.calls, edge.stats.failed, edge.at) == (4, 1, 9.0)
    graph.observe("TRAINER:0", [seen("ACTOR:0", "save")], 9.0)
    assert graph.version == version + 1
    line = next(line for line in graph_lines(graph) if "forward" in line and "ACTOR" in line)
    assert line.startswith("TRAINER:0 → ACTOR:0-1  forward  5 calls, 1 unanswered, 200.0 ms each"), line


names = st.sampled_from([f"{role}:{rank}" for role in "ABC" for rank in range(3)])


@given(st.lists(st.tuples(names, names)), st.sets(names, min_size=1, max_size=3))
def test_what_is_touched_is_what_the_edges_say(pairs: list[tuple[str, str]], failed: set[str]) -> None:
    graph = CallGraph()
    for caller, callee in pairs:
        graph.observe(caller, [seen(callee)], 1.0)
    touched = graph.touched_by(sorted(failed))
    edges = set(pairs)
    assert set(touched.upstream) == {a for a, b in edges if b in failed} - failed
    assert set(touched.downstream) == {b for a, b in edges if a in failed} - failed
    reached = set(failed)
    while more := {a for a, b in edges if b in reached} - reached:
        reached |= more
    assert set(touched.upstream) | set(touched.further_upstream) == reached - failed
    again = CallGraph.of_plain(graph.plain())
    assert again == graph and again.touched_by(sorted(failed)) == touched


def test_a_declared_call_needs_its_role() -> None:
    builder = DLJobBuilder().device_type("CPU")
    builder.role("A").run("tests.master.toy_job.Trainer").calls("B", "ADER")
    builder.role("B").run("tests.master.toy_job.Adder").total(1)
    with pytest.raises(JobSpecError, match=r"role A: calls: the job has no role 'ADER'"):
        builder.build()


def test_the_graph_of_a_running_job_shows_its_calls(tmp_path: Path) -> None:
    with launch(tmp_path, "--sleep", "60") as job:
        job.wait_for("step 1")
        (run,) = (tmp_path / "runs").iterdir()
        running = find_job(str(run), running_jobs())  # others may run on this machine
        deadline = time.monotonic() + HANG_S
        lines: list[str] = []
        while not any("TRAINER:0 → ADDER:0-1  rank  4 calls" in line for line in lines):
            assert time.monotonic() < deadline, lines
            time.sleep(0.05)
            lines = ask(running, graph=True)
        assert any("TRAINER:0 → ADDER:0-1  add" in line for line in lines), lines
        os.kill(job.process.pid, signal.SIGINT)
        assert job.ended() == 130
