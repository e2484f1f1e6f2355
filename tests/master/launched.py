"""A job in a process tree of its own, as a user starts it, and the tree's processes by name."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tests.own_time import HANG_S

ROOT = Path(__file__).resolve().parents[2]
TOY = Path(__file__).with_name("toy_job.py")


class Launched:
    """``argv`` runs in ``folder``; ``output`` collects what it writes, both streams together."""

    def __init__(self, argv: Sequence[str], folder: Path) -> None:
        env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}", "PYTHONUNBUFFERED": "1"}
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, *argv], cwd=folder, env=env, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.output = ""
        self._grown = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                with self._grown:
                    self.output += line
                    self._grown.notify_all()

    def wait_for(self, pattern: str, timeout_s: float = HANG_S) -> re.Match[str]:
        """The first match of ``pattern`` in the output."""
        with self._grown:
            found = self._grown.wait_for(lambda: re.search(pattern, self.output), timeout_s)
        assert found, f"{pattern!r} did not come within {timeout_s} s:\n{self.output}"
        return found

    def ended(self, timeout_s: float = HANG_S) -> int:
        """The exit code; all output has been read."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self._reader.join(HANG_S)
            raise AssertionError(f"it did not end within {timeout_s} s:\n{self.output}") from None
        self._reader.join(HANG_S)
        return code

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.ended()

    def pid_of(self, name: str) -> int:
        """A process below this one by what it is: guardian, agent, master."""
        for pid in descendants(self.process.pid):
            if name in command(pid):
                return pid
        raise AssertionError(f"no {name} below {self.process.pid}")

    def pids(self) -> dict[int, str]:
        return {pid: command(pid) for pid in descendants(self.process.pid)}

    def interrupt(self) -> None:
        os.kill(self.process.pid, signal.SIGINT)


def launch(folder: Path, *arguments: str) -> Launched:
    """The toy job under ``rlmesh launch``, with plain output; members that die do not come back."""
    command = ["-m", "rlmesh.cli.main", "launch", "--view", "plain", "--restart", "never", str(TOY), "--"]
    return Launched([*command, *arguments], folder)


def descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found, pending = [], [pid]
    while pending:
        children = parents.get(pending.pop(), [])
        found += children
        pending += children
    return found


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
