"""The Python stacks of a member, also of one that holds the interpreter's lock or waits in C.

A member that can answer tells its stacks itself. For one that cannot, ``faulthandler`` writes them into a file of its
own when a signal comes, which needs neither the lock nor a running loop. Its agent sends the signal and reads the file.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from rlmesh import private_files
from rlmesh.agent import ownership

__all__ = ["SIGNAL", "dump_stacks", "ignore", "listen", "own_stacks", "stacks_file"]

SIGNAL = signal.SIGRTMIN + 7
"""One that nobody else uses: SIGUSR1 and SIGUSR2 belong to users and to Slurm."""
WAIT_S = 2.0
_QUIET_S = 0.05
_POLL_S = 0.01


def stacks_file(socket_dir: str, role: str, rank: int) -> Path:
    """Where a member's stacks are written, in the folder that only its owner can enter."""
    return Path(socket_dir) / f"stacks-{role}-{rank}"


def listen(socket_dir: str, role: str, rank: int) -> None:
    """In a member: write the stacks of all threads when `SIGNAL` comes. A folder that is full or gone only means that
    there will be none."""
    try:
        fd = private_files.append_to(stacks_file(socket_dir, role, rank))
        faulthandler.register(SIGNAL, file=fd, all_threads=True, chain=False)
    except OSError:
        pass


def ignore() -> None:
    """In a forked child: the file is its parent's."""
    faulthandler.unregister(SIGNAL)


def own_stacks() -> str:
    """What each thread of this process does, innermost call first, as ``faulthandler`` writes it; with the names of
    the threads and their lines."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        thread = threads.get(ident)
        kind = "Main thread" if thread is threading.main_thread() else "Thread"
        name = thread.name if thread is not None else "not started by Python"
        lines = [f"{kind} 0x{ident:x} [{name}] (most recent call first):"]
        for call in reversed(traceback.extract_stack(frame)):
            lines.append(f'  File "{call.filename}", line {call.lineno} in {call.name}')
            lines += [f"    {call.line}"] if call.line else []
        parts.append("\n".join(lines))
    return "\n".join(sorted(parts))


def catches(pid: int) -> bool:
    """Whether a process handles `SIGNAL`; one that does not, yet or any more, would be killed by it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    mask = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(mask, 16) >> (int(SIGNAL) - 1) & 1)


async def dump_stacks(pid: int, path: Path, wait_s: float = WAIT_S) -> str:
    """Have a member write its stacks, and give them; else a sentence that says why there are none."""
    process = ownership.read_process(pid)
    if process is None or not process.running:
        return "it has ended"
    if not catches(pid):
        return "it is starting or ending, and does not listen for the request"
    began_at = _size(path)
    if not ownership.send_signal(process, SIGNAL):
        return "it has ended"
    deadline, size, changed_at = time.monotonic() + wait_s, began_at, time.monotonic()
    while time.monotonic() < deadline and (size == began_at or time.monotonic() - changed_at < _QUIET_S):
        await asyncio.sleep(_POLL_S)
        now = _size(path)
        if now != size:
            size, changed_at = now, time.monotonic()
    if size == began_at:
        return f"it did not answer within {wait_s:g} s: it is stopped, or waits in the kernel"
    return _read_from(path, began_at)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read_from(path: Path, offset: int) -> str:
    with os.fdopen(private_files.open_file(path, os.O_RDONLY), "rb") as file:
        file.seek(offset)
        return file.read().decode("utf-8", "replace").rstrip()
