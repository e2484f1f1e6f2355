"""Rendezvous of the tasks of a Slurm step: the head binds a port that the system chooses, and publishes it in a file.

The file lies in a folder that all nodes see. Nobody else can forge its content: it is signed with the job's key
if all tasks have that from the environment, else it is a MUNGE credential that only this user can decode,
and that has the key. No ports are tried, and no key is on a command line or in a file that can be read without
the cluster's MUNGE key.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rlmesh import private_files
from rlmesh.errors import LaunchError, UsageError
from rlmesh.runtime.connections.security import KEY_TEXT_VARIABLE, make_key
from rlmesh.runtime.transport.inet import join_host_port, split_host_port

__all__ = ["FOLDER_VARIABLE", "MUNGE_SOCKET_VARIABLE", "HeadGone", "Munge", "ServerAddress", "SlurmRendezvous"]

FOLDER_VARIABLE = "RLMESH_RENDEZVOUS_DIR"
MUNGE_SOCKET_VARIABLE = "RLMESH_MUNGE_SOCKET"
MUNGE_TIMEOUT_S = 20.0
TTL_S = 3600
"""Seconds for which a credential can be decoded; munged's default maximum."""
STALE_S = 7 * 86400.0
"""An older file is left from a start that ended without removing it."""
WRITE_TRIES = 5
_GAVE_UP = b"gave up: "
_REPLAYED = 17
"""Exit code of unmunge for a credential that another task of the job decoded on this machine before."""


class Munge:
    """The ``munge`` and ``unmunge`` commands. ``socket``: munged's socket, if not at the default path."""

    def __init__(self, socket: str = "", uid: int | None = None) -> None:
        self._options = [f"--socket={socket}"] if socket else []
        self._uid = os.getuid() if uid is None else uid

    def seal(self, payload: bytes) -> bytes:
        """Create a credential that only this user can decode.

        Raises:
            LaunchError: it could not be created.
        """
        return self._run(
            ["munge", f"--restrict-uid={self._uid}", f"--ttl={TTL_S}", *self._options], payload, ()
        ).strip()

    def open(self, credential: bytes) -> bytes:
        """Decode a credential that this user created.

        Raises:
            LaunchError: the data is not a credential, or another user's.
        """
        text = self._run(["unmunge", *self._options], credential, (_REPLAYED,))
        head, _, payload = text.partition(b"\n\n")
        made_by = next((line for line in head.splitlines() if line.startswith(b"UID:")), b"")
        if made_by.rpartition(b"(")[2].rstrip(b") ") != str(self._uid).encode():
            raise LaunchError(f"the credential was not made by user {self._uid}: {made_by.decode(errors='replace')}")
        return payload

    def _run(self, command: list[str], data: bytes, allowed: tuple[int, ...]) -> bytes:
        try:
            done = subprocess.run(command, input=data, capture_output=True, timeout=MUNGE_TIMEOUT_S)
        except FileNotFoundError:
            raise LaunchError(
                f"there is no {command[0]} on this node, so the job's key cannot be handed to its tasks: set "
                f"{KEY_TEXT_VARIABLE} in the sbatch script (`rlmesh launch --slurm` writes one that does), or give "
                "every task --key-file"
            ) from None
        except subprocess.TimeoutExpired:
            raise LaunchError(f"{command[0]} gave no answer within {MUNGE_TIMEOUT_S:g} s; is munged running?") from None
        if done.returncode and done.returncode not in allowed:
            said = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
            raise LaunchError(f"{command[0]} failed: {said}")
        return done.stdout


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The endpoint of the head, and the job's key."""

    host: str
    port: int
    key: bytes = field(repr=False)


