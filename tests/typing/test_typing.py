"""Type checkers on programs that use groups: what they infer, and what they refuse."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
LIMIT_S = 100


def marked() -> set[int]:
    """Lines of the wrong program that must be refused."""
    lines = (HERE / "wrong.py").read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if "# wrong" in line}


@pytest.fixture(scope="module")
def mypy_errors() -> dict[str, set[int]]:
    files = [str(HERE / "right.py"), str(HERE / "wrong.py")]
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--show-absolute-path", *files]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    found: dict[str, set[int]] = {"right.py": set(), "wrong.py": set()}
    for line in run.stdout.splitlines():
        if match := re.match(r"(.*):(\d+): error: ", line):
            found.setdefault(Path(match[1]).name, set()).add(int(match[2]))
    assert not run.stderr, run.stderr
    return found


@pytest.fixture(scope="module")
def pyright_errors() -> dict[str, set[int]]:
    """Skipped where pyright is not installed or cannot get the Node.js that it needs."""
    pyright = shutil.which("pyright", path=str(Path(sys.executable).parent)) or shutil.which("pyright")
    if pyright is None:
        pytest.skip("pyright is not installed")
    try:
        subprocess.run([pyright, "--version"], check=True, capture_output=True, timeout=LIMIT_S)
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"pyright does not run here: {error}")
    files = [str(HERE / "right.py"), str(HERE / "wrong.py")]
    command = [pyright, "--outputjson", "--pythonpath", sys.executable, *files]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    found: dict[str, set[int]] = {"right.py": set(), "wrong.py": set()}
    for diagnostic in json.loads(run.stdout)["generalDiagnostics"]:
        if diagnostic["severity"] == "error":
            name = Path(diagnostic["file"]).name
            found.setdefault(name, set()).add(diagnostic["range"]["start"]["line"] + 1)
    return found


def test_mypy_infers_results_and_refuses_wrong_calls(mypy_errors: dict[str, set[int]]) -> None:
    assert mypy_errors == {"right.py": set(), "wrong.py": marked()}


@pytest.mark.slow
def test_pyright_infers_results_and_refuses_wrong_calls(pyright_errors: dict[str, set[int]]) -> None:
    assert pyright_errors == {"right.py": set(), "wrong.py": marked()}
