"""Nodes over the system's ``ssh``: one ``rlmesh launch`` per host, with what is secret on its standard input.

``render`` returns the commands as values that can be printed; ``run`` runs them. Everybody can read command lines, so a
host's variables, on one line, and then the job's key are written to the command's standard input. That input stays open
while this process lives: its end (a cut connection, a kill of this process) ends the node there. The line
``interrupt`` on it requests the end of the job, as Ctrl-C at the host would.
"""

from __future__ import annotations

import os
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO

from rlmesh.errors import LaunchError
from rlmesh.rendezvous.stop_signals import handling
from rlmesh.runtime.transport.inet import join_host_port
from rlmesh_launcher.hosts import RemoteHost

__all__ = ["LISTENS", "TOGETHER", "HostCommand", "reached_by", "render", "run"]

_UNKNOWN = "--rdzv-endpoint ENDPOINT"
"""Placeholder, in the commands of all hosts but the first, for the endpoint that the first one announces. The word
ENDPOINT alone may be in names of variables, such as HF_ENDPOINT."""
LISTENS = "listens at "
TOGETHER = "nodes are there"
"""Texts on the standard error of the head's ``launch`` that this module reads."""
HEAD_WAIT_S = 60.0
END_WAIT_S = 20.0
LOST_CONNECTION = 255
"""ssh's own exit code, also used when a signal killed the remote command."""
_SET_VARIABLES = (
    '_rlmesh_n=$(echo; echo .); _rlmesh_n=${_rlmesh_n%.}; IFS= read -r _rlmesh_e || exit 1; eval "$_rlmesh_e"; '
    'unset _rlmesh_n _rlmesh_e; exec "$@"'
)
"""A script for POSIX's sh. It reads the line `HostCommand.variables` from its input, not a byte more, and then executes
the command in its arguments. ``_rlmesh_n`` is a newline, which the line itself cannot contain."""
_QUIET = ("-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")


@dataclass(frozen=True, slots=True)
class HostCommand:
    """The command that starts one node: ``argv`` here, which runs ``remote`` there. That first reads ``variables``."""

    host: RemoteHost
    node_rank: int
    argv: tuple[str, ...]

    def at(self, endpoint: str) -> tuple[str, ...]:
        """The command with the head's endpoint."""
        *words, remote = self.argv
        return (*words, remote.replace(_UNKNOWN, f"--rdzv-endpoint {shlex.quote(endpoint)}", 1))

    @property
    def variables(self) -> bytes:
        """The host's variables as a line for its shell to evaluate; empty if there are none."""
        if not self.host.env:
            return b""
        words = (f"{name}={_value(value)}" for name, value in sorted(self.host.env.items()))
        return f"export {' '.join(words)}\n".encode("utf-8", "surrogateescape")

    def __str__(self) -> str:
        return shlex.join(self.argv)


def render(
    hosts: Sequence[RemoteHost], head_address: str, options: Sequence[str], script: Sequence[str], ssh: str = "ssh"
) -> tuple[HostCommand, ...]:
    """The commands for all hosts, in the order of their ranks.

    Args:
        head_address: address of the first host, for the others.
        options: options of ``rlmesh launch``, the same for all.
        script: the job's script and its arguments, for the first host.
    """
    commands = []
    for rank, host in enumerate(hosts):
        where = ["--rdzv-endpoint", join_host_port(head_address, 0)]
        words = [
            "-u", "-m", "rlmesh.cli.main", "launch", "--key-stdin", "--nnodes", str(len(hosts)), "--node-rank",
            str(rank), *(_UNKNOWN.split() if rank else where), *options, *([] if rank else script),
        ]  # fmt: skip
        python = f"{_path(host.python)} {shlex.join(words)}"
        if host.env:
            python = f"sh -c {shlex.quote(_SET_VARIABLES)} sh {python}"
        remote = f"cd {_path(host.directory)} && exec {python}"
        user = [] if not host.user else ["-l", host.user]
        argv = (ssh, *_QUIET, *user, *host.ssh_options, "--", host.name, remote)
        commands.append(HostCommand(host, rank, argv))
    return tuple(commands)


