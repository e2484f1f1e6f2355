"""Starting a process and describing its end: calls of the operating system, without an event loop."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlmesh import private_files
from rlmesh.agent.processes import ownership
from rlmesh.errors import LaunchError
from rlmesh.observe.files.append_file import ends_torn
from rlmesh.runtime.process import clock

__all__ = [
    "Ended",
    "Process",
    "become_member",
    "collect",
    "memory_input",
    "open_log",
    "start_process",
]

Process = ownership.Process

_PYTHON_CHANGES = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP)
"""Signals that Python or rlmesh handle or ignore: a new program starts with the system's defaults."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a process. ``exit_code`` or ``signal`` is set; ``at`` in seconds since the epoch."""

    pid: int
    exit_code: int | None
    signal: int | None
    peak_rss_bytes: int
    at: float

    def describe(self) -> str:
        if self.signal is None:
            return f"exited with code {self.exit_code}"
        try:
            return f"killed by {signal.Signals(self.signal).name}"
        except ValueError:
            return f"killed by signal {self.signal}"


def collect(pid: int) -> Ended | None:
    """Reap a child that has ended; None if it has not. Its process number is free from then on.

    Raises:
        ChildProcessError: it is not a child of this process, or was reaped before.
    """
    found, status, usage = os.wait4(pid, os.WNOHANG)
    if found == 0:
        return None
    code = os.waitstatus_to_exitcode(status)
    return Ended(
        pid=pid,
        exit_code=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        peak_rss_bytes=usage.ru_maxrss * 1024,
        at=clock.epoch(),
    )


def memory_input(data: bytes) -> int:
    """A descriptor from which a new process can read ``data`` of any size. The caller closes it."""
    fd = os.memfd_create("rlmesh-input", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def open_log(path: str) -> int:
    """Open a log file for appending and make its folder; several writers and a reader may have it open. A half line of
    an earlier writer gets its end."""
    torn = ends_torn(Path(path))
    fd = private_files.log_to(path)
    if torn:
        with suppress(OSError):  # the disk is full
            os.write(fd, b"\n")
    return fd


def start_process(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    log_path: str | None = None,
    inherit: Mapping[int, int] | None = None,
) -> int:
    """Start a program in its own session and return its process number.

    Uses ``posix_spawn``, so the caller may have threads. The child gets descriptors 0 to 2 and those in ``inherit``
    (number in the child → descriptor here). Its standard input is ``/dev/null`` unless ``inherit`` gives one; its
    output goes to ``log_path`` (None: this process's standard error).

    Raises:
        LaunchError: the program or its log cannot be opened.
    """
    fds = dict(inherit or {})
    opened = []
    try:
        if log_path is not None:
            opened.append(open_log(log_path))
        output = opened[0] if opened else 2
        actions: list[tuple[int, int, int]] = []
        if 0 not in fds:
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            fds[0] = opened[-1]
        # Two rounds, so that no source is overwritten before its use.
        floor = 1 + max([2, *fds, *fds.values(), output])
        moves = [
            (source, floor + n, target) for n, (target, source) in enumerate({**fds, 1: output, 2: output}.items())
        ]
        actions += [(os.POSIX_SPAWN_DUP2, source, middle) for source, middle, _ in moves]
        actions += [(os.POSIX_SPAWN_DUP2, middle, target) for _, middle, target in moves]
        closing = [(os.POSIX_SPAWN_CLOSE, middle) for _, middle, _ in moves]
        return os.posix_spawn(
            argv[0], list(argv), dict(env), file_actions=[*actions, *closing], setsid=True, setsigmask=(),
            setsigdef=[n for n in _PYTHON_CHANGES if n != signal.SIGTERM or not ownership.signals_are_shared()],
        )  # fmt: skip
    except OSError as error:
        raise LaunchError(f"{' '.join(argv)!r:.300} could not be started: {error}") from error
    finally:
        for fd in opened:
            os.close(fd)


def become_member(parent: int, name: str) -> bool:
    """Tie this process to its agent: it is killed when the agent ends, leads its own session, adopts its own
    orphans (so that they are attributed to it), and has ``name`` in ``/proc/<pid>/comm`` (15 bytes).

    Returns False if the agent is already gone.
    """
    ownership.prctl(ownership.PR_SET_PDEATHSIG, signal.SIGKILL)
    ownership.prctl(ownership.PR_SET_CHILD_SUBREAPER, 1)
    ownership.prctl(ownership.PR_SET_NAME, name.encode()[:15])
    if os.getsid(0) != os.getpid():
        os.setsid()
    return os.getppid() == parent
