"""Members with children and with daemons of their own session: whoever is killed, none of them stays."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.master.launched import ROOT, alive, command
from tests.own_time import HANG_S, OwnTime

FAMILY = Path(__file__).with_name("family_job.py")
SHELL = 'sleep 2000 & echo "bystander $!"; "$@"; echo "launch ended with $?"; read -r _; kill %1'
WITHIN_S = 5.0


class Shell:
    """A shell that has a process of its own and runs the job in the foreground."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}", "PYTHONUNBUFFERED": "1"}
        words = [sys.executable, "-m", "rlmesh.cli.main", "launch", "--view", "plain", str(FAMILY), *arguments]
        self.process = subprocess.Popen(
            ["bash", "-c", SHELL, "shell", *words], cwd=folder, env=env, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.output = ""
        self._grown = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._grown:
                self.output += line
                self._grown.notify_all()

    def wait_for(self, pattern: str, timeout_s: float = HANG_S) -> re.Match[str]:
        with self._grown:
            found = self._grown.wait_for(lambda: re.search(pattern, self.output), timeout_s)
        assert found, f"{pattern!r} did not come within {timeout_s} s:\n{self.output}"
        return found

    def families(self) -> dict[str, list[int]]:
        """Member, its child and its daemon, by the member's name."""
        self.wait_for("holds 4")
        for rank in range(4):
            self.wait_for(rf"family of ACTOR:{rank}: .*\.")
        found = re.findall(r"family of (\S+): (\d+) (\d+) (\d+)\.", self.output)
        return {name: [int(pid) for pid in pids] for name, *pids in found}

    def launcher(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next(int(pid) for pid in children if "rlmesh.cli.main" in command(int(pid)))

    def close(self) -> None:
        """The shell and its own process have survived; now they end."""
        bystander = int(self.wait_for(r"bystander (\d+)")[1])
        assert self.process.poll() is None
        assert alive(bystander)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(HANG_S)
        self._reader.join(HANG_S)
        self.process.stdout.close()


def assert_gone(pids: list[int], own_time: OwnTime) -> None:
    own_time.holds_within(WITHIN_S, lambda: not any(map(alive, pids)))
    left = {pid: command(pid) for pid in pids if alive(pid)}
    assert not left, f"there {WITHIN_S:g} s later: {left}"


def segments() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith("rlmesh-family")]


def everybody(families: dict[str, list[int]]) -> list[int]:
    assert len(families) == 4
    pids = [pid for family in families.values() for pid in family]
    assert all(map(alive, pids))
    return pids


@pytest.mark.slow
@pytest.mark.case("O10")
@pytest.mark.parametrize("what", ["launcher killed", "Ctrl-C", "actor crashes", "actor killed"])
def test_nothing_is_left_behind(tmp_path: Path, what: str, own_time: OwnTime) -> None:
    before = segments()
    shell = Shell(tmp_path, *(["--crash"] if what == "actor crashes" else []))
    try:
        if what == "actor crashes":
            for rank in range(4):
                shell.wait_for(rf"family of ACTOR:{rank}: .*\.")
            pids = [int(pid) for line in re.findall(r"family of .*: (.*)\.", shell.output) for pid in line.split()]
            shell.wait_for(r"ACTOR:2 .*SIGSEGV")
        else:
            families = shell.families()
            pids = everybody(families)
            launcher = shell.launcher()
            if what == "launcher killed":
                os.kill(launcher, signal.SIGKILL)
            elif what == "Ctrl-C":
                os.kill(launcher, signal.SIGINT)
            else:
                os.kill(families["ACTOR:1"][0], signal.SIGKILL)
        assert_gone(pids, own_time)
        code = {"launcher killed": 137, "Ctrl-C": 130}.get(what, 1)
        shell.wait_for(f"launch ended with {code}")
        assert segments() == before
    finally:
        shell.close()


@pytest.mark.slow
@pytest.mark.case("O10")
def test_an_actor_that_is_killed_takes_its_own_along_and_nobody_elses(tmp_path: Path, own_time: OwnTime) -> None:
    shell = Shell(tmp_path, "--restart")
    try:
        families = shell.families()
        pids = everybody(families)
        os.kill(families["ACTOR:1"][0], signal.SIGKILL)
        assert_gone(families["ACTOR:1"], own_time)
        others = [pid for name in ("ACTOR:0", "ACTOR:2", "ACTOR:3") for pid in families[name]]
        assert all(map(alive, others))
        os.kill(shell.launcher(), signal.SIGINT)
        assert_gone(pids, own_time)
        shell.wait_for("launch ended with 130")
    finally:
        shell.close()
