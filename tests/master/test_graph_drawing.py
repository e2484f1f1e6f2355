"""The graph of calls as text, DOT and Mermaid, of a job that runs and of one that has ended."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from rlmesh.cli.main import main
from rlmesh.errors import UsageError
from rlmesh.master.monitoring.graph import CallGraph
from rlmesh.master.monitoring.graph_drawing import drawn
from rlmesh.master.state.last_state import last_graph
from tests.master.launched import launch
from tests.master.test_graph import ppo, seen
from tests.own_time import HANG_S


def test_a_graph_is_drawn_as_dot() -> None:
    assert drawn(ppo(), "dot") == [
        "digraph calls {",
        "  node [shape=box];",
        '  "TRAINER" [label="TRAINER"];',
        '  "ACTOR" [label="ACTOR × 2", peripheries=2];',
        '  "ROLLOUT" [label="ROLLOUT × 2"];',
        '  "REWARD" [label="REWARD"];',
        '  "CRITIC" [label="CRITIC"];',
        '  "REFERENCE" [label="REFERENCE"];',
        '  "ROLLOUT" -> "REWARD" [label="score × 1"];',
        '  "TRAINER" -> "ACTOR" [label="forward × 2"];',
        '  "TRAINER" -> "ROLLOUT" [label="forward × 2"];',
        '  "CRITIC" -> "REFERENCE" [style=dotted, dir=none, label="share a device"];',
        "}",
    ]


def test_a_graph_is_drawn_as_mermaid() -> None:
    graph = ppo()
    graph.declare("TRAINER", "CRITIC")
    assert drawn(graph, "mermaid") == [
        "flowchart TD",
        '  r0["TRAINER"]',
        '  r1[["ACTOR × 2"]]',
        '  r2["ROLLOUT × 2"]',
        '  r3["REWARD"]',
        '  r4["CRITIC"]',
        '  r5["REFERENCE"]',
        '  r2 -->|"score × 1"| r3',
        '  r0 -->|"forward × 2"| r1',
        '  r0 -->|"forward × 2"| r2',
        "  r0 -.-> r4",
        '  r4 -.-|"share a device"| r5',
    ]


def test_text_tells_groups_and_shared_devices() -> None:
    lines = drawn(ppo(), "text")
    assert lines[0].startswith("ROLLOUT:0 → REWARD:0  score  1 calls, 200.0 ms each")
    assert lines[-2:] == ["ACTOR  2 members in one process group", "CRITIC and REFERENCE  share a device"]
    assert drawn(CallGraph(), "text") == ["no call was seen yet"]


def test_many_methods_and_odd_names_stay_readable() -> None:
    graph = CallGraph()
    graph.observe("A:0", [seen('B"\\:0', f"m{n}", calls=n + 1) for n in range(6)], 1.0)
    (edge,) = [line for line in drawn(graph, "dot") if "->" in line]
    assert edge == '  "A" -> "B\\"\\\\" [label="m5 × 6\\nm4 × 5\\nm3 × 4\\nm2 × 3\\nand 2 more"];'
    assert "&quot;" in "".join(drawn(graph, "mermaid"))


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_graphviz_reads_it() -> None:
    done = subprocess.run(["dot", "-Tsvg"], input="\n".join(drawn(ppo(), "dot")), capture_output=True, text=True)
    assert done.returncode == 0 and "TRAINER" in done.stdout, done.stderr


def status(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["status", *words])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_the_graph_of_a_job_while_it_runs_and_after(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with launch(tmp_path, "--sleep", "60") as job:
        job.wait_for("step 1")
        (run,) = map(str, (tmp_path / "runs").iterdir())
        deadline = time.monotonic() + HANG_S
        while "add ×" not in (told := status(capsys, run, "--graph=dot"))[1] and time.monotonic() < deadline:
            time.sleep(0.1)  # members tell of their calls once a second
        code, text = told
        assert code == 0 and text.startswith("digraph calls {\n"), text
        assert re.search(r'"TRAINER" -> "ADDER" \[label="add × \d+', text), text
        assert status(capsys, run, "--graph", "mermaid")[1].startswith("flowchart TD\n")
        job.interrupt()
        assert job.ended() == 130
    code, text = status(capsys, run, "--graph")
    assert code == 0 and re.search(r"  TRAINER:0 → ADDER:0-1  add  \d+ calls", text), text


def test_a_store_that_others_could_have_written_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be read from state\.db"):
        last_graph(tmp_path)
    (tmp_path / "state.db").write_bytes(b"no database" * 100)
    os.chmod(tmp_path / "state.db", 0o600)
    with pytest.raises(UsageError, match="not a database"):
        last_graph(tmp_path)
    os.chmod(tmp_path / "state.db", 0o622)
    with pytest.raises(UsageError, match="has mode 0622, so others can change it"):
        last_graph(tmp_path)
