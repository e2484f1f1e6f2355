"""The examples of environments run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .test_page import ROOT, run

EXAMPLES = ROOT / "examples" / "envs"


@pytest.mark.slow
def test_the_agent_finds_the_exit_of_the_maze(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    done = run(EXAMPLES / "own_environment.py", tmp_path, "--record", "maze.png")
    assert done.returncode == 0, done.stderr
    steps, record = done.stdout.splitlines()
    assert int(steps.split()[-1]) <= 15  # the shortest way has 11
    assert record.startswith("maze.png: return 0.")
    assert (tmp_path / "maze.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_simulators_in_programs_of_their_own(tmp_path: Path) -> None:
    done = run(EXAMPLES / "external.py", tmp_path, "--goal", "60")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) >= 60
    steps = [int(count) for count in re.findall(r"^(\d+) steps", done.stdout, re.MULTILINE)]
    assert all(1024 <= after - before < 1100 for before, after in zip([0, *steps], steps, strict=False))


@pytest.mark.soak
@pytest.mark.slow
def test_the_pendulum_swings_up(tmp_path: Path) -> None:
    done = run(EXAMPLES / "pendulum.py", tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) > -400
