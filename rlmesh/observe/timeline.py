"""A job as a trace that Perfetto and ``chrome://tracing`` open. Pure but for reading the run directory.

The format is the JSON of trace events (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU):
every member is a process of the trace. Its tracks are its life (start, set-up, serving), its steps, the calls that it
waits for, and what it serves (queued, running); arrows go from a call to where it ran. Times are µs since the job's
first event.

Where a call ran is computed from its caller's record: the time that is neither queue nor method is divided evenly
between the way there and the way back. So it needs no clocks that agree, and is off by half of that time at most.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlmesh import private_files
from rlmesh.job.status import MetricRecord
from rlmesh.observe.files.append_file import TIMELINE_FOLDER
from rlmesh.observe.files.event_log import read_events
from rlmesh.observe.files.metric_files import METRICS_FILE, read_records
from rlmesh.observe.time_use import STEP_TIME

__all__ = ["TIMELINE_FOLDER", "build_trace", "read_trace"]


LIFE, STEPS, CALLS, SERVES, QUEUES = 1, 2, 100, 200, 300
"""Numbers of the tracks of a member; calls, services and queues take as many as overlap."""
_TITLES = {LIFE: "life", STEPS: "steps", CALLS: "calls", SERVES: "serves", QUEUES: "queued"}
_SYNC_WORDS = ("weight", "sync", "broadcast")


@dataclass(slots=True)
class _Trace:
    zero_s: float
    events: list[dict[str, Any]] = field(default_factory=list)
    processes: dict[str, int] = field(default_factory=dict)
    lanes: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    flows: int = 0

    def process(self, member: str) -> int:
        return self.processes.setdefault(member, len(self.processes) + 1)

    def us(self, at_s: float) -> float:
        return round((at_s - self.zero_s) * 1e6, 3)

    def lane(self, member: str, base: int, start_us: float, end_us: float) -> int:
        """The first track of a kind on which nothing overlaps; slices must come by their start."""
        ends = self.lanes.setdefault((member, base), [])
        for number, end in enumerate(ends):
            if end <= start_us:
                ends[number] = end_us
                return base + number
        ends.append(end_us)
        return base + len(ends) - 1

    def slice(
        self, member: str, base: int, name: str, start_us: float, end_us: float, category: str, **args: Any
    ) -> int:
        """A span on a member's track; returns the track."""
        track = self.lane(member, base, start_us, end_us)
        self.events.append({
            "ph": "X", "name": name, "cat": category, "pid": self.process(member), "tid": track,
            "ts": start_us, "dur": round(end_us - start_us, 3), "args": args,
        })  # fmt: skip
        return track

    def instant(self, member: str, name: str, at_us: float, **args: Any) -> None:
        self.events.append({
            "ph": "i", "name": name, "cat": "restart", "pid": self.process(member), "tid": LIFE, "ts": at_us, "s": "g",
            "args": args,
        })  # fmt: skip

    def arrow(self, source: tuple[str, int, float], target: tuple[str, int, float], name: str) -> None:
        """From one member, track and time to another."""
        self.flows += 1
        for phase, (member, track, at_us) in (("s", source), ("f", target)):
            event = {"ph": phase, "name": name, "cat": "call", "id": self.flows, "pid": self.process(member),
                     "tid": track, "ts": at_us}  # fmt: skip
            self.events.append(event if phase == "s" else event | {"bp": "e"})

    def named(self) -> Iterator[dict[str, Any]]:
        """The names of processes and tracks."""
        tracks = sorted({(event["pid"], event["tid"]) for event in self.events})
        for member, pid in self.processes.items():
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": member}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        for pid, track in tracks:
            base = track if track < CALLS else track // 100 * 100
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": track, "args": {"name": _TITLES[base]}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": track, "args": {"sort_index": track}}


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One call from its caller's file. Times in seconds since the epoch, durations in seconds."""

    caller: str
    callee: str
    method: str
    start: float
    end: float
    answered: bool
    method_s: float
    queued_s: float
    sent_bytes: int
    received_bytes: int


def read_trace(run_dir: Path) -> dict[str, Any]:
    """The trace of a run, from what is in its directory: events and reports always, calls where they were noted."""
    return build_trace(
        list(read_events(run_dir)),
        list(read_records(run_dir / METRICS_FILE, replaced=True)),
        list(_read_calls(run_dir)),
    )


def build_trace(
    events: Iterable[Mapping[str, Any]], records: Iterable[MetricRecord], calls: Iterable[TracedCall]
) -> dict[str, Any]:
    """The whole trace, ready to be written as JSON."""
    events, records = sorted(events, key=lambda entry: float(entry["at"])), sorted(records, key=lambda r: r.at)
    calls = sorted(calls, key=lambda call: call.start)
    starts = [float(events[0]["at"])] if events else []
    starts += [calls[0].start] if calls else []
    starts += [record.at - record.metrics.get(STEP_TIME, 0.0) for record in records[:1]]
    trace = _Trace(min(starts, default=0.0))
    _draw_lives(trace, events)
    _draw_steps(trace, records)
    _draw_calls(trace, calls)
    trace.events.sort(key=lambda event: float(event["ts"]))
    return {"traceEvents": [*trace.named(), *trace.events], "displayTimeUnit": "ms"}


