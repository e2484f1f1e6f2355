"""A real ``sshd`` on several loopback addresses, with keys and configuration of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.own_time import HANG_S

SSHD = shutil.which("sshd") or next((p for p in ("/usr/sbin/sshd", "/usr/local/sbin/sshd") if os.path.exists(p)), "")

SERVER = """\
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/user_key.pub
PubkeyAuthentication yes
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UsePAM no
StrictModes no
UseDNS no
PrintMotd no
MaxStartups 100:30:200
SetEnv {environment}
"""

CLIENT = """\
Host host1 host2 host3
  Port {port}
  User {user}
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  LogLevel ERROR
"""


@dataclass(frozen=True)
class Sshd:
    """``config`` is for ``ssh -F``; ``host1`` to ``host3`` are 127.0.0.1 to 127.0.0.3."""

    config: Path
    process: subprocess.Popen[bytes]


@contextmanager
def running_sshd(folder: Path, environment: dict[str, str]) -> Iterator[Sshd]:
    """It runs in the foreground, as a child. Sessions get ``environment``."""
    folder.chmod(0o700)
    if os.getuid() == 0:
        os.makedirs("/run/sshd", mode=0o755, exist_ok=True)  # it wants this folder when root starts it
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    port = _free_port()
    values = " ".join(f'"{name}={value}"' for name, value in environment.items())
    addresses = "".join(f"ListenAddress 127.0.0.{n}:{port}\n" for n in (1, 2, 3))
    (folder / "sshd_config").write_text(addresses + SERVER.format(folder=folder, environment=values))
    public = " ".join((folder / "host_key.pub").read_text().split()[:2])
    (folder / "known_hosts").write_text("".join(f"[127.0.0.{n}]:{port} {public}\n" for n in (1, 2, 3)))
    names = "".join(f"Host host{n}\n  HostName 127.0.0.{n}\n" for n in (1, 2, 3))
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    (folder / "ssh_config").write_text(names + CLIENT.format(folder=folder, port=port, user=user))
    with open(folder / "sshd.log", "wb") as log:
        process = subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "sshd_config"], stdin=subprocess.DEVNULL,
                                   stdout=log, stderr=log, start_new_session=True)  # fmt: skip
    try:
        _wait_for(port, process, folder)
        yield Sshd(folder / "ssh_config", process)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(HANG_S)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def _wait_for(port: int, process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.3", port), 1.0).close()
            return
        except OSError:
            time.sleep(0.02)
    raise AssertionError(f"sshd did not start:\n{(folder / 'sshd.log').read_text()}")
