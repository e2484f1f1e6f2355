"""What ``rlmesh doctor`` says about machines; its judgement is pure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlmesh.agent.machine_checks import Facts, MachineCheck, gather, judge
from rlmesh.cli.commands.doctor import lines
from rlmesh.cli.main import main
from tests.master.launched import TOY, Launched

GOOD = Facts(
    "box", (3, 12), (65536, 65536), (8 << 30, 16 << 30), 1.8e9, 8, 1 << 34, "/run/user/1", resolves=("10.0.0.1",)
)


def verdict(facts: Facts, name: str) -> MachineCheck:
    return next(check for check in judge(facts) if check.name == name)


def test_a_good_machine_passes_every_check() -> None:
    assert all(check.verdict == "ok" for check in judge(GOOD))


@pytest.mark.parametrize(("facts", "name", "state", "says"), [
    (replace(GOOD, python=(3, 10)), "Python", "failed", "3.11"),
    (replace(GOOD, files=(64, 4096)), "descriptors", "failed", "ulimit -n 4096"),
    (replace(GOOD, files=(1024, -1)), "descriptors", "warning", "ulimit -n 65536"),
    (replace(GOOD, shm=(1 << 20, 64 << 20)), "/dev/shm", "failed", "--shm-size"),
    (replace(GOOD, shm=(512 << 20, 1 << 30)), "/dev/shm", "warning", "512 MiB free of 1.0 GiB"),
    (replace(GOOD, shm=(-1, -1)), "/dev/shm", "failed", "mount a tmpfs"),
    (replace(GOOD, base_writable=False), "sockets", "failed", "XDG_RUNTIME_DIR"),
    (replace(GOOD, socket_base="/x" * 50), "sockets", "warning", "/tmp will be used"),
    (replace(GOOD, loopback=False), "ports", "failed", "ip link set lo up"),
    (replace(GOOD, resolves=None), "host name", "warning", "/etc/hosts"),
    (replace(GOOD, resolves=("127.0.1.1",)), "host name", "ok", "box is 127.0.1.1 here"),
    (replace(GOOD, gpu_files=(("/dev/nvidia0",), ("/dev/nvidia1",))), "GPUs", "warning", "/dev/nvidia1"),
    (replace(GOOD, gpu_files=(("/dev/nvidia0",), ()), mask=""), "GPUs", "ok", "CUDA_VISIBLE_DEVICES="),
    (replace(GOOD, at=0.0), "clock", "failed", "1970-01-01"),
    (replace(GOOD, pid_limit=100), "processes", "warning", "ulimit -u"),
])  # fmt: skip
def test_what_is_not_right_is_told_with_what_to_do(facts: Facts, name: str, state: str, says: str) -> None:
    check = verdict(facts, name)
    assert check.verdict == state
    assert says in f"{check.text} {check.advice}"
    assert check.verdict == "ok" or check.advice


def test_doctor_fails_if_a_check_of_this_machine_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert judge(gather(names=False))
    code = main(["doctor"])
    out = capsys.readouterr().out
    assert code == int("FAILED" in out)
    assert "/dev/shm" in out


def test_a_job_does_not_start_on_a_machine_that_is_not_fit(tmp_path: Path) -> None:
    limited = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128)); " \
              "os.execv(sys.executable, [sys.executable, '-m', 'rlmesh.cli.main', *sys.argv[1:]])"  # fmt: skip
    with Launched(["-c", limited, "launch", "--view", "none", str(TOY)], tmp_path) as job:
        assert job.ended() == 1
    assert "PreflightError (RM420)" in job.output
    assert "descriptors: 128 open files (hard limit 128); raise it: " in job.output
    assert not (tmp_path / "runs").exists()  # nothing was begun


def test_advice_stands_under_the_check() -> None:
    shown = list(lines([MachineCheck("a", "ok", "good"), MachineCheck("b", "failed", "bad", "mend it")]))
    assert [line.split() for line in shown] == [["ok", "a", "good"], ["FAILED", "b", "bad"], ["→", "mend", "it"]]
