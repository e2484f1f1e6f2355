"""What a test may leave behind: nothing. Snapshots of what the test process holds, and the difference of two.

Processes are found by a marker in their environment as well as by their parent, so that a daemon that was
forked twice or outlived its parent counts too. Sockets are found because the session's runtime directory is
its own, and segments of shared memory because its ``/dev/shm`` is, where it may mount one. Elsewhere they have no
owner, so they are laid to a test only while nobody outside of the session has any.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.own_time import HANG_S, Delays, Look, RunQueue, read_file

MARKER = "RLMESH_TEST_SESSION"
"""Environment variable that every process started by a test inherits; nested sessions add to it."""

SHM = Path("/dev/shm")

_CLONE_NEWNS = 0x00020000
_MS_REC, _MS_SLAVE = 1 << 14, 1 << 19

LASTING = frozenset({"process", "socket directory", "segment"})
"""Kinds that outlive the test process."""
KINDS = LASTING | {"thread", "ZeroMQ context", "descriptor"}


@dataclass(frozen=True)
class Leak:
    """Something that is there now. ``key`` tells it from everything else, ``text`` describes it."""

    kind: str
    key: object
    text: str


Snapshot = frozenset[tuple[str, object]]
"""Kinds and keys of all that the session holds at one moment."""


def own_shared_memory() -> bool:
    """Give the calling thread, and all that it starts, a ``/dev/shm`` of its own; False where that is not allowed.

    Sessions that run side by side then neither see nor count each other's segments.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    size = os.statvfs(SHM)
    if os.geteuid() != 0 or libc.unshare(_CLONE_NEWNS) != 0:
        return False
    options = f"mode=1777,size={size.f_blocks * size.f_frsize}".encode()
    here = libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None)
    mounted = libc.mount(b"rlmesh-tests", os.fsencode(SHM), b"tmpfs", 0, options)
    return bool(here == 0 and mounted == 0)


class LeakCheck:
    """Compares what a session holds before and after a test.

    Args:
        session: the value of ``MARKER`` in the environment of this session's processes.
        runtime_dir: the directory in which the session's socket directories are made.
        grace_s: clean-up may take so long after a test: processes that exit, threads that end.
        own_segments: nobody else has segments where this session has them.
    """

    def __init__(self, session: str, runtime_dir: Path, grace_s: float, *, own_segments: bool = False) -> None:
        self.grace_s = grace_s
        self._own_segments = own_segments
        self._session = session
        self._runtime_dir = runtime_dir

    def snapshot(self) -> Snapshot:
        return frozenset((leak.kind, leak.key) for leak in self._everything())

    def since(self, before: Snapshot, kinds: frozenset[str] = KINDS) -> list[Leak]:
        """What of ``kinds`` came after ``before`` and is still there after the grace. Time in which this process
        or a leaked one waits for a core does not count."""
        began, queue, looks = time.monotonic(), RunQueue(), list[Look]()
        pause_s, collected_at, collecting_s = 0.005, 0.0, 0.0
        # Tests leave none, so segments that were there before are somebody else's.
        others_seen = not self._own_segments and any(kind == "segment" for kind, _ in before)
        while True:
            leaks = [leak for leak in self._everything() if leak.kind in kinds and (leak.kind, leak.key) not in before]
            if not leaks:
                return []
            if not self._own_segments and any(leak.kind == "segment" for leak in leaks):
                others_seen = others_seen or self._others_have_segments()
            ending = [leak.key[0] for leak in leaks if leak.kind == "process" and isinstance(leak.key, tuple)]
            looks.append(queue.look([os.getpid(), *ending]))
            now = time.monotonic()
            over = now - began - min(Delays(looks).between(began, now), HANG_S) >= self.grace_s
            # A cycle may hold a socket or a file that nobody can reach any more. Collections take a tenth of the time.
            if over:
                gc.unfreeze()
            if over or now - collected_at >= 10 * collecting_s:
                gc.collect()
                collected_at = time.monotonic()
                collecting_s = collected_at - now
            if over:
                gc.freeze()
                held = self.snapshot()
                leaks = [leak for leak in leaks if (leak.kind, leak.key) in held]
                return [leak for leak in leaks if not (leak.kind == "segment" and others_seen)]
            time.sleep(pause_s)
            pause_s = min(0.1, pause_s * 2)

    def report(self, leaks: Iterable[Leak]) -> str:
        """What was left, one line for each thing."""
        lines = [f"  {leak.kind:<17} {leak.text}" for leak in leaks]
        return "\n".join([f"there after {self.grace_s:g} s of grace, and not before:", *lines])

    def kill(self, leaks: Iterable[Leak]) -> None:
        """End leaked processes, so that they do not disturb the tests that follow."""
        for leak in leaks:
            if leak.kind == "process" and isinstance(leak.key, tuple):
                try:
                    os.kill(leak.key[0], signal.SIGKILL)
                    os.waitpid(leak.key[0], 0)
                except (ProcessLookupError, ChildProcessError, PermissionError):
                    continue

    def _everything(self) -> list[Leak]:
        return [
            *threads(),
            *zmq_threads(),
            *processes(self._session),
            *descriptors(),
            *entries("socket directory", self._runtime_dir, ""),
            *entries("segment", SHM, "rlmesh-"),
        ]

    def _others_have_segments(self) -> bool:
        own = os.getpid()
        return any(pid != own and _holds_segments(pid) and not _is_marked(pid, self._session) for pid in _pids())


