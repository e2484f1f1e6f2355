"""Incidents: one file per failure, with everything that is needed to understand it later.

``<run_dir>/incidents/0001-REWARD-0.json`` has the first cause and its consequences, the affected members, signals,
memory, stacks of the living members, the last lines of all logs, the events before and after in order, and the job's
configuration; the ``.txt`` beside it has the same for people. Files are written and replaced whole: first
when the failure is noticed, again when more is known, and finally when the outcome is known.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlmesh import private_files
from rlmesh.job.masking import mask_texts
from rlmesh.job.status import FailureInfo
from rlmesh.observe.files.event_log import plain
from rlmesh.observe.views.safe_text import json_text, shown

__all__ = ["INCIDENTS_FOLDER", "Incident", "incident_files", "newest_incident", "read_incident"]

INCIDENTS_FOLDER = "incidents"
SHOWN_EVENTS = 60


@dataclass(slots=True)
class Incident:
    """One failure. Times are seconds since the epoch; members are named ``ROLE:rank``.

    Attributes:
        number: number of the incident in its run, from 1.
        job: name, id and run directory.
        failures: the first cause, then its consequences.
        earlier: earlier failures that were handled and are not connected with the first cause.
        touched: a sentence about the affected members.
        exits: how members' processes ended, with signal or code and peak memory.
        limits: bytes of memory that members asked for, and that their nodes have.
        stacks: the stacks of each living member.
        last_lines: the ends of the members' logs.
        steps: the step of each member.
        doing: what members do that their states do not show: busy and not answering, stopped by a signal, still running
            a call that was cancelled.
        events: entries of ``events.jsonl``, oldest first.
        outcome: empty while it is open.
        config: the job's description.
    """

    number: int
    job: dict[str, Any]
    opened_at: float
    failures: list[FailureInfo] = field(default_factory=list)
    earlier: list[str] = field(default_factory=list)
    touched: str = ""
    exits: dict[str, dict[str, Any]] = field(default_factory=dict)
    limits: dict[str, dict[str, int]] = field(default_factory=dict)
    stacks: dict[str, str] = field(default_factory=dict)
    last_lines: dict[str, list[str]] = field(default_factory=dict)
    steps: dict[str, int | None] = field(default_factory=dict)
    doing: dict[str, str] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    outcome: str = ""
    closed_at: float | None = None
    config: Any = None
    path: Path | None = None

    def plain(self) -> dict[str, Any]:
        """The incident as JSON values."""
        first = self.failures[0] if self.failures else None
        return {
            "incident": self.number,
            "job": self.job,
            "opened_at": self.opened_at,
            "closed_at": self.closed_at,
            "outcome": self.outcome or "open",
            "first_cause": _plain_failure(first) if first else None,
            "followed": [_plain_failure(failure) for failure in self.failures[1:]],
            "earlier": self.earlier,
            "touched": self.touched,
            "exits": self.exits,
            "memory_limits": self.limits,
            "steps": self.steps,
            "doing": self.doing,
            "stacks": self.stacks,
            "last_lines": self.last_lines,
            "events": self.events,
            "config": self.config,
        }

    def write(self, run_dir: Path) -> Path:
        """Write both files and return the JSON's path. The name never changes afterwards.

        Raises:
            OSError: the files cannot be written; older ones stay whole.
        """
        folder = run_dir / INCIDENTS_FOLDER
        private_files.make_folder(folder)
        if self.path is None:
            first = self.failures[0] if self.failures else None
            who = f"{first.role}-{first.rank}" if first and first.role is not None else "job"
            self.path = folder / f"{self.number:04d}-{re.sub(r'[^A-Za-z0-9_.-]', '-', who)}.json"
        content = mask_texts(self.plain())
        private_files.write_whole(self.path, json_text(content, indent=2) + "\n", durable=False)
        private_files.write_whole(self.path.with_suffix(".txt"), incident_text(content), durable=False)
        return self.path


def incident_files(run_dir: Path) -> list[Path]:
    """The incidents of a run, oldest first."""
    return private_files.files_in(run_dir / INCIDENTS_FOLDER, "[0-9]*.json")


def newest_incident(run_dir: Path) -> Path | None:
    """The text file of the last incident of a run."""
    files = incident_files(run_dir)
    return files[-1].with_suffix(".txt") if files else None


def next_number(run_dir: Path) -> int:
    """The number for the next incident of a run."""
    numbers = [int(path.name.partition("-")[0]) for path in incident_files(run_dir)]
    return max(numbers, default=0) + 1


def read_incident(path: Path) -> dict[str, Any]:
    """The content of an incident's JSON file."""
    content: dict[str, Any] = json.loads(private_files.read(path))
    return content


