"""Processes, shared memory and files of a job's node: to find them, and to end them. Standard library only.

A process belongs to the process it descends from. The user of this module must be a *subreaper*: orphans and
double-forked daemons below it become its children instead of escaping to init, so no process gets away by
changing its session or its parent. A process is identified by its number *and* its start time and is
signalled through a descriptor, so a reused number is never hit.

:mod:`rlmesh.agent.processes.guardian` runs without site-packages and loads this file by its path: it may import
nothing else.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import select
import signal
import time

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36

NODE_MARK = "RLMESH_NODE"
"""Environment variable of every process of a node: ``<job_id>/<node_rank>``."""
GUARDIAN = "RLMESH_GUARDIAN"
"""Environment variable of the agent: the number of its guardian's process, which may be gone by the time the agent
looks."""
SHARED_SIGNALS = "RLMESH_SHARED_SIGNALS"
"""Environment variable; 1 where all processes of the job are signalled at once, as Slurm does. The launcher gets the
signal too, and decides what SIGTERM to one of them means."""
REMINDER = signal.SIGRTMAX - 3
"""Signal that follows SIGTERM when most of the grace is over. It is a different signal so that code which handles
SIGTERM itself gets that once, and has its whole grace."""
MEMBER_MARK = "RLMESH_MEMBER"
"""Environment variable of a worker and of its child processes: ``ROLE:rank:incarnation``."""


def signals_are_shared() -> bool:
    """True if all processes of the job are signalled at once; see ``SHARED_SIGNALS``."""
    return os.environ.get(SHARED_SIGNALS) == "1"


def handles(pid: int, number: int) -> bool:
    """True if a process has its own handler for a signal."""
    try:
        with open(f"/proc/{pid}/status") as file:
            caught = next((line.split()[1] for line in file if line.startswith("SigCgt:")), "0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    return bool(int(caught, 16) >> (number - 1) & 1)


def prctl(option: int, value: int | bytes) -> None:
    """Call ``prctl(2)``.

    Raises:
        OSError: the call failed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    argument = value if isinstance(value, bytes) else ctypes.c_ulong(value)
    zero = ctypes.c_ulong(0)
    if libc.prctl(option, argument, zero, zero, zero) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), f"prctl({option})")


class Process:
    """One line of ``/proc/<pid>/stat``; equal if number and start time (clock ticks since boot) are."""

    __slots__ = ("name", "parent", "pid", "running", "session", "start")

    def __init__(self, pid: int, parent: int, session: int, start: int, name: str, running: bool) -> None:
        self.pid = pid
        self.parent = parent
        self.session = session
        self.start = start
        self.name = name
        self.running = running

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Process) and (self.pid, self.start) == (other.pid, other.start)

    def __hash__(self) -> int:
        return hash((self.pid, self.start))

    def __repr__(self) -> str:
        return f"pid {self.pid} ({self.name})"


def read_process(pid: int) -> Process | None:
    """The process with this number, or None if it is gone or this user may not see it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # PermissionError: /proc with hidepid=1
        return None
    if not text:  # it ended while it was read
        return None
    name, _, rest = text[text.index(b"(") + 1 :].rpartition(b") ")
    fields = rest.split()
    # A leader that is a zombie while other threads live belongs to a running process.
    running = fields[0] not in (b"Z", b"X") or int(fields[17]) > 1
    parent, session, start = int(fields[1]), int(fields[3]), int(fields[19])
    return Process(pid, parent, session, start, name.decode("utf-8", "replace"), running)


def descendants(root: int) -> list[Process]:
    """All processes below ``root``, zombies included, parents before children."""
    below: dict[int, list[Process]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            process = read_process(int(entry))
            if process is not None:
                below.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    row = below.pop(root, [])
    while row:
        found += row
        row = [child for process in row for child in below.pop(process.pid, [])]
    return found


def stop_all(roots: set[int]) -> list[Process]:
    """Send SIGSTOP to these processes and all below them, as far as they descend from the calling process."""
    inside, stopped = set(roots), []
    for process in descendants(os.getpid()):  # parents come before their children
        if process.pid in roots or process.parent in inside:
            inside.add(process.pid)
            if process.running and send_signal(process, signal.SIGSTOP):
                stopped.append(process)
    return stopped


def open_process(process: Process) -> int | None:
    """A pidfd of exactly this process, or None if it is gone (its number may be in use again)."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if read_process(process.pid) != process:
        os.close(fd)
        return None
    return fd


def send_signal(process: Process, number: int) -> bool:
    """Signal exactly this process; False if it is gone or may not be signalled."""
    fd = open_process(process)
    if fd is None:
        return False
    try:
        signal.pidfd_send_signal(fd, number)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(fd)
    return True


