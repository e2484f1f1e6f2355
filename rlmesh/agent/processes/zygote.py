"""The zygote: a process that has imported what workers need, and becomes a worker by forking.

There are up to two, both children of the agent and both with a single thread:

* the *bare* zygote has imported rlmesh and nothing else. It serves roles that need none of the job's heavy
  libraries, and roles whose environment differs in variables that such libraries read at import.
* the *preloaded* zygote is forked from the bare one as soon as that is up, and imports the job's preload list
  (torch, transformers, …) while the bare one already forks workers.

A request is a pickled ``WorkerSpec``, which only the fork unpickles. The zygote forks twice, so that the worker's
parent is the agent: the intermediate process ends at once, and the agent, a subreaper, inherits the worker. The
worker waits for that, and ties itself to the agent.

The zygote refuses to fork, and the agent starts the worker by exec, if the zygote has a second thread (a lock that the
thread holds would stay locked in the fork) or an open ``/dev/nvidia*`` (a CUDA context does not survive a fork).
To avoid both, imports run with one thread for BLAS and OpenMP unless the user sets another number, and with no CUDA
device visible.

Frames on the socket: length (4 bytes, big-endian), then bytes; replies are JSON. The zygote's first frame
reports that it is ready.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rlmesh.agent.boot import PRELOAD_FD, REQUEST_FD
from rlmesh.agent.processes import ownership

__all__ = ["ForkRefused", "Ready", "main", "pack"]

logger = logging.getLogger(__name__)

BASE = (
    "rlmesh.agent.worker.worker", "rlmesh.builders.rl_builder", "rlmesh.job.workload",
    "rlmesh.runtime.serving.wait_report", "rlmesh.runtime.group", "rlmesh.runtime.transport.unix_transport",
    "cloudpickle",
)  # fmt: skip
"""Modules that every worker needs, and those of a script that submits a job and defines the classes of its roles. The
zygote imports them once, so that no worker does; some of them rlmesh otherwise imports only when they are used."""

REPARENT_WAIT_S = 10.0
_LENGTH = struct.Struct(">I")

_QUIET_IMPORTS = {
    "CUDA_VISIBLE_DEVICES": "",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""With these variables a library that asks for GPUs at import finds none, without CUDA, and pyarrow's allocator starts
no thread."""


class ForkRefused(Exception):
    """The process must not fork now; the reason."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A zygote's first frame.

    Attributes:
        pid: process number of the zygote.
        preload_pid: process number of the preloaded zygote that it forked, 0 if none.
        import_s: seconds that its imports took.
        failed: imports that failed, with their errors: workers will meet and report these errors again.
        refuses: the reason why it cannot fork, empty if it can.
    """

    pid: int
    preload_pid: int = 0
    import_s: float = 0.0
    failed: Mapping[str, str] | None = None
    refuses: str = ""


def pack(data: bytes) -> bytes:
    """Encode a frame."""
    return _LENGTH.pack(len(data)) + data


