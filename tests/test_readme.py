"""What the README shows is what is there: its hello world is the file, its output that of a real run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
HELLO = ROOT / "examples" / "hello.py"
GRPO = ROOT / "examples" / "grpo.py"
CARTPOLE = ROOT / "examples" / "envs" / "cartpole.py"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_readme_and_the_hello_world_stay_short() -> None:
    assert len(README.splitlines()) <= 150
    assert len(HELLO.read_text().splitlines()) <= 25


def test_the_readme_shows_the_files() -> None:
    assert blocks("python") == [HELLO.read_text(), GRPO.read_text(), CARTPOLE.read_text()]


def test_the_readme_shows_the_output(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(HELLO)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert [result.stdout] == blocks("text")


def test_its_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert links
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


@pytest.mark.parametrize("command", ["demo", "test"])
def test_its_commands_are_targets(command: str) -> None:
    assert f"make {command} " in README
    assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
