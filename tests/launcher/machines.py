"""Machines made of namespaces: each has its own address, host name, processes and shared memory, and a cable.

Programs that use these addresses run inside one of them only. Needs root, ``ip`` and ``unshare``.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


def why_not() -> str:
    """Why there can be none here; empty if there can."""
    if os.getuid() != 0:
        return "network namespaces need root"
    if missing := [name for name in ("ip", "tc", "nsenter", "unshare") if shutil.which(name) is None]:
        return f"there is no {', '.join(missing)}"
    probe = subprocess.run(["unshare", "--net", "--pid", "--fork", "--mount-proc", "true"], capture_output=True)
    return "" if probe.returncode == 0 else f"no namespaces here: {probe.stderr.decode().strip()}"


BECOME = """
import os, sys
net, name, *rest = sys.argv[1:]
script = 'hostname "$1"; mount -t tmpfs -o size=1G tmpfs /dev/shm; shift; "$@" & wait $!; exit $?'
os.execvp("nsenter", ["nsenter", f"--net=/run/netns/{net}", "unshare", "--uts", "--ipc", "--mount", "--propagation",
    "private", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc", "bash", "-c", script, "_", name,
    sys.executable, "-m", "rlmesh.cli.main", *rest])
"""


@dataclass
class Machines:
    """Numbered from 1; ``10.77.0.<number>``. All hang on one switch, by cables that can be pulled and slowed."""

    prefix: str
    count: int
    names: list[str] = field(default_factory=list)

    def prefix_of(self, number: int) -> list[str]:
        """What goes before ``launch`` so that it runs on that machine, as all of its processes."""
        return ["-c", BECOME, f"{self.prefix}{number}", f"machine{number}"]

    def pull(self, number: int) -> None:
        self._ip("-n", f"{self.prefix}s", "link", "set", f"p{number}", "down")

    def plug(self, number: int) -> None:
        self._ip("-n", f"{self.prefix}s", "link", "set", f"p{number}", "up")

    def slow(self, number: int, rate: str) -> None:
        """Packets to that machine come at most so fast, such as ``8mbit``."""
        subprocess.run(
            ["ip", "netns", "exec", f"{self.prefix}s", "tc", "qdisc", "replace", "dev", f"p{number}", "root", "tbf",
             "rate", rate, "burst", "32kb", "latency", "50ms"], check=True,
        )  # fmt: skip

    def separate(self, one: int, other: int) -> None:
        """These two no longer reach each other; both still reach the rest."""
        for here, there in ((one, other), (other, one)):
            self._ip("-n", f"{self.prefix}{here}", "route", "add", "blackhole", f"10.77.0.{there}/32")

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def up(self) -> None:
        switch = f"{self.prefix}s"
        self._add(switch)
        self._ip("-n", switch, "link", "add", "br0", "type", "bridge")
        self._ip("-n", switch, "link", "set", "br0", "up")
        for number in range(1, self.count + 1):
            name = f"{self.prefix}{number}"
            self._add(name)
            self._ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"p{number}", "netns", switch)
            self._ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            self._ip("-n", name, "link", "set", "eth0", "up")
            self._ip("-n", switch, "link", "set", f"p{number}", "master", "br0", "up")

    def _add(self, name: str) -> None:
        self._ip("netns", "add", name)
        self.names.append(name)
        self._ip("-n", name, "link", "set", "lo", "up")

    def down(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextmanager
def machines(count: int) -> Iterator[Machines]:
    """So many machines, gone at the end."""
    made = Machines(f"rt{secrets.token_hex(2)}", count)
    try:
        made.up()
        yield made
    finally:
        made.down()
