"""Nodes over a real sshd on loopback addresses. Needs openssh-server, which .ci/run installs."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.nodes import SPREAD
from tests.launcher.sshd import SSHD, Sshd, running_sshd
from tests.leaks import MARKER
from tests.master.launched import ROOT, Launched, alive, command, descendants
from tests.own_time import OwnTime

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SSHD, reason="there is no sshd (package openssh-server)"),
]


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory, session_leak_guard: None) -> Iterator[Sshd]:
    environment = {
        name: os.environ[name] for name in (MARKER, "XDG_RUNTIME_DIR", "PATH") if name in os.environ
    } | {"PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}", "HOME": str(tmp_path_factory.mktemp("home"))}  # fmt: skip
    with running_sshd(tmp_path_factory.mktemp("sshd"), environment) as running:
        yield running


def hosts_file(folder: Path, sshd: Sshd, *names: str) -> Path:
    text = f'python = "{sys.executable}"\nssh_options = ["-F", "{sshd.config}"]\n'
    path = folder / "hosts.toml"
    path.write_text(text + "".join(f'[[host]]\nname = "{name}"\n' for name in names))
    return path


def over_ssh(folder: Path, sshd: Sshd, *arguments: str, names: tuple[str, ...] = ("host1", "host2")) -> Launched:
    hosts = hosts_file(folder, sshd, *names)
    words = ["--hosts", str(hosts), "--view", "plain", "--run-dir", str(folder / "run"), str(SPREAD), *arguments]
    return Launched(["-m", "rlmesh.cli.main", "launch", *words], folder)


def launches(folder: Path) -> list[int]:
    """All processes on the remote side, which are no descendants of the launcher, by the folder that they name."""
    return [int(e) for e in os.listdir("/proc") if e.isdigit() and f"{folder}/run" in command(int(e))]


def gone(pids: list[int], within_s: float, own_time: OwnTime) -> bool:
    return own_time.holds_within(within_s, lambda: not any(map(alive, pids)))


def with_all_below(pids: list[int]) -> list[int]:
    return sorted({below for pid in pids for below in [pid, *descendants(pid)]})


def test_a_job_runs_on_two_hosts(tmp_path: Path, sshd: Sshd) -> None:
    with over_ssh(tmp_path, sshd, "--torch") as launched:
        assert launched.ended() == 0, launched.output
    assert "rlmesh: node 0 of 2 listens at 127.0.0.1:" in launched.output
    assert "sums [3, 3]" in launched.output
    assert launched.output.count("SPREAD:1 | SPREAD:1 is pid") == 1
    for rank in (0, 1):
        report = json.loads((tmp_path / "run" / f"exit-node{rank}.json").read_text())
        assert all(item["removed"] for item in report["leftovers"]), report


def test_the_exit_code_is_the_scripts(tmp_path: Path, sshd: Sshd) -> None:
    with over_ssh(tmp_path, sshd, "--fail") as launched:
        assert launched.ended() == 1
    assert "no luck in run" in launched.output


def test_the_key_is_on_no_command_line(tmp_path: Path, sshd: Sshd) -> None:
    with over_ssh(tmp_path, sshd, "--sleep", "60") as launched:
        launched.wait_for("step 0")
        keys = [path.read_text().strip() for path in Path(os.environ["XDG_RUNTIME_DIR"]).glob("rlm-*/n*/key")]
        seen = "".join(command(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())
        environments = "".join(_environment(pid) for pid in with_all_below(launches(tmp_path)))
        launched.interrupt()
        assert launched.ended() == 130, launched.output
    assert len(keys) == 2
    assert not any(key in seen or key in environments for key in keys)


SECRETS = {
    "API_TOKEN": 'sk-it\'s "so" `id` $HOME $(id)',
    "CERTIFICATE": "-----BEGIN-----\nMIIB'q\"x\n\n-----END-----\n",
    "PHRASE": "  pass  phrase\twith \\n and \\ ",
    "GREETING": "Á ü 漢字 🙂",
}
PARTS = ("sk-it", "$(id)", "BEGIN", "MIIB", "pass  phrase", "漢字")
"""Of the values, such as no quoting would change."""


def test_variables_of_a_host_are_on_no_command_line_and_arrive_as_they_are(tmp_path: Path, sshd: Sshd) -> None:
    hosts = hosts_file(tmp_path, sshd, "host1", "host2")
    values = ", ".join(f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in SECRETS.items())
    hosts.write_text(f"env = {{ {values} }}\n" + hosts.read_text())
    seen: set[str] = set()
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.002):
            seen.update(command(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())

    watching = threading.Thread(target=watch)
    watching.start()  # before the start of anything: commands that stand only for a moment count
    try:
        words = ["--hosts", str(hosts), "--view", "plain", "--run-dir", str(tmp_path / "run"), str(SPREAD)]
        with Launched(["-m", "rlmesh.cli.main", "launch", *words, "--sleep", "60"], tmp_path) as launched:
            launched.wait_for("step 0")
            arrived = [_environment(pid) for pid in with_all_below(launches(tmp_path))]
            launched.interrupt()
            assert launched.ended() == 130, launched.output
    finally:
        stop.set()
        watching.join()
    # Nodes are recognised by their mark; what has only just been forked has none of its own yet.
    whole = [text for text in arrived if "API_TOKEN=" in text]
    assert len(whole) > 8
    for name, value in SECRETS.items():
        assert all(f"{name}={value}\0" in text for text in whole), name
    assert not [each for each in seen if any(part in each for part in PARTS)]
    assert any("--key-stdin" in each for each in seen)
    assert not any(part in launched.output for part in PARTS)


def _environment(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return ""


def test_a_launcher_that_is_killed_ends_the_hosts(tmp_path: Path, sshd: Sshd, own_time: OwnTime) -> None:
    with over_ssh(tmp_path, sshd, "--sleep", "60") as launched:
        launched.wait_for("step 0")
        pids = with_all_below(launches(tmp_path))
        assert len(pids) > 8
        os.kill(launched.process.pid, signal.SIGKILL)
        assert gone(pids, 8.0, own_time), [command(pid) for pid in pids if alive(pid)]


def test_a_host_that_dies_fails_the_job(tmp_path: Path, sshd: Sshd) -> None:
    with over_ssh(tmp_path, sshd, "--sleep", "60") as launched:
        launched.wait_for("step 0")
        (other,) = [pid for pid in launches(tmp_path) if "--node-rank 1" in command(pid) and "ssh" not in command(pid)]
        os.kill(other, signal.SIGKILL)
        assert launched.ended() == 1
    assert "node" in launched.output


def test_the_host_of_the_script_dies(tmp_path: Path, sshd: Sshd, own_time: OwnTime) -> None:
    with over_ssh(tmp_path, sshd, "--sleep", "60") as launched:
        launched.wait_for("step 0")
        pids = with_all_below(launches(tmp_path))
        (head,) = [pid for pid in launches(tmp_path) if "--node-rank 0" in command(pid) and "ssh" not in command(pid)]
        os.kill(head, signal.SIGKILL)
        assert launched.ended() == 1
        assert "host1, which runs the script, is gone" in launched.output
        assert gone(pids, 5.0, own_time)


def test_a_host_that_cannot_be_reached_is_named_at_once(tmp_path: Path, sshd: Sshd, own_time: OwnTime) -> None:
    began = time.monotonic()
    with over_ssh(tmp_path, sshd, names=("host1", "nowhere.invalid")) as launched:
        assert launched.ended() == 1
    assert "host nowhere.invalid (node 1) is not part of the job" in launched.output
    assert "nowhere.invalid: ssh: Could not resolve hostname" in launched.output
    assert own_time.since(began) < 15.0


def test_over_ssh_each_of_three_hosts_gets_its_members(tmp_path: Path, sshd: Sshd) -> None:
    with over_ssh(tmp_path, sshd, "--nodes", "3", names=("host1", "host2", "host3")) as launched:
        assert launched.ended() == 0, launched.output
    assert "places [(0, 0), (1, 1), (2, 2)]" in launched.output
