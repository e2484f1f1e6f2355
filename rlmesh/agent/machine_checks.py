"""Checks of a machine before a job starts on it: facts are gathered, and pure functions judge them.

``rlmesh doctor`` prints the result. The nodes of a job send their facts to the head before they start.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlmesh.agent.processes.control_groups import own_group

__all__ = ["Facts", "MachineCheck", "gather", "judge"]

Verdict = Literal["ok", "warning", "failed"]

LEAST_PYTHON = (3, 11)
LEAST_FILES = 256
GOOD_FILES = 4096
LEAST_SHM_BYTES = 16 << 20
GOOD_SHM_BYTES = 1 << 30
SOCKET_PATH_BYTES = 60
"""A longer base path leaves too little of the 107 bytes of a socket's path."""
NAME_WAIT_S = 2.0
CLOCK_S = 5.0
"""Clocks of nodes may differ by this much before the order of their logs means nothing."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a machine. Sizes are bytes, ``at`` is its clock in seconds since the epoch.

    Attributes:
        files: soft and hard limit of open descriptors.
        shm: free and total bytes of /dev/shm; -1 where it cannot be used.
        resolves: the addresses to which the machine's own name resolves; None if it does not resolve in time.
        gpu_files: device files such as /dev/nvidia0 that this process may open, and device files that it may not.
        cgroup: this process's control group (v2) if it may make groups in it; else empty, with the reason in
            ``no_cgroup``.
    """

    hostname: str
    python: tuple[int, ...]
    files: tuple[int, int]
    shm: tuple[int, int]
    at: float
    cpus: int
    memory_bytes: int
    socket_base: str = ""
    base_writable: bool = True
    resolves: tuple[str, ...] | None = ()
    gpu_files: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    mask: str | None = None
    programs: tuple[tuple[str, str], ...] = ()
    loopback: bool = True
    cgroup: str = ""
    no_cgroup: str = ""
    pid_limit: int = 0


@dataclass(frozen=True, slots=True)
class MachineCheck:
    """The result of one check; ``advice`` says what to do if it is not ok."""

    name: str
    verdict: Verdict
    text: str
    advice: str = ""


