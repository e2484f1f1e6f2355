"""The Python stacks of a member, also of one that holds the interpreter's lock or waits in C.

A member that can answer returns its stacks itself. For one that cannot, ``faulthandler`` writes them into a separate
file on a signal, which needs neither the lock nor a running loop. Its agent sends the signal and reads the file.

The signal goes to one thread, that of the member's network loop, which continues to wait afterwards. No user thread
gets it, so that no system call of user code returns early (``poll`` and ``sleep`` do, in spite of SA_RESTART).
A stopped process gets no signal: it could not answer, and must not find one when it is resumed.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import linecache
import os
import platform
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from rlmesh import private_files
from rlmesh.agent.processes import ownership
from rlmesh.runtime.calling.peer_status import state_letter

__all__ = ["SIGNAL", "dump_stacks", "ignore", "listen", "own_stacks", "stacks_file", "take_signals"]

SIGNAL = signal.SIGRTMIN + 7
"""A signal that nobody else uses: SIGUSR1 and SIGUSR2 belong to users and to Slurm."""
WAIT_S = 2.0
STOPPED = "Tt"
_TGKILL = {"x86_64": 234, "aarch64": 131, "ppc64le": 250, "s390x": 241, "riscv64": 131}.get(platform.machine(), 234)
"""Number of the system call tgkill, for which older C libraries have no function."""
_QUIET_S = 0.05
_POLL_S = 0.01


def stacks_file(socket_dir: str, role: str, rank: int) -> Path:
    """The file for a member's stacks, in the folder that only its owner can enter."""
    return Path(socket_dir) / f"stacks-{role}-{rank}"


def listen(socket_dir: str, role: str, rank: int) -> None:
    """Write the stacks of all threads of this member when `SIGNAL` comes; nothing if the folder is full or gone."""
    try:
        fd = private_files.append_to(stacks_file(socket_dir, role, rank))
        faulthandler.register(SIGNAL, file=fd, all_threads=True, chain=False)
    except OSError:
        pass


def ignore() -> None:
    """Stop writing stacks in a forked child: the file belongs to its parent."""
    faulthandler.unregister(SIGNAL)


def take_signals(socket_dir: str, role: str, rank: int) -> None:
    """Announce the calling thread as the receiver of `SIGNAL`, in the file that the agent reads."""
    line = f"thread {threading.get_native_id()} main 0x{threading.main_thread().ident or 0:x}\n"
    try:
        fd = os.open(stacks_file(socket_dir, role, rank), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)
    except OSError:
        pass


def own_stacks() -> Callable[[], str]:
    """Take the stack of each thread of this process, and return a function that writes them as text.

    Taking them is cheap. Writing them reads source files, which can wait until more urgent work is done. The text has
    the format of ``faulthandler``, innermost call first, with the threads' names and source lines.
    """
    threads = {thread.ident: thread for thread in threading.enumerate()}
    stacks = [(ident, threads.get(ident), list(_calls(frame))) for ident, frame in sys._current_frames().items()]

    def text() -> str:
        return "\n".join(sorted("\n".join(_lines(*stack)) for stack in stacks))

    return text


def _calls(frame: FrameType) -> Iterator[tuple[str, int, str]]:
    for inner, line in traceback.walk_stack(frame):
        code = inner.f_code
        linecache.lazycache(code.co_filename, inner.f_globals)
        yield code.co_filename, line, code.co_name


def _lines(ident: int, thread: threading.Thread | None, calls: list[tuple[str, int, str]]) -> Iterator[str]:
    kind = "Main thread" if thread is threading.main_thread() else "Thread"
    name = thread.name if thread is not None else "not started by Python"
    yield f"{kind} 0x{ident:x} [{name}] (most recent call first):"
    for filename, line, function in calls:
        yield f'  File "{filename}", line {line} in {function}'
        linecache.checkcache(filename)
        source = linecache.getline(filename, line).strip()
        if source:
            yield f"    {source}"


async def dump_stacks(pid: int, path: Path, wait_s: float = WAIT_S) -> str:
    """Let a member write its stacks and return them; without stacks, return a sentence that says why."""
    process = ownership.read_process(pid)
    if process is None or not process.running:
        return "it has ended"
    if state_letter(pid) in STOPPED:
        return "it did not answer with its stacks: its process is stopped"
    thread, main = _listener(path)
    if not thread or not ownership.handles(pid, SIGNAL):
        return "it is starting or ending, and does not listen for the request"
    began_at = _size(path)
    if not _send_to_thread(pid, thread):
        return "it is ending, and does not listen for the request any more"
    deadline, size, changed_at = time.monotonic() + wait_s, began_at, time.monotonic()
    while time.monotonic() < deadline and (size == began_at or time.monotonic() - changed_at < _QUIET_S):
        await asyncio.sleep(_POLL_S)
        now = _size(path)
        if now != size:
            size, changed_at = now, time.monotonic()
    if size == began_at:
        return f"it did not answer within {wait_s:g} s: it waits in the kernel"
    return _named(_read_from(path, began_at), main)


def _listener(path: Path) -> tuple[int, str]:
    """The thread that takes the signal, and the identity of the main thread; 0 if not announced yet."""
    try:
        with open(path, "rb") as file:
            found = [line.split() for line in file.read().splitlines() if line.startswith(b"thread ")]
        return int(found[-1][1]), found[-1][3].decode()
    except (OSError, IndexError, ValueError):
        return 0, ""


def _send_to_thread(pid: int, thread: int) -> bool:
    """Send ``SIGNAL`` to one thread of a process; False if it is gone. No thread of another process can get it."""
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.syscall(_TGKILL, pid, thread, int(SIGNAL)) == 0)


def _named(text: str, main: str) -> str:
    """The stacks with the main thread named and first, and without the thread that took the signal."""
    parts = [part for part in re.split(r"\n(?=(?:Current thread|Thread) 0x)", text) if not part.startswith("Current ")]
    named = []
    for part in parts:
        ident = part.partition(" (")[0].removeprefix("Thread ")
        is_main = bool(main) and ident.startswith("0x") and int(ident, 16) == int(main, 16)
        named.append(f"Main thread{part.removeprefix('Thread')}" if is_main else part)
    return "\n".join(sorted(named, key=lambda part: not part.startswith("Main")))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read_from(path: Path, offset: int) -> str:
    with os.fdopen(private_files.open_file(path, os.O_RDONLY), "rb") as file:
        file.seek(offset)
        return file.read().decode("utf-8", "replace").rstrip()
