"""Reports on single calls, for people: `Waiting` at the caller, `Serving` at the callee, and the state of a process."""

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
    """A call without an answer.

    Attributes:
        name: the member that must answer, such as ``ACTOR:1``.
        method: the method that was called.
        since_s: seconds since the call was made.
        left_s: seconds until the call's deadline.
        peer: what is known about the connection to the member, and about its process.
        last_line: the last line of the member's log, if this process can read it.
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
    """A call that this process serves and has not ended.

    Attributes:
        method: member and method, such as ``ACTOR:1.update``.
        since_s: seconds since the method began, or, if it has not begun, since the call arrived.
        caller: the name of the calling process.
        runs: True if the method has begun.
        unawaited: why no caller waits for the answer; empty if one does.
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
    """The state of a process of this machine, as a sentence; empty if ``pid`` is 0."""
    if pid <= 0:
        return ""
    letter = state_letter(pid)
    if not letter:
        return f"process {pid} is gone"
    return f"process {pid} {_STATES.get(letter, 'is in state ' + letter)}"


def lives(pid: int) -> bool:
    """True if a process of this machine has not ended; False for 0."""
    return pid > 0 and state_letter(pid) not in ("", "Z", "X")


def state_letter(pid: int) -> str:
    """The kernel's one-letter state of a process of this machine; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