def _draw_lives(trace: _Trace, events: Iterable[Mapping[str, Any]]) -> None:
    """Start, set-up and serving of each process, and the moments of exits and restarts."""
    since: dict[str, tuple[str, float]] = {}
    last_us = 0.0
    for event in events:
        at_us, kind = trace.us(float(event["at"])), event["event"]
        last_us = max(last_us, at_us)
        if kind == "Spawn":
            for role, rank in event.get("members", ()):
                since[f"{role}:{rank}"] = ("start", at_us)
        who = event.get("who")
        if who is None:
            continue
        if kind in _LIFE or kind == "MemberExited":
            if who in since:
                name, start_us = since.pop(who)
                trace.slice(who, LIFE, name, start_us, at_us, "life")
            if kind in _LIFE:
                since[who] = (_LIFE[kind], at_us)
            else:
                exit = event.get("exit", {})
                trace.instant(who, f"{who} ended", at_us, signal=exit.get("signal"), code=exit.get("exit_code"))
        elif kind.startswith(("Restart", "AnnounceRestart")):
            trace.instant(who, f"{who} is started again", at_us)
    for who, (name, start_us) in since.items():
        trace.slice(who, LIFE, name, start_us, max(last_us, start_us), "life")


_LIFE = {"MemberBound": "set up", "MemberReady": "serving"}


def _draw_steps(trace: _Trace, records: Iterable[MetricRecord]) -> None:
    """Each report ends a step: as long as it says it took, or since the report before."""
    before: dict[str, float] = {}
    for record in records:
        who = f"{record.role}:{record.rank}"
        end_us = trace.us(record.at)
        start_us = trace.us(record.at - record.metrics[STEP_TIME]) if STEP_TIME in record.metrics else before.get(who)
        if start_us is not None:
            start_us = min(max(start_us, before.get(who, start_us)), end_us)
            values = {name: value if abs(value) < 1e300 else str(value) for name, value in record.metrics.items()}
            values = {name: value if value == value else "nan" for name, value in values.items()}
            trace.slice(who, STEPS, f"step {record.step}", start_us, end_us, "step", **values)
        before[who] = end_us


def _draw_calls(trace: _Trace, calls: Iterable[TracedCall]) -> None:
    served: list[tuple[float, float, float, TracedCall, int, float]] = []
    for call in calls:
        start_us, end_us = trace.us(call.start), max(trace.us(call.end), trace.us(call.start))
        category = "sync" if any(word in call.method.lower() for word in _SYNC_WORDS) else "call"
        track = trace.slice(
            call.caller, CALLS, f"{call.callee}.{call.method}", start_us, end_us, category, answered=call.answered,
            sent_bytes=call.sent_bytes, received_bytes=call.received_bytes,
        )  # fmt: skip
        if call.answered and end_us > start_us:  # a notification has no answer that would tell
            way_us = max(0.0, end_us - start_us - 1e6 * (call.method_s + call.queued_s)) / 2
            came_us = start_us + way_us
            began_us = min(came_us + 1e6 * call.queued_s, end_us)
            ended_us = min(began_us + 1e6 * call.method_s, end_us)
            served.append((round(came_us, 3), round(began_us, 3), round(ended_us, 3), call, track, start_us))
    for came_us, began_us, _, call, _, _ in sorted(served, key=lambda item: item[0]):
        if began_us - came_us >= 1.0:
            trace.slice(call.callee, QUEUES, f"{call.method} queued", came_us, began_us, "queue", caller=call.caller)
    for _, began_us, ended_us, call, track, start_us in sorted(served, key=lambda item: item[1]):
        lane = trace.slice(call.callee, SERVES, call.method, began_us, ended_us, "run", caller=call.caller)
        trace.arrow((call.caller, track, start_us), (call.callee, lane, began_us), call.method)


def _read_calls(run_dir: Path) -> Iterator[TracedCall]:
    for path in private_files.files_in(run_dir / TIMELINE_FOLDER, "*.jsonl"):
        role, _, rank = path.name.removesuffix(".jsonl").removesuffix(".old").rpartition("-")
        with os.fdopen(private_files.open_file(path, os.O_RDONLY), "rb") as file:
            for line in file:
                try:
                    flush = json.loads(line)
                    for item in flush["calls"]:
                        yield _call_of(f"{role}:{rank}", item, flush["offset_ns"])
                except (ValueError, TypeError, KeyError):
                    continue  # a torn line


def _call_of(caller: str, item: list[Any], offset_ns: int) -> TracedCall:
    callee, method, started, ended, answered, executed, queued, sent, received = item
    return TracedCall(
        caller, callee, method, (started + offset_ns) / 1e9, (ended + offset_ns) / 1e9, bool(answered),
        executed / 1e9, queued / 1e9, sent, received,
    )  # fmt: skip
