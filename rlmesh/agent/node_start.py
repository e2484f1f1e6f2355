"""Starting a node on this machine: a driver or launcher starts the guardian, and the guardian the agent."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from rlmesh.agent.processes import ownership
from rlmesh.agent.protocol import AgentConfig, ExitReport, Leftover
from rlmesh.errors import LaunchError
from rlmesh.runtime.process import clock
from rlmesh.runtime.process.descriptors import await_readable
from rlmesh.runtime.process.forked import forget_in_children

__all__ = ["GuardianProcess", "decode_config", "encode_config", "guardian_command", "read_exit_report"]

AGENT_END_S = 10.0
"""Seconds that the agent of a killed guardian may take to end its node."""
EXEC_S = 0.05
"""More than the kernel needs between the two steps of an exec in which it closes files and sets the environment."""
CONFIG_LIMIT_BYTES = 1 << 20
"""The guardian reads at most this many bytes. It is a separate program, so it has the same constant again."""


def guardian_command(python: str = sys.executable) -> list[str]:
    """The guardian's command. It reads the configuration from standard input, which must then stay open."""
    return [python, "-I", "-S", str(Path(__file__).parent / "processes" / "guardian.py")]


def encode_config(config: AgentConfig) -> bytes:
    """Encode the configuration as one line of JSON. It has the job's key: for standard input only.

    Raises:
        LaunchError: the line is too long for a pipe.
    """
    line = json.dumps(dataclasses.asdict(config)).encode() + b"\n"
    if len(line) > CONFIG_LIMIT_BYTES:
        longest = max(dataclasses.asdict(config).items(), key=lambda item: len(json.dumps(item[1])))[0]
        raise LaunchError(
            f"the configuration of node {config.node_rank} has {len(line)} bytes, more than "
            f"{CONFIG_LIMIT_BYTES}: shorten {longest!r}"
        )
    return line


def decode_config(line: bytes) -> AgentConfig:
    """Decode a line of ``encode_config``; the error names fields of another version of rlmesh.

    Raises:
        LaunchError: the line is not a configuration of this version.
    """
    try:
        values: dict[str, Any] = json.loads(line)
        for name in ("preload", "import_roots", "python_flags"):
            values[name] = tuple(values.get(name, ()))
        return AgentConfig(**values)
    except (ValueError, TypeError, AttributeError) as error:
        raise LaunchError(
            f"no configuration of an agent came on standard input ({error}): is the same version of rlmesh "
            "installed where the job was submitted and here?"
        ) from None


def read_exit_report(line: bytes, node_rank: int) -> ExitReport:
    """Decode the guardian's last line. An empty or broken line means that the guardian was killed: then nothing is
    proven, and the report says so."""
    try:
        values: dict[str, Any] = json.loads(line)
        leftovers = tuple(Leftover(**item) for item in values["leftovers"])
        agent: dict[str, Any] = values["agent"] or {}
        leftovers += tuple(Leftover(**item) for item in agent.get("leftovers", ()))
        return ExitReport(
            node_rank=node_rank,
            processes_started=agent.get("processes_started", -1),
            leftovers=leftovers,
            agent_code=values["agent_code"],
            why=values["why"],
            cause=str(agent.get("cause", "")),
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        unproven = Leftover("unproven", f"the guardian of node {node_rank} ended without a report", False)
        return ExitReport(node_rank, -1, (unproven,), None, "the guardian died", guarded=False)


def _read_all(fd: int) -> bytes:
    """Read a dead guardian's output to its end, which its agent may hold open for some time while it starts."""
    data, deadline = b"", time.monotonic() + AGENT_END_S
    while await_readable([fd], deadline - time.monotonic()) and (read := os.read(fd, 1 << 16)):
        data += read
    return data


class GuardianProcess:
    """The guardian of one node as a child of this process. As a context manager it ends the node on exit.

    The node ends when this process ends or ``let_go()`` is called.
    """

    def __init__(self, config: AgentConfig, *, stderr: int | None = None) -> None:
        """Start the guardian. ``stderr`` is its standard error (default: this process's own).

        Raises:
            LaunchError: the guardian could not be started, or ended at once.
        """
        line = encode_config(config)
        env = dict(os.environ)
        clock.share_epoch(env)
        self.node_rank = config.node_rank
        self._mark = f"{config.job_id}/{config.node_rank}"
        self.agent_log = Path(config.run_dir) / "logs" / f"agent-{config.node_rank}.log"
        try:
            self._process = subprocess.Popen(
                guardian_command(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
                bufsize=0,
                env=env,
            )
        except OSError as error:
            raise LaunchError(f"the guardian of node {config.node_rank} could not be started: {error}") from error
        self._give(line)
        self._report: ExitReport | None = None
        forget_in_children(self)

    def _give(self, line: bytes) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError):  # this user has many pipes: new ones are small, and a guardian that is stopped blocks
            fcntl.fcntl(self._process.stdin, fcntl.F_SETPIPE_SZ, max(len(line), 65536))
        try:
            self._process.stdin.write(line)
        except BrokenPipeError:
            self._process.stdin.close()
            self._process.stdout.close()
            code = self._process.wait()
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            raise LaunchError(
                f"the guardian of node {self.node_rank} (pid {self.pid}) {how} before it had read its configuration"
            ) from None

    def forked(self) -> None:
        """Close the pipes in a forked child, which would keep them open: the guardian must notice the parent's end."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """A descriptor that becomes readable when the node has ended and its report has come."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def running(self) -> bool:
        return self._process.poll() is None

    def let_go(self) -> None:
        """Close the guardian's input: it ends the node within 5 s."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def terminate(self) -> None:
        """Ask the guardian to end the node with the agent's full grace."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill the guardian; its agent then ends the node."""
        self._process.kill()

    def wait(self, timeout_s: float) -> ExitReport:
        """Wait until the node has ended. If the guardian was killed, its agent ends the node within ``AGENT_END_S``,
        which is waited for too.

        Raises:
            TimeoutError: the node did not end in time. It goes on; see ``let_go``.
        """
        if self._report is None:
            assert self._process.stdout is not None
            try:
                # communicate() would close the pipe that is still open on both sides: wait first.
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                raise TimeoutError(
                    f"node {self.node_rank} (guardian pid {self.pid}) did not end within {timeout_s:g} s; "
                    f"see {self.agent_log}"
                ) from None
            with self._process.stdout as output:
                self._report = read_exit_report(_read_all(output.fileno()), self.node_rank)
            self.let_go()
            if not self._report.guarded:
                self._await_agent()
        return self._report

    def _await_agent(self) -> None:
        """Wait until no process of the node is left, so that nobody writes into its folders any more."""
        deadline = time.monotonic() + AGENT_END_S
        if not (processes := ownership.marked(self._mark)):
            time.sleep(EXEC_S)
            processes = ownership.marked(self._mark)
        for process in processes:
            if (fd := ownership.open_process(process)) is not None:
                await_readable([fd], deadline - time.monotonic())
                os.close(fd)

    def __enter__(self) -> GuardianProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.let_go()
        self.wait(15.0)