def _value(text: str) -> str:
    """Quote a value as a word of the shell on one line."""
    return '"$_rlmesh_n"'.join(shlex.quote(line) for line in text.split("\n"))


def _path(text: str) -> str:
    """Quote a path for the remote shell; ``~`` is the home there."""
    if text == "~" or text.startswith("~/"):
        return text[:2] + (shlex.quote(text[2:]) if text[2:] else "")
    return shlex.quote(text)


def reached_by(host: RemoteHost, ssh: str = "ssh") -> str:
    """The address at which other hosts reach one: from the file, else the one to which ssh connects.

    Raises:
        LaunchError: ssh failed to say it.
    """
    if host.address:
        return host.address
    try:
        asked = subprocess.run(
            [ssh, "-G", *host.ssh_options, "--", host.name], capture_output=True, text=True, timeout=10.0, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(
            f"ssh does not say how it connects to {host.name}: {error}; name an address = … there"
        ) from None
    found = [line.split(None, 1)[1] for line in asked.stdout.splitlines() if line.startswith("hostname ")]
    return found[0] if found else host.name


class _RemoteNode:
    """One running command."""

    def __init__(self, command: HostCommand, argv: Sequence[str], key: bytes) -> None:
        self.command = command
        self.name = command.host.name
        try:
            # In its own session: Ctrl-C is for this process, which passes it on through the pipe.
            self.process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            raise LaunchError(f"{argv[0]} cannot be run: {error}") from None
        self.write(command.variables + key.hex().encode() + b"\n")

    def write(self, data: bytes) -> None:
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(data)
            self.process.stdin.flush()
        except OSError:
            pass  # the command has ended, which its exit code shows

    def close_input(self) -> None:
        if self.process.stdin is not None:
            try:
                self.process.stdin.close()
            except OSError:
                pass

    def how_it_ended(self) -> str:
        code = self.process.returncode
        if code == LOST_CONNECTION:
            return "the connection was refused or lost, or its command was killed (ssh exit code 255)"
        return f"its command ended with exit code {code}"


def run(commands: Sequence[HostCommand], key: bytes, *, out: IO[str] | None = None, err: IO[str] | None = None) -> int:
    """Run the job and return its exit code, which is the first host's.

    The hosts' output is passed on; standard error of all hosts but the first is prefixed with their names. On the main
    thread SIGINT requests the end of the job, and a second one ends all hosts at once.

    Raises:
        LaunchError: a host ended before all nodes were there, or the connection to the first one was lost.
    """
    return _Run(commands, key, out or sys.stdout, err or sys.stderr).run()


class _Run:
    def __init__(self, commands: Sequence[HostCommand], key: bytes, out: IO[str], err: IO[str]) -> None:
        self._commands, self._key, self._out, self._err = commands, key, out, err
        self._nodes: list[_RemoteNode] = []
        self._selector = selectors.DefaultSelector()
        self._half: dict[int, bytes] = {}
        self._endpoint = ""
        self._together = False
        self._interrupts = 0
        self._sent_interrupts = 0
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._read, selectors.EVENT_READ)

    def run(self) -> int:
        with handling((signal.SIGINT, signal.SIGTERM), self._note_interrupt):
            try:
                self._start(self._commands[0], self._commands[0].argv)
                self._until(lambda: bool(self._endpoint), HEAD_WAIT_S, "the head did not say where it listens")
                for command in self._commands[1:]:
                    self._start(command, command.at(self._endpoint))
                self._until(lambda: False, None, "")
                return self._code()
            finally:
                self._end()

    def _start(self, command: HostCommand, argv: Sequence[str]) -> None:
        node = _RemoteNode(command, argv, self._key)
        self._nodes.append(node)
        for stream in (node.process.stdout, node.process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._half[stream.fileno()] = b""
            self._selector.register(stream, selectors.EVENT_READ, node)

    def _until(self, done: Callable[[], bool], within_s: float | None, late: str) -> None:
        """Pass output on until ``done`` or the head has ended."""
        deadline = None if within_s is None else time.monotonic() + within_s
        head = self._nodes[0]
        while not done():
            if head.process.poll() is not None:
                return
            if deadline is not None and time.monotonic() > deadline:
                raise LaunchError(f"{late} within {within_s:g} s on {head.name}")
            self._pump(0.2)
            self._pass_interrupts()
            if self._interrupts > 1:
                raise KeyboardInterrupt("stopped by Ctrl-C, twice: all hosts end")
            self._look_for_early_ends()

    def _look_for_early_ends(self) -> None:
        if self._together or self._interrupts:
            return
        for node in self._nodes[1:]:
            if node.process.poll() is not None:
                self._pump(0.1)
                raise LaunchError(
                    f"host {node.name} (node {node.command.node_rank}) is not part of the job: {node.how_it_ended()}. "
                    f"Its command: {node.command}"
                )

    def _pump(self, wait_s: float) -> None:
        for key, _ in self._selector.select(wait_s):
            if key.data is None:
                os.read(self._read, 4096)
                continue
            data = os.read(key.fd, 1 << 16)
            *lines, self._half[key.fd] = (self._half[key.fd] + data).split(b"\n")
            if not data:
                self._selector.unregister(key.fileobj)
                lines += [self._half.pop(key.fd)] if self._half[key.fd] else []
            for line in lines:
                self._pass_on(key.data, key.fileobj is key.data.process.stderr, line.decode("utf-8", "replace"))

    def _pass_on(self, node: _RemoteNode, is_error: bool, line: str) -> None:
        first = node is self._nodes[0]
        if first and is_error and line.startswith("rlmesh: "):
            if LISTENS in line:
                self._endpoint = line.rpartition(LISTENS)[2].strip()
            self._together = self._together or TOGETHER in line
        stream = self._err if is_error else self._out
        stream.write(f"{node.name}: {line}\n" if is_error and not first else f"{line}\n")
        stream.flush()

    def _pass_interrupts(self) -> None:
        if self._interrupts > self._sent_interrupts:
            self._sent_interrupts = self._interrupts
            self._nodes[0].write(b"interrupt\n")

    def _code(self) -> int:
        """Wait shortly for the other nodes, which the head has ended, and return the head's exit code."""
        head = self._nodes[0]
        deadline = time.monotonic() + END_WAIT_S
        while any(node.process.poll() is None for node in self._nodes) and time.monotonic() < deadline:
            self._pump(0.1)
        while len(self._selector.get_map()) > 1 and time.monotonic() < deadline:
            self._pump(0.1)
        code = int(head.process.returncode)
        if code == LOST_CONNECTION or code < 0:
            raise LaunchError(
                f"host {head.name}, which runs the script, is gone: {head.how_it_ended()}. The other hosts were let "
                f"go. Its command: {head.command}"
            )
        return code

    def _end(self) -> None:
        """End all nodes by closing their input, and kill ssh processes that are left."""
        for node in self._nodes:
            node.close_input()
        deadline = time.monotonic() + END_WAIT_S
        while any(node.process.poll() is None for node in self._nodes) and time.monotonic() < deadline:
            self._pump(0.05)
        for node in self._nodes:
            if node.process.poll() is None:
                self._err.write(f"rlmesh: {node.name} did not end within {END_WAIT_S:g} s; its ssh is killed\n")
                node.process.kill()
                node.process.wait()
            for stream in (node.process.stdout, node.process.stderr):
                if stream is not None:
                    stream.close()
        self._selector.close()
        for fd in (self._read, self._write):
            os.close(fd)

    def _note_interrupt(self, number: int) -> None:
        self._interrupts += 1
        os.write(self._write, b"x")