def main(argv: Sequence[str]) -> int:
    """Run ``zygote <agent pid> <preload list as JSON>``; serve until the socket ends."""
    agent, preload = int(argv[0]), json.loads(argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ownership.prctl(ownership.PR_SET_PDEATHSIG, signal.SIGKILL)
    ownership.prctl(ownership.PR_SET_NAME, b"rlmesh-zygote")
    if os.getppid() != agent:
        return 1
    began = time.monotonic()
    failed = import_all(BASE)
    preload_pid = 0
    if preload:
        pid = fork_twice(agent)
        if pid == 0:
            return _serve_preloaded(agent, preload)
        preload_pid = pid
        os.close(PRELOAD_FD)
    ready = Ready(os.getpid(), preload_pid, time.monotonic() - began, failed, why_not())
    return _serve(socket.socket(fileno=REQUEST_FD), agent, ready)


def _serve_preloaded(agent: int, preload: Sequence[str]) -> int:
    ownership.prctl(ownership.PR_SET_NAME, b"rlmesh-preload")
    os.dup2(PRELOAD_FD, REQUEST_FD)
    os.close(PRELOAD_FD)
    began = time.monotonic()
    before = {name: os.environ.get(name) for name in _QUIET_IMPORTS}
    os.environ.update(_QUIET_IMPORTS)
    failed = import_all(preload)
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    _forget_missing_gpus()
    ready = Ready(os.getpid(), 0, time.monotonic() - began, failed, why_not())
    return _serve(socket.socket(fileno=REQUEST_FD), agent, ready)


def _serve(sock: socket.socket, agent: int, ready: Ready) -> int:
    """Answer requests; return 0 when the agent is gone, and in a forked worker what the worker returns."""
    gc.collect()
    gc.freeze()  # a garbage collection in a worker would otherwise write to these objects' pages, and so copy them
    _send(sock, asdict(ready))
    while (payload := _receive(sock)) is not None:
        try:
            if reason := why_not():
                raise ForkRefused(reason)
            pid = fork_twice(agent)
        except (ForkRefused, OSError) as error:
            _send(sock, {"refused": str(error)})
            continue
        if pid == 0:
            sock.close()
            from rlmesh.agent.worker.worker import forked_main

            return forked_main(payload, agent)
        _send(sock, {"pid": pid})
    return 0


def import_all(names: Sequence[str]) -> dict[str, str]:
    """Import each ``module`` or ``module:name``; return the failed ones with their errors."""
    failed = {}
    gc.disable()  # The garbage of imports is small, and the collector takes up to a quarter of their time to find it.
    for item in names:
        module, _, name = item.partition(":")
        try:
            loaded = importlib.import_module(module)
            if name:
                getattr(loaded, name)
        except Exception as error:
            failed[item] = f"{type(error).__name__}: {error}"
            logger.warning(
                "preload of %s failed; workers that need it will report it:\n%s", item, traceback.format_exc()
            )
    gc.enable()
    return failed


def why_not() -> str:
    """The reason why this process must not fork; empty if it may."""
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        names = sorted(_thread_name(thread) for thread in threads)
        return f"it has {len(threads)} threads ({', '.join(names)})"
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith("/dev/nvidia"):
            return f"{target} is open: something that was preloaded uses CUDA"
    return ""


def _thread_name(thread: str) -> str:
    try:
        with open(f"/proc/self/task/{thread}/comm") as file:
            return file.read().strip()
    except OSError:
        return thread


def _forget_missing_gpus() -> None:
    """Clear caches in which libraries remember that they found no GPU; workers must look for themselves."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("accelerate", "torch", "transformers"):
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if "available" in attribute or attribute.startswith(("has_triton", "device_count")):
                clear = getattr(value, "cache_clear", None)
                if callable(clear):
                    clear()


def fork_twice(agent: int) -> int:
    """Fork a process whose parent will be ``agent``; return its process number, and 0 in that process.

    The new process returns once the agent is its parent, and is killed when the agent ends.

    Raises:
        OSError: no process could be created.
    """
    read, write = os.pipe2(os.O_CLOEXEC)
    middle = os.fork()
    if middle == 0:
        try:
            pid = os.fork()
            if pid == 0:
                os.close(read)
                os.close(write)
                _wait_for_parent(agent)
                ownership.prctl(ownership.PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != agent:
                    os._exit(1)
                return 0
            os.write(write, b"%d" % pid)
        except OSError as error:
            os.write(write, f"!{error}".encode())
        os._exit(0)
    os.close(write)
    os.waitpid(middle, 0)  # it does nothing but fork once
    answer = os.read(read, 4096)
    os.close(read)
    if not answer.isdigit():
        raise OSError(answer.decode(errors="replace").lstrip("!") or "the intermediate process was killed")
    return int(answer)


def _wait_for_parent(agent: int) -> None:
    """Wait until the intermediate process has ended; exit if the agent is gone by then."""
    deadline = time.monotonic() + REPARENT_WAIT_S
    while (parent := os.getppid()) != agent:
        try:
            fd = os.pidfd_open(parent)
        except ProcessLookupError:
            continue  # the parent ended just now
        if os.getppid() == parent:
            # The kernel reparents children before the descriptor reports the parent's end.
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            ended = poller.poll(int(max(0.0, deadline - time.monotonic()) * 1000))
            if not ended:
                os._exit(1)
        os.close(fd)
        if os.getppid() not in (parent, agent):
            os._exit(1)


def _send(sock: socket.socket, value: Mapping[str, object]) -> None:
    try:
        sock.sendall(pack(json.dumps(value).encode()))
    except BrokenPipeError:
        pass  # the agent is gone; the next read ends the zygote


def _receive(sock: socket.socket) -> bytes | None:
    head = _receive_exactly(sock, _LENGTH.size)
    return None if head is None else _receive_exactly(sock, _LENGTH.unpack(head)[0])


def _receive_exactly(sock: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        chunk = sock.recv(min(size - len(data), 1 << 20))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


if __name__ == "__main__":
    from rlmesh.agent.processes import zygote

    sys.exit(zygote.main(sys.argv[1:]))