def gather(*, names: bool = True) -> Facts:
    """Gather the facts of this machine; ``names``: also resolve its own name, which may take ``NAME_WAIT_S``."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    hostname = socket.gethostname()
    cgroup, no_cgroup = own_group()
    return Facts(
        hostname=hostname,
        python=tuple(map(int, platform.python_version_tuple()[:2])),
        files=resource.getrlimit(resource.RLIMIT_NOFILE),
        shm=_shm(),
        at=time.time(),
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        socket_base=base,
        base_writable=os.access(base, os.W_OK | os.X_OK),
        resolves=_resolved(hostname) if names else (),
        gpu_files=_gpu_files(),
        mask=os.environ.get("CUDA_VISIBLE_DEVICES"),
        programs=tuple((name, shutil.which(name) or "") for name in ("ssh", "srun", "sbatch")),
        loopback=_loopback_works(),
        cgroup=cgroup,
        no_cgroup=no_cgroup,
        pid_limit=resource.getrlimit(resource.RLIMIT_NPROC)[0],
    )


def _shm(folder: str = "/dev/shm") -> tuple[int, int]:
    try:
        found = os.statvfs(folder)
    except OSError:
        return (-1, -1)
    if not os.access(folder, os.W_OK | os.X_OK):
        return (-1, -1)
    return (found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)


def _resolved(name: str) -> tuple[str, ...] | None:
    """Resolve a name on a thread: a name server that does not answer must not block."""
    found: list[tuple[str, ...]] = []

    def ask() -> None:
        try:
            answer = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except OSError:
            return
        found.append(tuple(dict.fromkeys(str(where[0]) for *_, where in answer)))

    thread = threading.Thread(target=ask, name="rlmesh-resolve", daemon=True)
    thread.start()
    thread.join(NAME_WAIT_S)
    return found[0] if found else None


def _gpu_files() -> tuple[tuple[str, ...], tuple[str, ...]]:
    files = sorted(path for path in Path("/dev").glob("nvidia[0-9]*"))
    usable = tuple(str(path) for path in files if os.access(path, os.R_OK | os.W_OK))
    return usable, tuple(str(path) for path in files if str(path) not in usable)


def _loopback_works() -> bool:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), 1.0).close()
    except OSError:
        return False
    return True


def judge(facts: Facts) -> tuple[MachineCheck, ...]:
    """Check the facts of a machine. No I/O."""
    return tuple(rule(facts) for rule in _RULES)


def _python(facts: Facts) -> MachineCheck:
    text = ".".join(map(str, facts.python))
    if facts.python < LEAST_PYTHON:
        return MachineCheck("Python", "failed", text, "install Python 3.11 or newer")
    return MachineCheck("Python", "ok", text)


def _descriptors(facts: Facts) -> MachineCheck:
    soft, hard = facts.files
    text = f"{soft} open files (hard limit {hard})"
    limit = "" if hard < 0 or hard >= GOOD_FILES else " (the hard limit is too low: an administrator's to raise)"
    advice = f"raise it: ulimit -n {min(65536, hard) if hard > 0 else 65536}, or LimitNOFILE= of the service{limit}"
    if soft < LEAST_FILES:
        return MachineCheck("descriptors", "failed", text, advice)
    return MachineCheck("descriptors", "ok" if soft >= GOOD_FILES else "warning", text, advice)


def _shared_memory(facts: Facts) -> MachineCheck:
    free, total = facts.shm
    if free < 0:
        return MachineCheck("/dev/shm", "failed", "is missing or not writable", "mount a tmpfs there, with mode 1777")
    text = f"{_size(free)} free of {_size(total)}"
    advice = "make it larger (docker run --shm-size=8g; mount -o remount,size=50% /dev/shm) or remove what lies in it"
    if free < LEAST_SHM_BYTES:
        return MachineCheck("/dev/shm", "failed", text, advice)
    return MachineCheck("/dev/shm", "ok" if free >= GOOD_SHM_BYTES else "warning", text, advice)


def _sockets(facts: Facts) -> MachineCheck:
    advice = "set XDG_RUNTIME_DIR or TMPDIR to a writable folder with a short path"
    if not facts.base_writable:
        return MachineCheck("sockets", "failed", f"{facts.socket_base} cannot be written to", advice)
    if len(os.fsencode(facts.socket_base)) > SOCKET_PATH_BYTES:
        return MachineCheck("sockets", "warning", f"the path {facts.socket_base} is long; /tmp will be used", advice)
    return MachineCheck("sockets", "ok", f"in {facts.socket_base}")


def _ports(facts: Facts) -> MachineCheck:
    if not facts.loopback:
        return MachineCheck(
            "ports", "failed", "a connection to 127.0.0.1 fails", "bring loopback up: ip link set lo up"
        )
    return MachineCheck("ports", "ok", "the system chooses them; connections on loopback work")


def _name(facts: Facts) -> MachineCheck:
    if facts.resolves is None:
        return MachineCheck(
            "host name", "warning", f"{facts.hostname} does not resolve",
            "rlmesh does not need it, but other libraries may wait for it: add it to /etc/hosts",
        )  # fmt: skip
    addresses = ", ".join(facts.resolves)
    if facts.resolves and all(address.startswith("127.") or address == "::1" for address in facts.resolves):
        return MachineCheck(
            "host name", "ok", f"{facts.hostname} is {addresses} here",
            "in --rdzv-endpoint give an address that the other nodes reach",
        )  # fmt: skip
    return MachineCheck("host name", "ok", f"{facts.hostname} is {addresses}" if addresses else facts.hostname)


def _gpus(facts: Facts) -> MachineCheck:
    usable, closed = facts.gpu_files
    mask = "" if facts.mask is None else f", CUDA_VISIBLE_DEVICES={facts.mask}"
    if closed:
        return MachineCheck(
            "GPUs", "warning", f"{len(usable)} of {len(usable) + len(closed)} can be opened{mask}",
            f"let this user open {', '.join(closed)} (group video, or the container's device list)",
        )  # fmt: skip
    return MachineCheck("GPUs", "ok", f"{len(usable)} NVIDIA device files{mask}")


def _clock(facts: Facts) -> MachineCheck:
    if facts.at < 1.7e9:
        return MachineCheck(
            "clock", "failed", time.strftime("%Y-%m-%d", time.gmtime(facts.at)), "set it: timedatectl, chronyd"
        )
    return MachineCheck("clock", "ok", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(facts.at)))


def _launchers(facts: Facts) -> MachineCheck:
    found = [name for name, path in facts.programs if path]
    return MachineCheck("launchers", "ok", f"found: {', '.join(found) or 'none, so nodes are started by hand'}")


def _processes(facts: Facts) -> MachineCheck:
    text = "subreaper, parent-death signals" + (
        f", and a control group for each member below {facts.cgroup}"
        if facts.cgroup
        else f"; no control groups{f' ({facts.no_cgroup})' if facts.no_cgroup else ''}: what members leave behind is "
        "found by its descent"
    )
    if 0 < facts.pid_limit < 1024:
        return MachineCheck("processes", "warning", f"at most {facts.pid_limit}", "raise it: ulimit -u")
    return MachineCheck("processes", "ok", text)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


_RULES: tuple[Callable[[Facts], MachineCheck], ...] = (
    _python, _descriptors, _shared_memory, _sockets, _ports, _name, _gpus, _clock, _launchers, _processes
)  # fmt: skip