def reap() -> dict[int, int]:
    """Reap every child that has ended: pid → wait status."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = status


def kill_descendants(wait_s: float, statuses: dict[int, int]) -> tuple[list[Process], list[Process]]:
    """Kill and reap all processes below the calling process, which is a subreaper; add wait statuses to ``statuses``.

    Repeats until ``/proc`` has none, since a process may have forked just before it was killed. Returns the processes
    that ended, and those that still run because they may not be signalled or are not gone after ``wait_s``.
    """
    deadline = time.monotonic() + wait_s
    ended: dict[Process, None] = {}
    immune: set[Process] = set()
    while True:
        running = [process for process in descendants(os.getpid()) if process.running]
        statuses.update(reap())
        if immune.issuperset(running) or time.monotonic() >= deadline:
            return [process for process in ended if process not in running], running
        ended.update(dict.fromkeys(running))
        immune |= _kill_and_wait(running, min(deadline, time.monotonic() + 0.5))


def _kill_and_wait(processes: list[Process], deadline: float) -> set[Process]:
    """Kill the processes and wait until they are gone or the deadline; return those that may not be signalled."""
    poller = select.poll()
    pending = set()
    immune = set()
    for process in processes:
        fd = open_process(process)
        if fd is None:
            continue
        try:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        except (ProcessLookupError, PermissionError) as error:
            if isinstance(error, PermissionError):
                immune.add(process)
            os.close(fd)
            continue
        poller.register(fd, select.POLLIN)
        pending.add(fd)
    while pending and (left := deadline - time.monotonic()) > 0:
        for fd, _ in poller.poll(int(left * 1000) + 1):
            poller.unregister(fd)
            pending.remove(fd)
            os.close(fd)
    for fd in pending:
        os.close(fd)
    return immune


def read_mark(pid: int, name: str) -> str:
    """An environment variable of a process at its exec; empty if unset or unreadable."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:
        return ""
    prefix = f"{name}=".encode()
    return next((item[len(prefix) :].decode("utf-8", "replace") for item in variables if item.startswith(prefix)), "")


def marked(mark: str) -> list[Process]:
    """Running processes, except this one, whose environment has the node's mark."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid() and read_mark(int(entry), NODE_MARK) == mark:
            process = read_process(int(entry))
            if process is not None and process.running:
                found.append(process)
    return found


def remove_shared_memory(job_id: str, node_rank: int, folder: str = "/dev/shm") -> list[tuple[str, bool]]:
    """Unlink this node's segments: (name, True if it is gone) of each.

    Removes all names that begin with ``rlmesh-<job_id>``, except those with the ``-n<rank>-`` of another node (several
    nodes of a test cluster share one machine).
    """
    prefix = f"rlmesh-{job_id}"
    removed = []
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    for name in names:
        node = re.match(r"-n(\d+)-", name[len(prefix) :])
        if not name.startswith(prefix) or (node is not None and int(node[1]) != node_rank):
            continue
        path = os.path.join(folder, name)
        try:
            if os.lstat(path).st_uid != os.geteuid():
                continue  # planted by another user, who may write there too: not a file of the job
            os.unlink(path)
            removed.append((name, True))
        except FileNotFoundError:
            continue
        except OSError:
            removed.append((name, False))
    return removed


def hold_folder(path: str) -> int | None:
    """Hold a shared lock on a folder. The last node of this machine that releases the socket folder removes it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return None
    return fd


def remove_folder(path: str, held: int | None) -> bool:
    """Remove the socket folder unless another node still holds it; False if it could not be removed."""
    if held is None:
        return not os.path.lexists(path)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(held)
    for folder, folders, files in os.walk(path, topdown=False):
        for name in files + [f for f in folders if os.path.islink(os.path.join(folder, f))]:
            try:
                os.unlink(os.path.join(folder, name))
            except OSError:
                pass
        try:
            os.rmdir(folder)
        except OSError:
            pass
    return not os.path.lexists(path)


def remove_job_file(path: str, socket_dir: str) -> None:
    """Remove the job file and its folder, which also has the nodes' socket folders, with the last node.

    The driver does this, but it may be gone. Nothing is removed while another node is left: a restarted master still
    needs the file.
    """
    folder, name = os.path.split(path)
    if not path or not socket_dir or os.path.dirname(socket_dir) != folder:
        return
    try:
        names = os.listdir(folder)
    except OSError:
        return
    # A driver that was killed while it wrote the file has left a draft of it.
    drafts = [each for each in names if each.startswith(f".{name}.")]
    if any(each not in (name, *drafts) for each in names):
        return
    files = [(os.unlink, os.path.join(folder, each)) for each in (*drafts, name)]
    for remove, what in (*files, (os.rmdir, folder)):
        try:
            remove(what)
        except OSError:
            pass  # not there, or other nodes are left
