"""What is shown of members is what they do."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from rlmesh.driver.outcome import JobResult
from rlmesh.job.status import Serving
from rlmesh.master.monitoring.activity import Doings
from rlmesh.observe.files.incidents import incident_files, read_incident
from rlmesh.runtime.serving.activity_board import ASYNC, DEF, INLINE, Activity, Board, does_not_answer, look_at
from rlmesh.testing import LocalCluster
from tests.master import busy_job

A = ("A", 0, 0)


def test_a_board_tells_what_began_and_since_when(tmp_path: Path) -> None:
    board = Board(tmp_path / "doing")
    seen = look_at(tmp_path / "doing")
    assert seen is not None and (seen.pid, seen.method) == (os.getpid(), "") and seen.silent_s < 10.0
    now_ns = time.perf_counter_ns()
    board.words[DEF], board.words[DEF + 1] = now_ns - 7_000_000_000, board.number_of("A:0.hold()")
    board.words[ASYNC], board.words[ASYNC + 1] = now_ns, board.number_of("A:0.other()")
    seen = look_at(tmp_path / "doing")
    assert seen is not None and seen.method == "A:0.other()"
    board.words[ASYNC + 1] = 0
    board.words[INLINE], board.words[INLINE + 1] = now_ns, board.number_of("@control.pending()")
    seen = look_at(tmp_path / "doing")
    assert seen is not None and seen.method == "A:0.hold()" and 7.0 <= seen.since_s < 17.0
    board.words[DEF + 1] = 0
    seen = look_at(tmp_path / "doing")
    assert seen is not None and seen.method == "@control.pending()"
    assert board.number_of("A:0.hold()") == 1
    last = [board.number_of(f"A:0.m{number}()") for number in range(200)][-1]
    assert last == 60, "names that have no room share the last number"
    assert look_at(tmp_path / "none") is None
    (tmp_path / "short").write_bytes(b"torn")
    assert look_at(tmp_path / "short") is None


def test_what_ends_in_a_forked_child_runs_on_in_its_parent(tmp_path: Path) -> None:
    board = Board(tmp_path / "doing")
    board.words[DEF], board.words[DEF + 1] = time.perf_counter_ns(), board.number_of("A:0.fork()")
    if (child := os.fork()) == 0:
        board.words[DEF + 1] = 0
        board.number_of("A:0.child()")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    seen = look_at(tmp_path / "doing")
    assert seen is not None and seen.method == "A:0.fork()"
    assert b"child" not in (tmp_path / "doing").read_bytes()


@pytest.mark.parametrize(
    ("state", "seen", "text"),
    [
        ("S", Activity(7, 0.5, "A:0.f()", 100.0), ""),
        ("S", Activity(7, 5.0, "A:0.f()", 7.2), "busy in A:0.f() for 7 s, does not answer"),
        ("R", Activity(7, 5.0), "does not answer for 5 s"),
        ("T", Activity(7, 4.2, "A:0.f()", 9.0), "stopped for 4 s"),
        ("T", None, "stopped"),
        ("T", Activity(6, 100.0), "stopped"),  # of the process before
        ("S", Activity(6, 100.0, "A:0.f()", 9.0), ""),
        ("S", None, ""),
    ],
)
def test_why_a_process_does_not_answer(state: str, seen: Activity | None, text: str) -> None:
    assert does_not_answer(state, 7, seen) == text


def test_what_was_seen_is_shown_as_long_as_it_is_news() -> None:
    doings = Doings()
    doings.looked([A], {A: "busy in A:0.f() for 7 s, does not answer"}, 10.0)
    assert doings.of(A, 12.0) == "busy in A:0.f() for 9 s, does not answer"
    assert doings.of(("A", 0, 1), 12.0) == "", "the next incarnation does something else"
    assert doings.of(A, 30.0) == ""
    doings.looked([A], {}, 31.0)
    assert doings.of(A, 31.0) == ""
    doings.told("A:0", 0, (Serving("A:0.f", 4.0, "T:0", True, "its call was cancelled or timed out"),), 31.0)
    assert doings.of(A, 32.0) == "A:0.f() for T:0 runs for 5.0 s, although its call was cancelled or timed out"
    doings.told("A:0", 0, (), 33.0)
    assert doings.of(A, 33.0) == ""


def run(how: str, tmp_path: Path, hang_s: float) -> tuple[dict[str, Any], JobResult]:
    out = tmp_path / "seen.json"
    with LocalCluster(run_root=tmp_path):
        result = busy_job.build(how, out, hang_s).submit(f"busy-{how}")
    return json.loads(out.read_text()), result


@pytest.mark.slow
@pytest.mark.case("a08")
def test_a_member_that_holds_the_interpreter_is_shown_with_its_method(tmp_path: Path) -> None:
    seen, result = run("held", tmp_path, 8.0)
    for text in ("status", "ps", "pending"):
        assert re.search(r"busy in W:0\.hold\(\) for \d+ s, does not answer", seen[text]), seen[text]
    assert re.search(r"it is busy in W:0\.hold\(\) for \d+ s, does not answer", seen["late"])
    name, text = seen["lost"]
    assert name == "PeerLost" and re.search(r"W:0 \(pid \d+\) hangs: .*W:0\.hold\(\)", text)
    assert "killed by SIGKILL" not in text
    (record,) = result.status.restarts
    assert "W:0.hold()" in record.failure.message
    (incident,) = incident_files(result.run_dir)
    assert "busy in W:0.hold() for" in read_incident(incident)["doing"]["W:0"]


@pytest.mark.slow
@pytest.mark.case("a08")
def test_a_member_that_is_stopped_is_shown_so(tmp_path: Path) -> None:
    seen, result = run("stopped", tmp_path, 600.0)
    assert all(re.search(r"W:0.* stopped for \d+ s", seen[text]) for text in ("status", "ps"))
    assert "it is stopped for" in seen["late"] and seen["again"][1] == 0
    assert not result.status.restarts


@pytest.mark.slow
@pytest.mark.case("a04")
def test_what_runs_on_after_its_call_timed_out_is_shown_and_found(tmp_path: Path) -> None:
    seen, result = run("wedged", tmp_path, 8.0)
    words = r"W:0\.wedge\(\) for TRAINER:0 runs for \d+\.\d s, although its call was cancelled or timed out"
    assert all(re.search(words, seen[text]) for text in ("status", "ps", "pending")), seen
    assert seen["incarnation"] == 1
    (record,) = result.status.restarts
    assert "hangs: in W:0.wedge() for TRAINER:0" in record.failure.message
    assert re.search(words, read_incident(incident_files(result.run_dir)[0])["doing"]["W:0"])
