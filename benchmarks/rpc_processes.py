"""Runs a program for a bounded time and ends all that descends from it, daemons too."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
END_LIMIT_S = 10.0


def own_descendants() -> None:
    """Make this process the parent of descendants whose own parents end, and let it end as for Ctrl-C if it is
    told to (SIGTERM)."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def end_with_parent() -> None:
    """Let the kernel kill this process when the one that started it ends, however it ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def run_bounded(
    command: Sequence[str], environment: Mapping[str, str], folder: str, limit_s: float, *, quiet: bool
) -> tuple[str, str]:
    """Standard output of a program that runs in ``folder``, and what went wrong: empty if nothing did."""
    log = subprocess.DEVNULL if quiet else None
    with subprocess.Popen(
        command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True
    ) as process:
        problem = ""
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            problem = f"not done after {limit_s:.0f} s"
            end_descendants()
            output, _ = process.communicate()
        except BaseException:
            end_descendants()
            raise
    if not problem and process.returncode != 0:
        problem = f"ended with code {process.returncode}"
    return output, problem


def end_descendants() -> None:
    """Kill all processes below this one and reap them.

    Raises:
        TimeoutError: some did not end.
    """
    deadline = time.monotonic() + END_LIMIT_S
    while left := _descendants(os.getpid()):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.02)
        _reap()
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {sorted(left)} did not end within {END_LIMIT_S:.0f} s of SIGKILL")


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _descendants(root: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _parent(entry)) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    found: set[int] = set()
    todo = [root]
    while todo:
        for pid in children.get(todo.pop(), ()):
            found.add(pid)
            todo.append(pid)
    return found


def _parent(entry: Path) -> int | None:
    try:
        # The name in parentheses may hold spaces.
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None
