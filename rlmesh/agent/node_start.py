"""How a driver or a launcher starts a node on this machine: the guardian, which starts the agent."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from rlmesh.agent.protocol import AgentConfig, ExitReport, Leftover
from rlmesh.errors import LaunchError
from rlmesh.runtime.process import clock
from rlmesh.runtime.process.forked import forget_in_children

CONFIG_LIMIT_BYTES = 1 << 20
"""What the guardian reads at most; it is a program of its own, with a constant of its own."""

__all__ = ["GuardianProcess", "decode_config", "encode_config", "guardian_command", "read_exit_report"]


def guardian_command(python: str = sys.executable) -> list[str]:
    """The command that must get the configuration on its standard input, and that input kept open."""
    return [python, "-I", "-S", str(Path(__file__).parent / "processes" / "guardian.py")]


def encode_config(config: AgentConfig) -> bytes:
    """One line of JSON. It holds the job's key: for standard input only.

    Raises:
        LaunchError: it is too long for a pipe.
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
    """The inverse of ``encode_config``; fields of another version of rlmesh are an error that names them.

    Raises:
        LaunchError: the line is no configuration of this version.
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
    """The guardian's last line as a value. An empty or broken line means that the guardian was killed: then
    nothing is proven, and the report says so."""
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
        return ExitReport(node_rank, -1, (unproven,), None, "the guardian died")


class GuardianProcess:
    """The guardian of one node as a child of this process. As a context manager it ends the node at the end.

    The node lives no longer than this process or than this object's ``let_go()``.
    """

    def __init__(self, config: AgentConfig, *, stderr: int | None = None) -> None:
        """Start it. ``stderr`` is where the guardian itself complains (default: this process's own).

        Raises:
            LaunchError: it could not be started, or ended at once.
        """
        line = encode_config(config)
        env = dict(os.environ)
        clock.share_epoch(env)
        self.node_rank = config.node_rank
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
            assert self._process.stdin is not None
            self._process.stdin.write(line)
        except OSError as error:
            raise LaunchError(f"the guardian of node {config.node_rank} could not be started: {error}") from error
        self._report: ExitReport | None = None
        forget_in_children(self)

    def forked(self) -> None:
        """In a forked child: the guardian must notice the end of the parent, whose pipe a child would keep open."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """A descriptor that becomes readable when the node has ended (its report has come)."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def running(self) -> bool:
        return self._process.poll() is None

    def let_go(self) -> None:
        """Tell the guardian that the driver is done with it: it ends what still runs, within 5 s."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def terminate(self) -> None:
        """Ask it to end the node, giving the agent its grace."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill the guardian itself; its agent then ends the node."""
        self._process.kill()

    def wait(self, timeout_s: float) -> ExitReport:
        """Wait until the node has ended.

        Raises:
            TimeoutError: it did not end in time. Nothing is done about it; see ``let_go``.
        """
        if self._report is None:
            assert self._process.stdout is not None
            try:
                # With the pipe still open on both sides communicate() would close it: wait first.
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                raise TimeoutError(
                    f"node {self.node_rank} (guardian pid {self.pid}) did not end within {timeout_s:g} s; "
                    f"see {self.agent_log}"
                ) from None
            with self._process.stdout as output:
                self._report = read_exit_report(output.read(), self.node_rank)
            self.let_go()
        return self._report

    def __enter__(self) -> GuardianProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.let_go()
        self.wait(15.0)
