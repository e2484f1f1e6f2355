"""`Sandbox`: runs untrusted Python programs in isolated processes.

The kernel isolates a program (Linux 5.14 or newer, x86-64 or ARM64): namespaces of its own for users, processes,
mounts, network, IPC and host name; a file system of read-only system folders and one empty folder; no privileges; a
filter of system calls; limits for CPU time, memory, processes, files and output. The program sees neither the
environment nor the files of the process that starts it. docs/rewards.md says what the isolation protects from, and what
it does not.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rlmesh.drafts import scratch_folder
from rlmesh.errors import UsageError
from rlmesh.rl.rewards import sandbox_child

__all__ = ["Limits", "Ran", "Sandbox"]

START_S, SLACK_S = 30.0, 10.0
"""Seconds that the sandbox itself may take: to start, and for the start and end of a program on a busy machine."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/nix/store")
NO_ISOLATION = (
    "{reason}. Programs cannot be isolated here, so none was run. Allow unprivileged user namespaces on this machine "
    "(sysctl user.max_user_namespaces and kernel.apparmor_restrict_unprivileged_userns; in a container, its seccomp "
    "profile), or set isolated=False: then programs can reach the network and all files of this user"
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a program.

    Attributes:
        cpu_s: CPU time of each process, in whole seconds.
        memory_bytes: address space of each process; if isolated, also the memory that all processes hold together.
        folder_bytes: size of each file; if isolated, also of all files in the program's folder, which is in memory.
        output_bytes: standard output, standard error and answer together.
        processes: processes and threads; unlimited without isolation.
    """

    cpu_s: int = 4
    memory_bytes: int = 512 * 2**20
    folder_bytes: int = 16 * 2**20
    output_bytes: int = 2**20
    processes: int = 32

    def __post_init__(self) -> None:
        small = [name for name in ("cpu_s", "folder_bytes", "output_bytes", "processes") if getattr(self, name) < 1]
        if small or self.memory_bytes < 64 * 2**20:
            raise UsageError(f"{self}: each limit must be ≥ 1, and memory_bytes ≥ 64 MiB")


@dataclass(frozen=True, slots=True)
class Ran:
    """How a program ended.

    Attributes:
        status: ``ok``; ``error``: its exit code is not 0; or the limit that it broke.
        stdout: standard output.
        stderr: the last 4,000 characters of standard error.
        answer: with `Sandbox.call` the function's value; with `Sandbox.test` True if the tests passed.
        code: exit code, negative for a signal.
    """

    status: Literal["ok", "error", "timeout", "memory", "output"]
    stdout: str
    stderr: str
    answer: Any
    code: int


class Sandbox(AbstractContextManager["Sandbox"]):
    """A sandbox, in which programs run one after the other. Each finds an empty folder and leaves no process.

    ::

        with Sandbox() as sandbox:
            assert sandbox.run("print(int(input()) * 2)", stdin="21").stdout == "42\\n"
            assert sandbox.call("def twice(x): return 2 * x", "twice", [21]).answer == 42

    Args:
        limits: of each program.
        isolated: False runs programs with limits but without isolation, where the kernel does not allow it.
        paths: folders of modules that programs may import, besides the standard library.

    Raises:
        UsageError: the kernel does not allow isolation; the message says what to do.
        RuntimeError: the interpreter does not start.
    """

    def __init__(
        self, limits: Limits | None = None, *, isolated: bool = True, paths: Sequence[str | Path] = ()
    ) -> None:
        self.limits = limits or Limits()
        given = [str(Path(path).resolve()) for path in paths]
        if absent := [path for path in given if not Path(path).is_dir()]:
            raise UsageError(f"there is no folder {', '.join(absent)}")
        if isolated and (reason := _unsupported()):
            raise UsageError(NO_ISOLATION.format(reason=reason))
        modules = {path: f"/modules/{number}" for number, path in enumerate(given)}
        self._folder = None if isolated else scratch_folder("rlmesh-sandbox")
        settings = {
            "isolated": isolated,
            "parent": os.getpid(),
            "visible": _visible(modules) if isolated else {},
            "paths": list(modules.values()) if isolated else given,
            "folder": self._folder,
            "memory_bytes": self.limits.memory_bytes,
            "folder_bytes": self.limits.folder_bytes,
            "output_bytes": self.limits.output_bytes,
            "processes": self.limits.processes,
        }
        # Some Python installations, such as those of clusters, find their shared libraries by LD_LIBRARY_PATH only.
        libraries = {name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-X", "utf8", sandbox_child.__file__, json.dumps(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/", start_new_session=True,
            env={"PATH": os.defpath, "LANG": "C.UTF-8"} | libraries, bufsize=0,
        )  # fmt: skip
        self._read = b""
        try:
            if isolated:
                self._said(START_S)
                _map_users(self._process.pid)
                self._say(True)
            self._said(START_S)
        except (OSError, UsageError) as error:
            self._process.kill()
            assert self._process.stderr is not None
            trace = self._process.stderr.read().decode("utf-8", "replace").strip()
            self.close()
            if isolated and not trace:
                raise UsageError(NO_ISOLATION.format(reason=error)) from error
            raise RuntimeError(f"the sandbox failed to start: {error}. {trace[-1000:]}") from error

    def run(self, source: str, *, stdin: str = "", wall_s: float = 10.0) -> Ran:
        """Run a program with this standard input.

        Args:
            source: Python code.
            stdin: text.
            wall_s: seconds after which it is killed, with all processes that it started.

        Raises:
            RuntimeError: the sandbox itself failed, not the program.
        """
        return self._run(source, stdin, wall_s, None)

    def call(self, source: str, function: str, arguments: Sequence[Any], *, wall_s: float = 10.0) -> Ran:
        """Run a program, then call one of its functions, or a method of its class ``Solution``.

        Args:
            source: Python code.
            function: the name.
            arguments: values that JSON can express.
            wall_s: see `run`.
        """
        return self._run(source, "", wall_s, {"call": function, "arguments": list(arguments)})

    def test(self, source: str, tests: str, *, wall_s: float = 10.0) -> Ran:
        """Run a program, then code that tests it, such as ``assert`` statements, among its names.

        The tests run in the program's process, so a malicious program can deceive them. To prevent this, compare its
        output (`run`) or return values (`call`) in this process.
        """
        secret = secrets.token_hex(16)
        ran = self._run(source, "", wall_s, {"tests": tests, "secret": secret})
        return replace(ran, answer=ran.answer == secret)

    def close(self) -> None:
        """End the sandbox with all that runs in it. May be called twice."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, source: str, stdin: str, wall_s: float, ask: dict[str, Any] | None) -> Ran:
        case = {"source": source, "stdin": stdin, "cpu_s": self.limits.cpu_s, "wall_s": wall_s}
        deadline = time.monotonic() + wall_s + SLACK_S
        try:
            self._say(case)
            found = self._said(wall_s + SLACK_S)
            if "loaded" in found:
                self._say(ask)
                found = self._said(deadline - time.monotonic())
        except (OSError, UsageError) as error:
            self.close()
            raise RuntimeError(f"the sandbox failed: {error}") from error
        answer: Any = None
        if ask is not None and found["status"] == "ok":
            try:
                answer = json.loads(found["answer"])
            except (ValueError, RecursionError):
                found |= {"status": "error", "stderr": f"{found['stderr']}\nthe program ended before its test"}
        return Ran(found["status"], found["stdout"], found["stderr"].strip(), answer, found["code"])

    def _say(self, message: Any) -> None:
        assert self._process.stdin is not None
        data = memoryview(json.dumps(message).encode() + b"\n")
        while data:
            data = data[self._process.stdin.write(data) :]

    def _said(self, timeout_s: float) -> dict[str, Any]:
        """Read the next line of the sandbox.

        Raises:
            UsageError: the sandbox reports an error, ended, or takes too long.
        """
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        while b"\n" not in self._read:
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            data = os.read(self._process.stdout.fileno(), 2**20) if ready else b""
            if not data:
                raise UsageError("it ended" if ready else f"no answer in {timeout_s:.0f} s")
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise UsageError(found["error"])
        return found


def _unsupported() -> str | None:
    """The reason why this system cannot isolate programs; ``None`` if nothing speaks against it."""
    if platform.system() != "Linux" or platform.machine() not in sandbox_child.DENIED:
        return f"{platform.system()} on {platform.machine()} is not supported"
    release = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
    return f"Linux {platform.release()} is older than 5.14" if release < (5, 14) else None


def _visible(modules: Mapping[str, str]) -> dict[str, str]:
    """The folders that programs see, each with its path inside the sandbox: the system's, Python's and ``modules``."""
    found: list[Path] = []
    python = {Path(folder).resolve() for folder in (sys.base_prefix, sys.base_exec_prefix)}
    for folder in [*map(Path, SYSTEM), *sorted(python)]:
        if folder.exists() and not any(folder.is_relative_to(outer) for outer in found):
            found.append(folder)
    return {str(folder): str(folder) for folder in found} | dict(modules)


def _map_users(process: int) -> None:
    """Map users into the new user namespace that a process has entered, so that its programs have no privileges.

    If this process runs as root, root and an unprivileged user are mapped, and programs run as the latter: the kernel
    does not limit the number of root's processes.
    """
    nobody, user, group = sandbox_child.NOBODY, os.geteuid(), os.getegid()
    folder = Path(f"/proc/{process}")
    if user == 0:
        try:
            for name in ("uid_map", "gid_map"):
                (folder / name).write_text(f"0 0 1\n{nobody} {nobody} 1\n")
            return
        except PermissionError:
            pass  # a container may lack the unprivileged user: map this process's user alone
    (folder / "uid_map").write_text(f"{nobody} {user} 1\n")
    (folder / "setgroups").write_text("deny")
    (folder / "gid_map").write_text(f"{nobody} {group} 1\n")
