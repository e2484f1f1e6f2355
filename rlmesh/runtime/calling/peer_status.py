"""Whom a process waits for, and what is known about whoever must answer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits for a disk or a device",
    "T": "is stopped",
    "t": "is stopped by a debugger",
    "Z": "has ended",
    "X": "has ended",
}


@dataclass(frozen=True, slots=True)
class Waiting:
    """One call without an answer.

    Attributes:
        name: who must answer, such as ``ACTOR:1``.
        method: what it was asked.
        since_s: how long ago.
        left_s: until the call's deadline.
        peer: what is known about the connection and the process of whoever must answer.
        last_line: of its log, if this process can read it.
    """

    name: str
    method: str
    since_s: float
    left_s: float
    peer: str
    last_line: str = ""

    def __str__(self) -> str:
        known = f"{self.name}.{self.method}() for {self.since_s:.1f} s ({self.peer})"
        return f"{known}; its last line: {self.last_line}" if self.last_line else known


@dataclass(frozen=True, slots=True)
class Serving:
    """One call that this process has not ended.

    Attributes:
        method: of which member, such as ``ACTOR:1.update``.
        since_s: since it began, or, if it has not, since it came.
        caller: who made it.
        runs: whether it runs.
        unawaited: why nobody waits for its answer; empty if its caller does.
    """

    method: str
    since_s: float
    caller: str
    runs: bool
    unawaited: str = ""

    def __str__(self) -> str:
        doing = "runs" if self.runs else "is queued"
        but = f", although {self.unawaited}" if self.unawaited and self.runs else ""
        return f"{self.method}() for {self.caller} {doing} for {self.since_s:.1f} s{but}"


def process_state(pid: int) -> str:
    """What a process of this machine does, as a sentence; empty if ``pid`` is 0."""
    if pid <= 0:
        return ""
    letter = state_letter(pid)
    if not letter:
        return f"process {pid} is gone"
    return f"process {pid} {_STATES.get(letter, 'is in state ' + letter)}"


def lives(pid: int) -> bool:
    """Whether a process of this machine has not ended; not so for 0."""
    return pid > 0 and state_letter(pid) not in ("", "Z", "X")


def state_letter(pid: int) -> str:
    """What the kernel says that a process of this machine does, as one letter; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
