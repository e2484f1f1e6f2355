"""What the tests of the agent need to know about processes: waits by descriptor, no polling, all bounded."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import rlmesh.agent.processes.guardian
from tests.own_time import HANG_S

GUARDIAN = [sys.executable, "-I", "-S", str(rlmesh.agent.processes.guardian.__file__)]

STANDIN = '''
"""Stands in for the agent: starts a child and a double-forked daemon, says who they are, waits."""
import json, os, signal, subprocess, sys, time

config = json.loads(sys.stdin.readline())
child = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        os.write(write, str(os.getpid()).encode())
        os.closerange(0, 3)
        os.execvp("sleep", ["sleep", "1000"])
    os._exit(0)
os.wait()
daemon = int(os.read(read, 20))
open("/dev/shm/rlmesh-" + config["job_id"] + "-x", "w").close()
open(os.path.join(config["socket_dir"], "s"), "w").close()
with open(config["tell"], "w") as fifo:
    json.dump({"agent": os.getpid(), "child": child.pid, "daemon": daemon, "guardian": os.getppid()}, fifo)
{then}
'''
"""``{then}`` is what the stand-in does once everything is up."""


class Fifo:
    """A named pipe by which a process under test tells the test something, once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def close(self) -> None:
        os.close(self._fd)

    def read_json(self, wait_s: float = HANG_S) -> Any:
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        text = b""
        deadline = time.monotonic() + wait_s
        while True:
            assert poller.poll(max(0, int((deadline - time.monotonic()) * 1000))), f"nothing came: {text!r}"
            chunk = os.read(self._fd, 65536)
            text += chunk
            if not chunk:
                os.close(self._fd)
                return json.loads(text)


def wait_gone(pids: Iterable[int], wait_s: float) -> list[int]:
    """Wait until none of these processes runs; returns those that still do."""
    poller = select.poll()
    open_fds: dict[int, int] = {}
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        open_fds[fd] = pid
        poller.register(fd, select.POLLIN)
    deadline = time.monotonic() + wait_s
    while open_fds and (left := deadline - time.monotonic()) > 0:
        for fd, _ in poller.poll(int(left * 1000) + 1):
            poller.unregister(fd)
            os.close(fd)
            del open_fds[fd]
    for fd in open_fds:
        os.close(fd)
    return list(open_fds.values())


def start_guardian(tmp_path: Path, job_id: str, then: str, **config: Any) -> tuple[subprocess.Popen[bytes], Fifo]:
    """A guardian with the stand-in for its agent."""
    command, line, fifo = guardian_run(tmp_path, job_id, then, **config)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    process.stdin.write(line)
    process.stdin.flush()
    return process, fifo


def guardian_run(tmp_path: Path, job_id: str, then: str, **config: Any) -> tuple[list[str], bytes, Fifo]:
    """Command, line for its standard input, and the pipe by which the stand-in says who is there."""
    script = tmp_path / "standin.py"
    script.write_text(STANDIN.replace("{then}", then))
    fifo = Fifo(tmp_path / "tell")
    (tmp_path / "sockets").mkdir(mode=0o700)
    line = {
        "job_id": job_id,
        "node_rank": 0,
        "socket_dir": str(tmp_path / "sockets"),
        "run_dir": str(tmp_path / "run"),
        "tell": str(fifo.path),
        "grace_s": 1.0,
        **config,
    }
    return [*GUARDIAN, sys.executable, str(script)], json.dumps(line).encode() + b"\n", fifo


def wait_until(condition: Callable[[], bool], wait_s: float = HANG_S) -> None:
    """For what has no descriptor: look until it is so."""
    deadline = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < deadline, "it did not become so in time"
        time.sleep(0.005)