class SlurmRendezvous:
    """The rendezvous of one step.

    Args:
        folder: the folder for the file, visible to all nodes.
        name: a name that only this start of the step has.
        key: the key, if all tasks have it already; without it the file carries one, by ``munge``.
    """

    def __init__(
        self, folder: Path, name: str, key: bytes | None, munge: Munge | None = None, *,
        clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self._folder, self._name, self._munge = folder, name, munge or Munge()
        self._given = key
        self._clock, self._sleep = clock, sleep
        self.path = folder / f"{name}.head"

    def make_key(self) -> bytes:
        """The key for the head: the given one, else a new one."""
        return self._given or make_key()

    def publish(self, host: str, port: int, key: bytes) -> None:
        """Publish the head's endpoint. The file appears whole or not at all.

        Raises:
            LaunchError: the file cannot be written.
        """
        values = {"name": self._name, "endpoint": join_host_port(host, port)}
        if self._given is not None:
            body = json.dumps(values).encode()
            content = body + b"\n" + _signature(key, body)
        else:
            content = self._munge.seal(json.dumps({**values, "key": key.hex()}).encode())
        self._write(content)

    def give_up(self, why: str, code: int = 1) -> None:
        """Tell late tasks that the head is gone, so that they do not wait for it, and their exit code. The file is not
        signed: any file of this user is enough to make a task end. It stays until a later start finds it old."""
        try:
            self._write(_GAVE_UP + json.dumps({"name": self._name, "why": why, "code": code}).encode())
        except LaunchError:
            pass  # late tasks wait until their timeout

    def _write(self, content: bytes) -> None:
        try:
            for tries_left in reversed(range(WRITE_TRIES)):
                private_files.make_private(self._folder)
                private_files.make_folder(self._folder, secret=True)
                self._prune()
                try:
                    private_files.write_whole(self.path, content + b"\n", secret=True)
                    break
                except FileNotFoundError:  # another job ended just now and removed the folder, which was empty
                    if not tries_left:
                        raise
        except OSError as error:
            raise LaunchError(
                f"the head cannot say where it listens: {error}. All nodes must be able to use {self._folder}; name "
                f"another folder by {FOLDER_VARIABLE}"
            ) from None

    def _prune(self) -> None:
        """Remove files of earlier starts."""
        for path in self._folder.glob("*.head"):
            with suppress(FileNotFoundError):  # its job ended just now
                if time.time() - path.stat().st_mtime > STALE_S:
                    path.unlink()

    def find(self, timeout_s: float) -> ServerAddress:
        """Wait for the file and read it.

        Raises:
            LaunchError: it did not appear in time, or belongs to another job.
        """
        deadline, pause_s = self._clock() + timeout_s, 0.02
        while True:
            content = self._read()
            if content is not None:
                return self._understand(content)
            if self._clock() >= deadline:
                raise LaunchError(
                    f"the head (task 0) did not say within {timeout_s:g} s where it listens: there is no {self.path} "
                    f"here. Did task 0 start, and do all nodes see that folder? Name another one by {FOLDER_VARIABLE}"
                )
            self._sleep(pause_s)
            pause_s = min(1.0, pause_s * 1.5)

    def _read(self) -> bytes | None:
        try:
            os.listdir(self._folder)  # makes a network file system refresh its view
            return private_files.read(self.path).strip()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise LaunchError(f"{self.path} cannot be read: {error}") from None

    def _understand(self, content: bytes) -> ServerAddress:
        if content.startswith(_GAVE_UP) and self.path.stat().st_uid == os.getuid():
            raise _gone(content[len(_GAVE_UP) :])
        key = self._given
        body = content
        if key is not None:
            body, _, signature = content.rpartition(b"\n")
            if not hmac.compare_digest(_signature(key, body), signature):
                raise LaunchError(f"{self.path} is not signed with this job's key: do all tasks have the same one?")
        else:
            body = self._munge.open(content)
        try:
            values = json.loads(body)
            if values["name"] != self._name:
                raise LaunchError(f"{self.path} is of another start of the job: {values['name']}")
            host, port = split_host_port(values["endpoint"])
            return ServerAddress(host, port, key or bytes.fromhex(values["key"]))
        except (ValueError, KeyError, TypeError, UsageError) as error:
            raise LaunchError(f"{self.path} holds no endpoint: {type(error).__name__}: {error}") from None

    def forget(self) -> None:
        """Remove the file, and its folder if that is empty."""
        self.path.unlink(missing_ok=True)
        try:
            self._folder.rmdir()
        except OSError:
            pass


class HeadGone(LaunchError):
    """The head ended before this task came; ``exit_code`` is its exit code."""

    exit_code: int = 1


def _gone(content: bytes) -> HeadGone:
    try:
        values = json.loads(content)
        error = HeadGone(f"the head (task 0) gave up: {values['why']}")
        error.exit_code = int(values["code"])
    except (ValueError, KeyError, TypeError):
        error = HeadGone("the head (task 0) gave up")
    return error


def _signature(key: bytes, body: bytes) -> bytes:
    return hmac.new(key, b"rlmesh-head\n" + body, hashlib.sha256).hexdigest().encode()