def threads() -> list[Leak]:
    """Python's threads, except those of libraries that are started once per process and never end."""
    return [
        Leak("thread", (thread.ident, thread.name), f"{thread.name!r}, now {_position(thread)}")
        for thread in threading.enumerate()
        if not _lives_for_ever(thread)
    ]


def zmq_threads() -> list[Leak]:
    """The threads of ZeroMQ contexts; each context must be ended by whoever made it."""
    if "zmq" not in sys.modules:
        return []
    found = []
    for task in os.listdir("/proc/self/task"):
        name = read_file(f"/proc/self/task/{task}/comm").decode(errors="replace").strip()
        if name.startswith("ZMQbg"):
            found.append(Leak("ZeroMQ context", task, f"its thread {name} (tid {task}) runs"))
    return found


_older: set[tuple[int, str, int]] = set()
"""Processes that began before the one that looks: its ID, and name and inode of their folders in /proc. A process that
gets the ID of one that ended has another inode."""


def processes(session: str) -> list[Leak]:
    """Children of this process, zombies included, and all other processes that carry the session's marker: only those
    that are younger than this one can be its children, or have inherited it."""
    me, tracker = os.getpid(), _resource_tracker_pid()
    own = _stat(me)
    began = own[3] if own is not None else 0
    found = []
    with os.scandir("/proc") as folders:
        there = [(me, entry.name, entry.inode()) for entry in folders if entry.name.isdigit()]
    for entry in there:
        pid = int(entry[1])
        if entry in _older or pid in (me, tracker):
            continue
        stat = _stat(pid)
        if stat is None:
            continue
        name, state, parent, start = stat
        if start < began:  # Most of the machine's: not to read them again takes a twentieth of the time.
            _older.add(entry)
            continue
        inherits = state != "Z" and _is_marked(pid, session) and not _is_ancestor(pid)
        if parent == me or inherits:
            command = _command(pid) or f"({name})"
            found.append(Leak("process", (pid, start), f"{pid} [{state}, child of {parent}] {command}"))
    return found


def descriptors() -> list[Leak]:
    """Open descriptors of this process."""
    allowed = {_resource_tracker_fd()}
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the one by which the directory was read
            continue
        if int(name) not in allowed and not _stays_open(target):
            found.append(Leak("descriptor", (name, target), f"{name} -> {target}"))
    return found


def entries(kind: str, directory: Path, prefix: str) -> list[Leak]:
    """Names in ``directory`` that begin with ``prefix``."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return [Leak(kind, name, str(directory / name)) for name in names if name.startswith(prefix)]


def _lives_for_ever(thread: threading.Thread) -> bool:
    # Native threads (of torch, of a C library) that ran Python code once; Python did not start them.
    if isinstance(thread, threading._DummyThread):
        return True
    # tqdm, and so datasets: one monitor per process.
    return f"{type(thread).__module__}.{type(thread).__qualname__}" == "tqdm._monitor.TMonitor"


def _stays_open(target: str) -> bool:
    # Opened once per process and kept: devices by their driver, fonts by matplotlib, and the scheduler's
    # statistics of the main thread (other threads must close theirs).
    if target.startswith("/dev/nvidia") or "/matplotlib/mpl-data/fonts/" in target:
        return True
    return target == f"/proc/{os.getpid()}/task/{os.getpid()}/schedstat"


def _position(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "ended"
    return f"in {frame.f_code.co_qualname} at {frame.f_code.co_filename}:{frame.f_lineno}"


def _resource_tracker_pid() -> int | None:
    """multiprocessing's tracker: one process and one pipe, started once and kept."""
    return _tracker("_pid")


def _resource_tracker_fd() -> int | None:
    return _tracker("_fd")


def _tracker(attribute: str) -> int | None:
    module = sys.modules.get("multiprocessing.resource_tracker")
    tracker: Callable[[], object] | object = getattr(module, "_resource_tracker", None)
    value = getattr(tracker, attribute, None)
    return value if isinstance(value, int) else None


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> tuple[str, str, int, int] | None:
    """Name, state, parent and start time of a process."""
    text = read_file(f"/proc/{pid}/stat").decode(errors="replace")
    if not text:
        return None
    name, _, rest = text[text.index("(") + 1 :].rpartition(") ")
    fields = rest.split()
    return name, fields[0], int(fields[1]), int(fields[19])


def _is_marked(pid: int, session: str) -> bool:
    return f"{MARKER}={session}".encode() in read_file(f"/proc/{pid}/environ")


def _is_ancestor(pid: int) -> bool:
    """Is the process above this one? A nested session inherits the marker of the one around it."""
    current = os.getpid()
    while current > 1:
        if current == pid:
            return True
        stat = _stat(current)
        if stat is None:
            return False
        current = stat[2]
    return False


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return " ".join(b" ".join(words).decode(errors="replace").split())[:200]


def _holds_segments(pid: int) -> bool:
    """Does the process map a segment of rlmesh's, or have one open?"""
    mark = f"{SHM}/rlmesh-"
    try:
        if mark in Path(f"/proc/{pid}/maps").read_text(errors="replace"):
            return True
        files = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for name in files:
        try:
            if os.readlink(f"/proc/{pid}/fd/{name}").startswith(mark):
                return True
        except OSError:
            continue
    return False