def incident_text(content: Mapping[str, Any]) -> str:
    """Format an incident for people."""
    job = content["job"]
    lines = [
        f"incident {content['incident']} of job {job.get('name')} ({job.get('id')})",
        f"noticed {_when(content['opened_at'])}; outcome: {content['outcome']}",
        "",
    ]
    first = content["first_cause"]
    lines += ["FIRST CAUSE", *_indented(first["message"] if first else "not known"), ""]
    if first and first.get("remote_traceback"):
        lines += ["TRACEBACK", *_indented(first["remote_traceback"]), ""]
    if content["touched"]:
        lines += ["WHOM IT TOUCHED", *_indented(content["touched"]), ""]
    if content["followed"]:
        lines += [
            "WHAT FOLLOWED",
            *_indented(failure["message"].splitlines()[0] for failure in content["followed"]),
            "",
        ]
    if content.get("earlier"):
        lines += ["EARLIER, AND DEALT WITH", *_indented(content["earlier"]), ""]
    if content.get("doing"):
        lines += ["MEMBERS", *_indented(f"{who}: {what}" for who, what in content["doing"].items()), ""]
    if content["exits"]:
        lines += ["PROCESSES", *_indented(_exit_lines(content)), ""]
    lines += ["EVENTS", *_indented(_event_lines(content["events"][-SHOWN_EVENTS:], content["opened_at"])), ""]
    for title, key in (("LAST LINES", "last_lines"), ("STACKS", "stacks")):
        for who, text in content[key].items():
            lines += [f"{title} OF {who}", *_indented(text), ""]
    lines += [f"configuration and all events: {Path(job.get('run_dir', '')) / 'job.json'}, events.jsonl"]
    return shown("\n".join(lines), lines=True) + "\n"


def _exit_lines(content: Mapping[str, Any]) -> Iterable[str]:
    for who, exit in content["exits"].items():
        limit = content["memory_limits"].get(who, {})
        asked, there = limit.get("asked_bytes", 0), limit.get("node_bytes", 0)
        memory = f", at most {_mib(exit['peak_rss_bytes'])}" if exit.get("peak_rss_bytes") else ""
        if memory and asked:
            memory += f" of the {_mib(asked)} that it asked for"
        if memory and there:
            memory += f" (its node has {_mib(there)})"
        yield f"{who} (pid {exit['pid']}) {exit['how']}{memory}"


def _event_lines(events: Sequence[Mapping[str, Any]], zero: float) -> Iterable[str]:
    for event in events:
        known = {"at", "event", "who"}
        rest = " ".join(f"{key}={_short(value)}" for key, value in event.items() if key not in known and value)
        yield f"{event['at'] - zero:+9.3f} s  {event['event']} {event.get('who', '')} {rest}".rstrip()


def _short(value: Any) -> str:
    if isinstance(value, dict):
        value = {key: item for key, item in value.items() if item not in (None, "", [], 0)}
        value.pop("last_log_lines", None)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = " ".join(text.split())
    return text if len(text) <= 160 else text[:157] + "…"


def _plain_failure(failure: FailureInfo) -> dict[str, Any]:
    content: dict[str, Any] = plain(failure)
    return content


def _indented(text: str | Iterable[str]) -> list[str]:
    lines = text.splitlines() if isinstance(text, str) else list(text)
    return ["  " + line for line in lines]


def _when(at: float) -> str:
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at))}.{int(at % 1 * 1000):03d}"


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
