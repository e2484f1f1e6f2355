"""The code blocks of docs/environments.md run, one after the other; and the example."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM_S = 200.0
"""A whole training, also beside many other programs."""
ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.slow
def test_the_blocks_of_the_page_run(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "environments.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) >= 12
    program = "\n".join(blocks).replace("\n", "\n    ")
    (tmp_path / "page.py").write_text(f'if __name__ == "__main__":\n    {program}\n')
    done = run(tmp_path / "page.py", tmp_path)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert float(printed[2]) == pytest.approx(5, abs=1.0)  # the corridor is learnt
    assert "[(0, " in done.stdout


@pytest.mark.slow
def test_the_example_learns(tmp_path: Path) -> None:
    program = ROOT / "examples" / "envs" / "cartpole.py"
    assert len(program.read_text().splitlines()) == 8
    done = run(program, tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) > 400


@pytest.mark.slow
def test_the_example_with_two_players_learns(tmp_path: Path) -> None:
    pytest.importorskip("pettingzoo", reason="PettingZoo is not installed (extra: pettingzoo)")
    done = run(ROOT / "examples" / "envs" / "nim.py", tmp_path)
    assert done.returncode == 0, done.stderr
    *_, evaluation, opening = done.stdout.splitlines()
    assert float(evaluation.split()[-1]) >= 0.8
    assert opening == "it begins by taking 2"


def run(program: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, program, *arguments], cwd=folder, capture_output=True, text=True, timeout=PROGRAM_S,
        check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
