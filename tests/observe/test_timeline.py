"""Traces: valid by the trace-event format, right about what ran where, bounded on disk."""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rlmesh.agent.worker import call_reporter
from rlmesh.agent.worker.call_reporter import CallTrace, chosen
from rlmesh.observe.timeline import CALLS, LIFE, SERVES, TracedCall, build_trace, read_trace
from rlmesh.runtime.calling.call_stats import EndedCall
from tests.master.launched import TOY, Launched
from tests.observe.samples import STARTED_AT, record

PHASES = {"X": {"ts", "dur"}, "M": {"args"}, "i": {"ts", "s"}, "s": {"ts", "id"}, "f": {"ts", "id", "bp"}}


def check(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The trace is what the format says; returns its events."""
    json.loads(json.dumps(trace, allow_nan=False))
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = trace["traceEvents"]
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        assert event["ph"] in PHASES and PHASES[event["ph"]] <= set(event), event
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] != "M":
            assert math.isfinite(event["ts"]) and event["ts"] >= 0, event
            assert event["cat"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
    for spans in slices.values():
        spans.sort()
        assert all(before[1] <= after[0] + 1e-3 for before, after in pairwise(spans)), "slices of a track overlap"
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(slices) <= named
    assert {pid for pid, _ in slices} <= {e["pid"] for e in events if e["name"] == "process_name"}
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert set(starts) == set(ends) and len(starts) == sum(e["ph"] == "s" for e in events)
    for number, start in starts.items():
        end = ends[number]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"]) and start["ts"] <= end["ts"]
        for flow in (start, end):
            around = slices[flow["pid"], flow["tid"]]
            assert any(a <= flow["ts"] <= b for a, b in around), "an arrow that touches no slice"
    return events


def traced(start: float, end: float, callee: str = "B:0", method_s: float = 0.0, **values: Any) -> TracedCall:
    given: dict[str, Any] = {"answered": True, "queued_s": 0.0, "sent_bytes": 1, "received_bytes": 2, "method": "m"}
    return TracedCall("A:0", callee, start=start, end=end, method_s=method_s, **(given | values))


def test_a_call_and_where_it_ran() -> None:
    call = traced(STARTED_AT + 1.0, STARTED_AT + 1.010, method_s=0.006, queued_s=0.002)
    events = check(build_trace([{"at": STARTED_AT, "event": "Stage"}], [], [call]))
    (waits,) = [e for e in events if e["ph"] == "X" and e["tid"] == CALLS]
    (runs,) = [e for e in events if e["ph"] == "X" and e["tid"] == SERVES]
    (queue,) = [e for e in events if e["ph"] == "X" and e["cat"] == "queue"]
    assert (waits["name"], waits["ts"], round(waits["dur"])) == ("B:0.m", 1e6, 10_000)
    assert (round(queue["ts"]), round(queue["dur"])) == (1_001_000, 2000), "a millisecond there"
    assert (round(runs["ts"]), round(runs["dur"])) == (1_003_000, 6000), "and one back"
    assert len([e for e in events if e["ph"] == "s"]) == 1


times = st.floats(0, 50).map(lambda s: STARTED_AT + s)
some_calls = st.lists(
    st.builds(
        lambda at, took, part, queued, callee, answered: traced(
            at, at + took, callee, took * part, queued_s=took * queued, answered=answered
        ),
        times, st.floats(0, 2), st.floats(0, 1.2), st.floats(0, 0.5), st.sampled_from(["B:0", "B:1", "A:0"]),
        st.booleans(),
    ),
    max_size=30,
)  # fmt: skip


@given(some_calls, st.lists(st.floats(allow_nan=True), max_size=5))
def test_any_calls_make_a_valid_trace(calls: list[TracedCall], values: list[float]) -> None:
    records = [record(step, step_time_s=0.3, value=value) for step, value in enumerate(values)]
    events = check(build_trace([], records, calls))
    assert sum(e["ph"] == "X" and e["cat"] == "call" for e in events) == len(calls)


def test_a_timeline_shows_lives_and_restarts() -> None:
    events = [
        {"at": 10.0, "event": "Spawn", "members": [["A", 0]]},
        {"at": 10.1, "event": "MemberBound", "who": "A:0"},
        {"at": 10.4, "event": "MemberReady", "who": "A:0"},
        {"at": 12.0, "event": "MemberExited", "who": "A:0", "exit": {"signal": 9}},
        {"at": 12.1, "event": "Spawn", "members": [["A", 0]]},
        {"at": 12.2, "event": "MemberBound", "who": "A:0"},
        {"at": 13.0, "event": "MemberReady", "who": "A:0"},
        {"at": 20.0, "event": "Stage"},
    ]
    drawn = check(build_trace(events, [], []))
    lives = [(e["name"], round(e["ts"] / 1e5), round(e["dur"] / 1e5)) for e in drawn if e["ph"] == "X"]
    assert lives == [
        ("start", 0, 1), ("set up", 1, 3), ("serving", 4, 16), ("start", 21, 1), ("set up", 22, 8), ("serving", 30, 70),
    ]  # fmt: skip
    assert [e["args"]["signal"] for e in drawn if e["ph"] == "i"] == [9]
    assert {e["tid"] for e in drawn if e["ph"] == "X"} == {LIFE}


def ended(name: str, number: int, began_ns: int, ended_ns: int, executed_ns: int = 0) -> EndedCall:
    return (name, "m", number, began_ns, ended_ns, True, executed_ns, 0, 0, 0, 0, 0, None)


def test_of_many_calls_the_longest_and_a_sample_are_kept() -> None:
    calls = [ended("B:0", n, 0, 10_000 if n == 777 else n % 7) for n in range(5000)]
    kept = chosen(calls, 100)
    assert len(kept) <= 100 and 777 in [call[2] for call in kept]
    assert [call[2] for call in kept] == sorted(call[2] for call in kept)
    assert max(b - a for a, b in pairwise(call[2] for call in kept)) <= 250, "the sample is even"
    assert chosen(calls[:5], 100) == calls[:5]


def test_a_long_job_does_not_fill_the_disk(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(call_reporter, "FILE_BYTES", 20_000)
    trace = CallTrace(tmp_path, "A.b", 0)
    for round_number in range(100):
        began_ns = 9000 * round_number
        trace.add([ended("B:0", n, began_ns, began_ns + 8000, 3000) for n in range(50)])
        trace.add([ended("@master", 1, 0, 1)])
        trace.flush()
    trace.close()
    trace.add([ended("B:0", 1, 0, 1)])
    trace.flush()  # by the runtime's thread, which has not heard that the main thread has closed it
    assert not any("A.b-0" in link for link in open_files())
    files = sorted(path.name for path in (tmp_path / "timeline").iterdir())
    assert files == ["A.b-0.jsonl", "A.b-0.old.jsonl"]
    assert sum(path.stat().st_size for path in (tmp_path / "timeline").iterdir()) < 60_000
    with (tmp_path / "timeline" / "A.b-0.jsonl").open("ab") as file:
        file.write(b'{"offset_ns": 1, "calls": [["torn')
    events = check(read_trace(tmp_path))
    waits = [e for e in events if e["ph"] == "X" and e["cat"] == "call"]
    assert len(waits) > 300 and {e["name"] for e in waits} == {"B:0.m"}
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["A.b:0", "B:0"]


def open_files() -> list[str]:
    """What this process has open."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # The descriptor of the directory itself.
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return links


def test_the_timeline_of_a_real_job_shows_its_members_methods_and_steps(tmp_path: Path) -> None:
    options = ("--view", "plain", "--timeline", "--run-dir", "run")
    with Launched(["-m", "rlmesh.cli.main", "launch", *options, str(TOY)], tmp_path) as job:
        assert job.ended() == 0, job.output
    with Launched(["-m", "rlmesh.cli.main", "timeline", "run", "-o", "out.json"], tmp_path) as command:
        assert command.ended() == 0, command.output
        assert ", 1 steps of" in command.output, "the first report has no beginning: " + command.output
    assert sorted(os.listdir(tmp_path)) == ["out.json", "run"]
    events = check(json.loads((tmp_path / "out.json").read_text()))
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert set(names.values()) == {"TRAINER:0", "ADDER:0", "ADDER:1"}
    ran = {(names[e["pid"]], e["name"]) for e in events if e["ph"] == "X" and e["cat"] == "run"}
    assert ran >= {("ADDER:0", "add"), ("ADDER:1", "add"), ("ADDER:1", "rank"), ("ADDER:0", "sleep")}
    lives = {(names[e["pid"]], e["name"]) for e in events if e["ph"] == "X" and e["cat"] == "life"}
    assert lives >= {("ADDER:1", "start"), ("ADDER:1", "set up"), ("TRAINER:0", "serving")}
