"""Seeded kills, standstills and jumps of the wall clock: a few for each change, all of them before a release."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(folder: Path, program: str, *arguments: str) -> str:
    """The last line of one of the programs; the test fails with all lines if one of its tries went wrong."""
    command = [sys.executable, str(BENCHMARKS / program), *arguments, "--keep", str(folder / "wrong")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    kept = "".join(f"\n== {path.name}\n{path.read_text()}" for path in sorted(folder.glob("wrong/*")))
    assert done.returncode == 0, done.stdout + done.stderr + kept
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_jobs_end_right_whoever_dies(tmp_path: Path) -> None:
    told = run(tmp_path, "kills.py", "--kills", "30", "--seed", "1", "--at-once", "4")
    assert told == "30 of 30 ended right, seed 1"


@pytest.mark.slow
@pytest.mark.case("b20")
@pytest.mark.timeout(300)
def test_jobs_go_on_after_standstills(tmp_path: Path) -> None:
    words = ["--standstills", "4", "--longest", "4", "--jumps", "0", "--at-once", "4"]
    assert run(tmp_path, "standstills.py", *words) == "4 of 4 went on, seed 1"


@pytest.mark.slow
@pytest.mark.case("a05")
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("cc") is None, reason="the library that shifts the wall clock needs a C compiler")
def test_jobs_go_on_when_the_wall_clock_is_set(tmp_path: Path) -> None:
    words = ["--standstills", "0", "--jumps", "4", "--at-once", "2"]
    assert run(tmp_path, "standstills.py", *words) == "4 of 4 went on, seed 1"


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_three_hundred_kills_end_right(tmp_path: Path) -> None:
    assert run(tmp_path, "kills.py", "--kills", "300", "--seed", "12") == "300 of 300 ended right, seed 12"


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_jobs_go_on_after_forty_standstills_and_jumps(tmp_path: Path) -> None:
    assert run(tmp_path, "standstills.py", "--seed", "12") == "40 of 40 went on, seed 12"
