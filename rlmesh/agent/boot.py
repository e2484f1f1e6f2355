"""Processes that the agent starts before its own heavy imports, so that all of them import at the same time."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from rlmesh.agent.processes.process import memory_input, start_process
from rlmesh.agent.protocol import AgentConfig

__all__ = ["Boot", "ZygoteStart", "boot", "start_master", "start_zygotes", "worker_environment"]

REQUEST_FD = 0
PRELOAD_FD = 3
"""Descriptor of the preloaded zygote's socket in the bare zygote; absent without a preload list."""


@dataclass(frozen=True, slots=True)
class ZygoteStart:
    """The bare zygote, started but not ready, and the sockets of the bare and of the preloaded zygote. ``preload`` is
    None without a preload list."""

    pid: int
    bare: socket.socket
    preload: socket.socket | None


@dataclass(frozen=True, slots=True)
class Boot:
    """The processes that were started, and the environment of workers. ``master`` is a process number."""

    env: Mapping[str, str]
    zygotes: ZygoteStart | None
    master: int | None


def boot(config: AgentConfig, line: bytes) -> Boot:
    """Start the zygotes and, on the first node, the master. ``line`` is the configuration as received.

    Raises:
        LaunchError: a program could not be started.
    """
    env = worker_environment(config)
    master = start_master(config, line) if config.start_master else None
    return Boot(env, start_zygotes(config, env), master)


def worker_environment(config: AgentConfig) -> dict[str, str]:
    """The environment that every worker of the job starts from."""
    env = {"OMP_NUM_THREADS": "1", **os.environ, **config.env}
    if env["OMP_NUM_THREADS"] == "1":
        env.setdefault("OPENBLAS_NUM_THREADS", "1")
        env.setdefault("MKL_NUM_THREADS", "1")
    return env


def start_master(config: AgentConfig, line: bytes) -> int:
    """Start the master, with the agent's configuration on its standard input, and return its process number.

    The master's log is ``logs/master.log``. The kernel kills the master when the calling thread ends.
    """
    argv = [sys.executable, "-P", "-u", "-m", "rlmesh.master.prime_master", str(os.getpid())]
    given = memory_input(line)
    try:
        return start_process(argv, os.environ, log_path=f"{config.run_dir}/logs/master.log", inherit={0: given})
    finally:
        os.close(given)


def start_zygotes(config: AgentConfig, env: Mapping[str, str]) -> ZygoteStart:
    """Start the bare zygote, which forks the preloaded one."""
    ours, theirs = socket.socketpair()
    inherit = {REQUEST_FD: theirs.fileno()}
    preload: socket.socket | None = None
    preload_theirs: socket.socket | None = None
    if config.preload:
        preload, preload_theirs = socket.socketpair()
        inherit[PRELOAD_FD] = preload_theirs.fileno()
    python = [sys.executable, *config.python_flags, "-P", "-u"]
    argv = [*python, "-m", "rlmesh.agent.processes.zygote", str(os.getpid()), json.dumps(config.preload)]
    try:
        pid = start_process(argv, env, inherit=inherit)
    finally:
        theirs.close()
        if preload_theirs is not None:
            preload_theirs.close()
    return ZygoteStart(pid, ours, preload)
